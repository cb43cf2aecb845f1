"""``lum run project.toml``: several steps in order, from raw data to a report."""
