"""A candidate is one combination of settings to try; this module applies it to a handler."""

from __future__ import annotations

import sys
from collections.abc import MutableMapping
from dataclasses import dataclass
from typing import Any

from apache_beam.ml.inference.base import ModelHandler

from luminosity.errors import InvalidArgument
from luminosity.extras import require
from luminosity.inference.adapting.adapt import adapt
from luminosity.inference.handler import limits_of
from luminosity.inference.handlers.jax import JaxModelHandler
from luminosity.inference.handlers.on_torch import TorchHandler
from luminosity.inference.handlers.text.text_handler import TextHandler

__all__ = ["Candidate", "devices_here", "heavy_modules", "is_adjustable", "takes_batch_limit", "with_settings"]

# Modules that take long to import.
_HEAVY = ("pandas", "scipy", "sklearn.base", "torch", "apache_beam.ml.inference.sklearn_inference")


@dataclass(frozen=True)
class Candidate:
    """One combination of settings. None leaves a setting to the handler, its library or the host."""

    device: str | None = None
    dtype: str | None = None
    workers: int = 1
    """Processes that compute at the same time, each with its own copy of the model."""
    threads: int | None = None
    """Threads of each worker."""
    max_batch_size: int | None = None

    def __str__(self) -> str:
        """Return the settings in a few words.

        >>> str(Candidate("cpu", "bfloat16", workers=2, threads=1))
        'cpu, bfloat16, 2 workers of 1 thread'
        """
        parts = [part for part in (self.device, self.dtype) if part]
        if self.threads is not None:
            of = f"{self.threads} thread{'s' if self.threads > 1 else ''}"
            parts.append(of if self.workers == 1 else f"{self.workers} workers of {of}")
        if self.max_batch_size is not None:
            parts.append(f"batches up to {self.max_batch_size}")
        return ", ".join(parts) or "as it is"


def is_adjustable(handler: ModelHandler[Any, Any, Any]) -> bool:
    """Return whether a handler takes a device and a dtype."""
    return isinstance(handler, TorchHandler | JaxModelHandler)


def with_settings(handler: ModelHandler[Any, Any, Any], candidate: Candidate) -> ModelHandler[Any, Any, Any]:
    """Return the handler with these settings. The one passed in must not be used afterwards."""
    if isinstance(handler, TorchHandler | JaxModelHandler):
        handler = handler.adjusted(candidate.device, candidate.dtype)
    if isinstance(handler, TorchHandler) and candidate.device not in (None, "cpu") and handler.device.type == "cpu":
        raise InvalidArgument(f"found the device {candidate.device!r}, expected one that torch can use on this machine")
    if candidate.max_batch_size is not None:
        _limit_batches(handler, candidate.max_batch_size)
    return handler


def takes_batch_limit(handler: ModelHandler[Any, Any, Any]) -> bool:
    """Return whether ``max_batch_size`` has an effect. Handlers with their own batch settings keep those."""
    is_own = not isinstance(handler.batch_elements_kwargs(), MutableMapping)
    return not is_own and not adapt(handler).self_batching and not handler.batch_elements_kwargs()


def _limit_batches(handler: ModelHandler[Any, Any, Any], count: int) -> None:
    settings: Any = handler.batch_elements_kwargs()  # Beam's own dict, which its constructor fills
    settings["max_batch_size"] = count
    if limits_of(adapt(handler)).max_count != count:
        raise InvalidArgument(f"{type(handler).__name__} takes no max_batch_size")


def devices_here(handler: ModelHandler[Any, Any, Any]) -> tuple[str, ...]:
    """Return the kinds of devices that a model of this handler can use in this process, the fastest first."""
    if isinstance(handler, TorchHandler):
        return ("cuda", "cpu") if require("torch", "torch").cuda.is_available() else ("cpu",)
    if isinstance(handler, JaxModelHandler):
        platforms = (device.platform for device in require("jax", "jax").local_devices())
        return tuple(dict.fromkeys((*platforms, "cpu")))
    return ()


def heavy_modules(handler: ModelHandler[Any, Any, Any]) -> list[str]:
    """Return modules that take seconds to import. A fork server imports them once for all processes.

    JAX is not among them: it starts threads, and a process with threads must not be forked.
    """
    names = [name for name in _HEAVY if name in sys.modules]  # imported by the user's module
    if isinstance(handler, TorchHandler):
        names.append("torch")
    if isinstance(handler, TextHandler):
        names += ["transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"]
    return names
