"""The workers of a run on the nodes of a cluster, as the driver sees them."""
