"""Manifests of runs: what a run was made from, and digests of what it has written."""
