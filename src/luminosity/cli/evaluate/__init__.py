"""The command ``lum evaluate``."""
