"""What Beam's SDK does differently in our workers: data, state, batches and shared models."""
