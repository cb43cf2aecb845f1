"""How a person sees a run: live on a terminal, in plain lines, in a summary."""
