"""``lum simulate``: what a larger run would take."""
