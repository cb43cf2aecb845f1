"""``LuminosityRunner``: a Beam runner for one machine, with one pool of workers per kind of resource."""
