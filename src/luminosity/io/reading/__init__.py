"""How files become record batches, a format in a file each."""
