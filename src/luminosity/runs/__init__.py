"""The runs of a machine: their records, journals, manifests and views, and the sampling of memory and devices."""
