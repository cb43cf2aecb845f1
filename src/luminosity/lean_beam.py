"""Beam imported at less cost: without collecting garbage, and its inference without torch."""

from __future__ import annotations

import gc
import importlib
import resource
import sys

from luminosity import noise

__all__ = ["import_beam", "import_lean"]

_BASE = "apache_beam.ml.inference.base"
_MODEL_MANAGER = "apache_beam.ml.inference.model_manager"


def import_beam() -> None:
    """Import Beam, for commands that need it anyway. Imports make no garbage worth the search: a tenth of the time."""
    noise.quiet()
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("apache_beam")
    finally:
        if was_enabled:
            gc.enable()
    gc.freeze()  # What was imported stays: no later search need look at it.


def import_lean() -> None:
    """Import Beam's base module; where torch is installed that saves 2 s and 200 MB in each process that needs none.

    Beam imports its model manager only if it can, and once more where it is used: then it finds it.
    """
    noise.quiet()
    if _BASE in sys.modules or _MODEL_MANAGER in sys.modules:
        return
    sys.modules[_MODEL_MANAGER] = None  # type: ignore[assignment]  # So that importing it fails.
    try:
        base = importlib.import_module(_BASE)
    finally:
        del sys.modules[_MODEL_MANAGER]
    base.resource = resource  # type: ignore[attr-defined]  # Beam gives it up together with the model manager.
