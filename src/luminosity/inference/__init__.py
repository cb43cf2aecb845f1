"""RunInference and Enrich, and what they are made of: handlers, batching, the model host."""
