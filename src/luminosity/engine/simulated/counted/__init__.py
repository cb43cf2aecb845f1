"""Simulated workers whose elements are counts, and the parts of a run for them: the loop of ``lum simulate``."""
