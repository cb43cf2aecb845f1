"""``lum bench``: finds the settings that suit a model, tried on your own data, each in its own processes."""
