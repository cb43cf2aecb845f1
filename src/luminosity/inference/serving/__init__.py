"""A model behind HTTP: the process's model host, asked by requests instead of bundles."""
