"""Doing things again: ``lum rerun`` repeats a run and compares, ``lum run project.toml`` repeats what has changed."""
