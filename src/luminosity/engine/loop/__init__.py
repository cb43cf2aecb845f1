"""The scheduler: which bundle runs next, where, and what its commit changes."""
