"""Groupings over unbounded input: which panes fire when, what is kept of open windows, and how it is saved."""
