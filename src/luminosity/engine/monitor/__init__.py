"""Consumers of a run's events: views, the recorder, subscribers; and the sampling of memory and devices."""
