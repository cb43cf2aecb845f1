"""``lum bench``: find the settings that suit a model."""
