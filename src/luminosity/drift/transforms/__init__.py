"""Beam transforms that compare two samples, with all workers together, on any runner."""
