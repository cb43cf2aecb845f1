"""Drawings of a plan: text for a terminal, SVG for a browser, DOT for Graphviz."""
