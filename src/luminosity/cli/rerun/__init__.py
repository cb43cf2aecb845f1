"""``lum rerun``: do a run again, and compare what it writes."""
