"""What Luminosity changes in Beam when it is imported: fewer imports, no TensorFlow, quicker building, less noise."""
