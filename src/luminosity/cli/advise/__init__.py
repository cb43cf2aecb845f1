"""``lum advise``: what a run was given, what it used, and what to write instead."""
