"""What Luminosity changes in Beam when it is imported: fewer imports, no TensorFlow, less noise."""
