"""Sums of kernel values on a GPU, where the matrix product, the exponential and the sum are one kernel."""
