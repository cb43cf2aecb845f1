"""The real loop in simulated time: every wait, delay, death and crash of a run follows from a seed."""
