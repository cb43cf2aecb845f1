"""What a run has on each node of a cluster: an agent, which forks its workers there and moves their blocks."""
