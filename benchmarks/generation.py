"""What one accelerator writes: a language model in slots, behind a pipeline, beside what transformers does.

    python benchmarks/generation.py                        # everything: at most 300 s on an NVIDIA H200
    python benchmarks/generation.py --only slots,prefix    # these sections
    python benchmarks/generation.py --small                # tiny sizes, also without a CUDA device: a try

Each section runs in a process of its own. One that fails prints its error, the others go on, and the exit code is 1.
"""

from __future__ import annotations

from _sections import main

_SECTIONS = {
    "start": ("_generation_slots", 60),
    "slots": ("_generation_slots", 90),
    "batches": ("_generation_others", 80),
    "continuous": ("_generation_others", 80),
    "prefix": ("_generation_slots", 60),
    "equality": ("_generation_others", 60),
}
"""The module with each section's function, and the seconds after which the section counts as failed."""

if __name__ == "__main__":
    main(__doc__, _SECTIONS, "_generation_models")
