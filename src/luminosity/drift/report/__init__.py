"""The result of a test as one HTML page without scripts, which loads nothing from the network."""
