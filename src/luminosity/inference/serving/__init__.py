"""``lum serve``: a model behind HTTP, with the same model host as in a pipeline."""
