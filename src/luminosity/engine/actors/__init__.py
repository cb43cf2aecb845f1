"""Workers and node agents as actors of a Ray cluster: what runs in them, and the driver's side of it."""
