"""``lum checkpoint`` and ``lum state``: look into the checkpoint of a run."""
