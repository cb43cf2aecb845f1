"""Side inputs: those that are complete before they are read, those that are read window by window, and the wait."""
