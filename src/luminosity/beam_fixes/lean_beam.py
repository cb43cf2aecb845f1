"""Faster imports of Beam: without garbage collection, and Beam's inference module without torch."""

from __future__ import annotations

import gc
import importlib
import resource
import sys

__all__ = ["collect_seldom", "import_beam", "import_lean"]

_BASE = "apache_beam.ml.inference.base"
_MODEL_MANAGER = "apache_beam.ml.inference.model_manager"
# Frozen objects no longer count as long-lived. With Python's own thresholds a worker would then search its whole heap
# after every few thousand allocations, which takes a tenth of the time of a stage that makes many small objects.
_COLLECT_AFTER = (10_000, 20, 50)


def import_beam() -> None:
    """Import Beam without collecting garbage, of which imports make little. Saves a tenth of the time."""
    was_enabled = gc.isenabled()
    gc.disable()
    try:
        importlib.import_module("apache_beam")
    finally:
        if was_enabled:
            gc.enable()
    gc.freeze()  # imported objects stay: later collections need not look at them


def collect_seldom() -> None:
    """Let a worker collect garbage seldom, and never look at what is imported so far."""
    gc.freeze()
    gc.set_threshold(*_COLLECT_AFTER)


def import_lean() -> None:
    """Import Beam's inference module without torch, which saves 2 s and 200 MB in each process that needs no torch.

    Beam's module imports its model manager, and with it torch, only if it can; and again when it is used. So the first
    import is made to fail.
    """
    if _BASE in sys.modules or _MODEL_MANAGER in sys.modules:
        return
    sys.modules[_MODEL_MANAGER] = None  # type: ignore[assignment]  # lets its import fail
    try:
        base = importlib.import_module(_BASE)
    finally:
        del sys.modules[_MODEL_MANAGER]
    base.resource = resource  # type: ignore[attr-defined]  # Beam sets it to None together with the model manager
