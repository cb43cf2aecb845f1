"""``lum ui``, and the page of ``lum run --ui``."""
