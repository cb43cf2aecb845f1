"""Drift in pipelines: two samples compared by all workers together, on any Beam runner."""
