"""RunInference and what stands behind it: handlers, batching, the model host."""

from luminosity.lean_beam import import_lean

import_lean()
