"""How files become record batches: finding, opening and splitting them, and a reader for each format."""
