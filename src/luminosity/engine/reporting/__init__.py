"""Reports of a run about itself: events as they happen, and snapshots of its stages, pools and devices."""
