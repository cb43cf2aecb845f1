"""The command ``lum evaluate``: compare predictions with labels."""
