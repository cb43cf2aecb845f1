"""What one accelerator does: encoders alone and in pipelines, several models, too little memory, images, drift.

    python benchmarks/accelerator.py                        # everything: at most 400 s on an NVIDIA H200
    python benchmarks/accelerator.py --only module,drift    # these sections
    python benchmarks/accelerator.py --small                # tiny sizes, also without a CUDA device: a try

Each section runs in a process of its own. One that fails prints its error, the others go on, and the exit code is 1.
"""

from __future__ import annotations

from _sections import main

_SECTIONS = {
    "module": ("_accelerator_encoder", 60),
    "equality": ("_accelerator_encoder", 120),
    "pipeline": ("_accelerator_pipelines", 150),
    "three_models": ("_accelerator_pipelines", 110),
    "out_of_memory": ("_accelerator_pipelines", 60),
    "classifier": ("_accelerator_pipelines", 60),
    "images": ("_accelerator_images", 110),
    "drift": ("_accelerator_drift", 120),
}
"""The module with each section's function, and the seconds after which the section counts as failed."""

if __name__ == "__main__":
    main(__doc__, _SECTIONS, "_accelerator_models")
