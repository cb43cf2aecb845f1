"""Evaluations and descriptions of tables as HTML pages without scripts."""
