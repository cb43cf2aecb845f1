"""``lum export``: the description of a pipeline as a job of another engine."""
