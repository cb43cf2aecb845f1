"""The settings that are tried, and a handler with them."""

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

_HEAVY = ("pandas", "scipy", "sklearn.base", "torch", "apache_beam.ml.inference.sklearn_inference")


@dataclass(frozen=True)
class Candidate:
    """One combination of settings; None leaves it to the handler, to the libraries, or to the host."""

    device: str | None = None
    dtype: str | None = None
    workers: int = 1
    """Processes at work at the same time, each with a model of its own."""
    threads: int | None = None
    """Of each worker."""
    max_batch_size: int | None = None

    def __str__(self) -> str:
        """
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
    """Whether this kind of handler takes a device and a dtype."""
    return isinstance(handler, TorchHandler | JaxModelHandler)


def with_settings(handler: ModelHandler[Any, Any, Any], candidate: Candidate) -> ModelHandler[Any, Any, Any]:
    """The handler with these settings; what was given is not to be used any more."""
    if isinstance(handler, TorchHandler | JaxModelHandler):
        handler = handler.adjusted(candidate.device, candidate.dtype)
    if isinstance(handler, TorchHandler) and candidate.device not in (None, "cpu") and handler.device.type == "cpu":
        raise InvalidArgument(f"this machine has no device {candidate.device!r} that torch can use")
    if candidate.max_batch_size is not None:
        _limit_batches(handler, candidate.max_batch_size)
    return handler


def takes_batch_limit(handler: ModelHandler[Any, Any, Any]) -> bool:
    """Whether ``max_batch_size`` changes anything. Handlers with settings of their own for batches keep to those."""
    is_own = not isinstance(handler.batch_elements_kwargs(), MutableMapping)
    return not is_own and not adapt(handler).self_batching and not handler.batch_elements_kwargs()


def _limit_batches(handler: ModelHandler[Any, Any, Any], count: int) -> None:
    settings: Any = handler.batch_elements_kwargs()  # Beam's own dict: its constructor would have put it there
    settings["max_batch_size"] = count
    if limits_of(adapt(handler)).max_count != count:
        raise InvalidArgument(f"{type(handler).__name__} takes no max_batch_size")


def devices_here(handler: ModelHandler[Any, Any, Any]) -> tuple[str, ...]:
    """The kinds of devices that a model of this handler can run on in this process, the fastest first."""
    if isinstance(handler, TorchHandler):
        return ("cuda", "cpu") if require("torch", "torch").cuda.is_available() else ("cpu",)
    if isinstance(handler, JaxModelHandler):
        platforms = (device.platform for device in require("jax", "jax").local_devices())
        return tuple(dict.fromkeys((*platforms, "cpu")))
    return ()


def heavy_modules(handler: ModelHandler[Any, Any, Any]) -> list[str]:
    """What takes seconds to import, and can be imported once for all processes: they are forked from one that has.

    JAX is none of them: it starts threads, and a process that has some must not be forked.
    """
    names = [name for name in _HEAVY if name in sys.modules]  # The user's module has imported it.
    if isinstance(handler, TorchHandler):
        names.append("torch")
    if isinstance(handler, TextHandler):
        names += ["transformers.models.auto.modeling_auto", "transformers.models.auto.tokenization_auto"]
    return names
