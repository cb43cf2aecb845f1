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
    from luminosity.inference.handlers.classifier import TextClassifier
    from luminosity.inference.handlers.embedder import SentenceEmbedder
    from luminosity.inference.handlers.generator import TextGenerator
    from luminosity.inference.handlers.http.handler import HttpModelHandler
    from luminosity.inference.handlers.jax import JaxModelHandler
    from luminosity.inference.handlers.token_classifier import TokenClassifier
    from luminosity.inference.handlers.torch import TorchModelHandler
    from luminosity.inference.options import ModelOptions
    from luminosity.inference.run_inference import RunInference

__all__ = [
    "BundleRetried",
    "Handler",
    "HttpModelHandler",
    "JaxModelHandler",
    "LuminosityError",
    "LuminosityOptions",
    "LuminosityRunner",
    "ModelOptions",
    "RunEnded",
    "RunInference",
    "RunStarted",
    "SentenceEmbedder",
    "Snapshot",
    "TextClassifier",
    "TextGenerator",
    "TokenClassifier",
    "TorchModelHandler",
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
    "HttpModelHandler": "luminosity.inference.handlers.http.handler",
    "JaxModelHandler": "luminosity.inference.handlers.jax",
    "LuminosityError": "luminosity.errors",
    "LuminosityOptions": "luminosity.engine.options",
    "LuminosityRunner": "luminosity.engine.runner",
    "ModelOptions": "luminosity.inference.options",
    "RunInference": "luminosity.inference.run_inference",
    "SentenceEmbedder": "luminosity.inference.handlers.embedder",
    "TextClassifier": "luminosity.inference.handlers.classifier",
    "TextGenerator": "luminosity.inference.handlers.generator",
    "TokenClassifier": "luminosity.inference.handlers.token_classifier",
    "TorchModelHandler": "luminosity.inference.handlers.torch",
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
