"""Prompts over the columns of a table, with answers of a type: ``Prompt``."""
