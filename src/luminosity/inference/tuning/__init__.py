"""Which settings suit a model: tried out on the user's own data, each in a process of its own."""
