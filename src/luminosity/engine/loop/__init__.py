"""The loop that runs a pipeline: it starts bundles in workers, commits their results and advances watermarks.

Everything here runs on the run's own thread, unless a docstring says otherwise.
"""
