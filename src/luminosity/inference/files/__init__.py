"""Model files from any Beam filesystem, fetched once per machine and kept in a cache."""
