"""The shared host: one process per machine that holds a model host for all workers of a run."""
