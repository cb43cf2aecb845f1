"""RunInference and Enrich, and what they are made of: handlers, batching, the model host."""

from luminosity.beam_fixes.lean_beam import import_lean

import_lean()
