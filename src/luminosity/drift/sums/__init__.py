"""Sums of kernel values over pairs of bins, on CPUs and accelerators: the large part of a test's work."""
