"""Watches tests for drift over time: records them, alerts when the state of a key changes, and shows them on a page."""
