"""What is seen of a run: its events, and all that listens to them."""
