"""What only a run on a Ray cluster has: the driver's side, the agent of each node, its workers, and what they share."""
