"""Luminosity makes Apache Beam pipelines deliver what the machine can do."""

from __future__ import annotations

import importlib
from typing import TYPE_CHECKING, Any

if TYPE_CHECKING:
    from luminosity.core import WorkerShare
    from luminosity.engine.monitor.events import (
        BundleRetried,
        RunEnded,
        RunStarted,
        Snapshot,
        WorkerLost,
        WorkerStarted,
    )
    from luminosity.engine.options import LuminosityOptions
    from luminosity.engine.runner import LuminosityRunner
    from luminosity.errors import LuminosityError
    from luminosity.inference.adapt import adapt
    from luminosity.inference.handler import Handler
    from luminosity.inference.run_inference import RunInference

__all__ = [
    "BundleRetried",
    "Handler",
    "LuminosityError",
    "LuminosityOptions",
    "LuminosityRunner",
    "RunEnded",
    "RunInference",
    "RunStarted",
    "Snapshot",
    "WorkerLost",
    "WorkerShare",
    "WorkerStarted",
    "adapt",
]

_HOMES = {
    **dict.fromkeys(
        ("BundleRetried", "RunEnded", "RunStarted", "Snapshot", "WorkerLost", "WorkerStarted"),
        "luminosity.engine.monitor.events",
    ),
    "Handler": "luminosity.inference.handler",
    "LuminosityError": "luminosity.errors",
    "LuminosityOptions": "luminosity.engine.options",
    "LuminosityRunner": "luminosity.engine.runner",
    "RunInference": "luminosity.inference.run_inference",
    "WorkerShare": "luminosity.core",
    "adapt": "luminosity.inference.adapt",
}


def __getattr__(name: str) -> Any:
    """Import a public name when it is first used: workers need few of them, and should start quickly."""
    if name not in _HOMES:
        raise AttributeError(f"module {__name__!r} has no attribute {name!r}")
    return getattr(importlib.import_module(_HOMES[name]), name)


def __dir__() -> list[str]:
    return __all__
