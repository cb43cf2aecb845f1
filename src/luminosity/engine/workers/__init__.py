"""Worker processes: their start and end, the code that runs in them, and the channel for blocks."""
