"""Worker processes: how they are started, what runs in them, and how blocks travel to and from them."""
