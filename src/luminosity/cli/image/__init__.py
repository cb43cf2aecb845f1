"""``lum image``: write the recipe of a container image."""
