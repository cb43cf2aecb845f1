"""RunInference and what stands behind it: handlers, batching, the model host."""
