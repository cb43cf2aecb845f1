"""The command ``lum describe``."""
