"""``lum advise``: what each pool and step was given, what it used, and what to write instead."""
