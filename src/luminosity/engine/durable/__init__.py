"""Durable runs: a checkpoint of everything that a run holds, from which the next start of the pipeline continues."""
