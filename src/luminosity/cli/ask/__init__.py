"""The command ``lum ask``."""
