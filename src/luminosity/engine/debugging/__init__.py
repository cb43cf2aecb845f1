"""A failed element: saved, with all that it needs, and run again alone."""
