"""What the engine holds beyond its memory budget: counted, compressed, on disk."""
