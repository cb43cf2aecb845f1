"""The command ``lum drift``."""
