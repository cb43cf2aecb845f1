"""``LuminosityRunner``: a Beam runner for one machine or a Ray cluster, with a pool of workers per kind of resource."""
