"""Pools that grow and shrink while a run on a cluster lasts: the rule, the work that is left, and what follows."""
