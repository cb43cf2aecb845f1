"""``lum bench``: finds the settings that suit a model."""
