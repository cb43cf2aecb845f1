"""Views of a run: live on a terminal, in plain lines, and a summary at the end."""
