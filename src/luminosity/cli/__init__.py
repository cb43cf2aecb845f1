"""The command ``lum``."""
