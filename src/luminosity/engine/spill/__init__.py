"""Data beyond the memory budget: how memory is counted, and how data is compressed and kept on disk."""
