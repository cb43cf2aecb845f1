"""Saving and replaying failed elements: save one with everything it needs, and run it again alone."""
