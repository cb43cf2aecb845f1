"""Models behind HTTP: what to say to which kind of server, and how to keep asking politely."""
