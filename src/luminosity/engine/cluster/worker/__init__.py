"""What is different in a worker on a node of a cluster: its blocks go through the node's agent."""
