"""Models from anywhere: files on any Beam filesystem, fetched once per machine."""
