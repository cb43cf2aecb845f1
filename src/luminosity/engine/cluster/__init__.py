"""A Ray cluster: the connection to it, what its nodes have, and what a run sends to them."""
