"""How a checkpoint gets from one version of a pipeline to the next."""
