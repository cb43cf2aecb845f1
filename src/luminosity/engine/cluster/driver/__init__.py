"""The driver of a run on a cluster: the connection, the nodes, their agents, and the workers as the loop sees them."""
