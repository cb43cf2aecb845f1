"""A generator with slots: rows start and end by themselves, and all that are under way take each step together."""
