"""A plan for the eye: as text, for Graphviz, and as a picture."""
