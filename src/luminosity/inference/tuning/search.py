"""The search for the best settings: the candidates, which are combinations of them, and their order."""

from __future__ import annotations

import math
import sys
from collections.abc import Callable, Iterator, Mapping, MutableMapping
from dataclasses import dataclass, field, replace
from typing import Any, cast

import numpy as np
from apache_beam.ml.inference.base import ModelHandler

from luminosity.core import machine_ram_bytes, usable_cores
from luminosity.errors import InvalidArgument
from luminosity.extras import require
from luminosity.inference.adapting.adapt import adapt
from luminosity.inference.handler import limits_of
from luminosity.inference.handlers.jax import JaxModelHandler
from luminosity.inference.handlers.on_torch import TorchHandler
from luminosity.inference.handlers.text.text_handler import TextHandler
from luminosity.inference.tuning.measurement import Measurement

__all__ = [
    "Candidate",
    "Search",
    "Space",
    "Trial",
    "devices_here",
    "difference",
    "heavy_modules",
    "is_adjustable",
    "takes_batch_limit",
    "ways_here",
    "with_settings",
]
_HEAVY = ("pandas", "scipy", "sklearn.base", "torch", "apache_beam.ml.inference.sklearn_inference")
"""Modules that take long to import."""
_GAIN = 1.03  # a smaller gain may be chance, and the simpler settings are kept
_LEAST_BATCH = 4  # smaller batches are not tried


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
    way: str | None = None
    """How a GPU runs a model of texts: one of ``TextHandler.ways``."""

    def __str__(self) -> str:
        """Return the settings in a few words.

        >>> str(Candidate("cpu", "bfloat16", workers=2, threads=1))
        'cpu, bfloat16, 2 workers of 1 thread'
        """
        parts = [part for part in (self.device, self.dtype, self.way) if part]
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
    if isinstance(handler, TextHandler):
        handler = handler.adjusted(candidate.device, candidate.dtype, candidate.way)
    elif isinstance(handler, TorchHandler | JaxModelHandler):
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


def ways_here(handler: ModelHandler[Any, Any, Any]) -> tuple[str, ...]:
    """Return the ways in which a GPU can run a model of texts, the fastest first; empty for other models."""
    return handler.ways if isinstance(handler, TextHandler) else ()


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


@dataclass(frozen=True)
class Trial:
    """The result of a candidate: a measurement, or the reason why there is none."""

    candidate: Candidate
    measured: Measurement | None
    reason: str = ""
    differs: Difference | None = None
    """The difference from the predictions of the first successful trial; None for that trial itself."""

    @property
    def rate(self) -> float:
        """Rows per second, or 0 without a measurement."""
        return self.measured.rows_per_second if self.measured is not None else 0.0


@dataclass(frozen=True)
class Space:
    """The settings that may be tried, starting with the first of each. Empty if the handler has no such setting."""

    devices: tuple[str, ...] = ()
    dtypes: tuple[str, ...] = ()
    threads: tuple[int, ...] = ()
    """If empty: one worker with all cores, then more workers with fewer threads each, while that is faster."""
    batch_limits: bool = True
    ways: tuple[str, ...] = ()
    """The ways in which a GPU can run the model."""
    cores: int = field(default_factory=usable_cores)
    ram_bytes: int = field(default_factory=machine_ram_bytes)


class Search:
    """Tries settings one after the other: the device, the dtype, the way on a GPU, threads, smaller batches.

    Each step keeps the best of the step before, instead of trying all combinations.

    >>> def measure(candidate):
    ...     rate = {"float32": 1.0, "bfloat16": 2.0}[candidate.dtype] * candidate.workers**0.5
    ...     return Trial(candidate, Measurement(rate, 1, 1.0, 1, 1.0, 1.0, 1.0, 1, 1.0, 0, 0, "process"))
    >>> search = Search(Space(("cpu",), ("float32", "bfloat16"), cores=4))
    >>> for trial in search.run(measure):
    ...     print(trial.candidate, trial.rate)
    cpu, float32, 4 threads 1.0
    cpu, bfloat16, 4 threads 2.0
    cpu, bfloat16, 2 workers of 2 threads 2.8284271247461903
    cpu, bfloat16, 4 workers of 1 thread 4.0
    >>> print(search.best.candidate)
    cpu, bfloat16, 4 workers of 1 thread
    """

    def __init__(self, space: Space) -> None:
        self._space = space
        self.trials: list[Trial] = []
        self.planned = 0
        """An estimate of the number of trials."""
        self.best: Trial | None = None

    def run(self, measure: Callable[[Candidate], Trial | None]) -> Iterator[Trial]:
        """Yield trials as they are done. The search ends when ``measure`` returns None."""
        space = self._space
        self.planned = max(1, len(space.devices)) + max(0, len(space.dtypes) - 1) + max(0, len(space.ways) - 1) + 3
        for step in (self._devices, self._dtypes, self._ways, self._threads, self._batch_limits):
            for candidate in step():
                if candidate in [trial.candidate for trial in self.trials]:
                    continue
                trial = self._impossible(candidate) or measure(candidate)
                if trial is None:
                    return
                self.trials.append(trial)
                if trial.rate > _GAIN * (self.best.rate if self.best is not None else 0.0):
                    self.best = trial
                self.planned = max(self.planned, len(self.trials))
                yield trial
            if self.best is None and step != self._devices:
                return  # no candidate works, not even with a smaller dtype

    def _devices(self) -> Iterator[Candidate]:
        dtype = self._space.dtypes[0] if self._space.dtypes else None
        for device in self._space.devices or (None,):
            yield self._on_cores(Candidate(device, dtype))

    def _dtypes(self) -> Iterator[Candidate]:
        for dtype in self._space.dtypes:
            if dtype != "int8" or self._so_far.device == "cpu":
                yield replace(self._so_far, dtype=dtype)
            elif "cpu" in self._space.devices:  # the only device for 8 bits
                yield self._on_cores(Candidate("cpu", dtype))

    def _ways(self) -> Iterator[Candidate]:
        if self._so_far.way is not None:
            for way in self._space.ways:
                yield replace(self._so_far, way=way)

    def _threads(self) -> Iterator[Candidate]:
        begun = self._so_far
        if begun.threads is None:
            return
        if self._space.threads:
            for threads in self._space.threads:
                yield self._with_threads(begun, threads)
            return
        threads = begun.threads
        while threads > 1 and self._so_far.threads == threads:
            threads //= 2
            yield self._with_threads(begun, threads)

    def _batch_limits(self) -> Iterator[Candidate]:
        """Yield batches smaller than those that the host found: they may fit the CPU's caches better."""
        best = self.best
        if not self._space.batch_limits or best is None or best.measured is None:
            return
        limit: int | None = None
        size = 1 << (best.measured.largest_batch.bit_length() - 1)
        while size > _LEAST_BATCH and self._so_far.max_batch_size == limit:
            size //= 2
            limit = size
            yield replace(self._so_far, max_batch_size=limit)

    @property
    def _so_far(self) -> Candidate:
        return self.trials[0].candidate if self.best is None else self.best.candidate

    def _on_cores(self, candidate: Candidate) -> Candidate:
        """Use all cores if they compute. With another device, threads matter little."""
        if candidate.device not in (None, "cpu"):
            ways = self._space.ways if candidate.device.startswith(("cuda", "gpu")) else ()
            return replace(candidate, way=ways[0]) if ways else candidate
        return self._with_threads(candidate, self._space.threads[0] if self._space.threads else self._space.cores)

    def _with_threads(self, candidate: Candidate, threads: int) -> Candidate:
        return replace(candidate, threads=threads, workers=max(1, self._space.cores // threads))

    def _impossible(self, candidate: Candidate) -> Trial | None:
        """Return a failed trial if one copy of the model per worker needs too much memory."""
        if candidate.workers == 1 or self.best is None or self.best.measured is None:
            return None
        one = self.best.measured.memory_bytes / self.best.candidate.workers
        if candidate.workers * one <= self._space.ram_bytes / 2:
            return None
        return Trial(candidate, None, f"{candidate.workers} copies of the model would take more than half of the RAM")


@dataclass(frozen=True)
class Difference:
    """The difference between two models' predictions for the same rows."""

    largest: float
    """The largest difference between two numbers at the same place."""
    changed: int
    """Rows in which something other than a number differs: a label, a text, the shape."""
    rows: int
    """The number of rows compared."""
    mean_cosine: float | None = None
    """For predictions that are vectors, the mean of their cosines; None for all others."""
    least_cosine: float | None = None


def difference(first: Mapping[int, Any], second: Mapping[int, Any]) -> Difference:
    """Compare predictions by row. Rows that only one side has don't count.

    >>> difference({0: {"label": "A", "score": 0.5}, 1: 1}, {0: {"label": "B", "score": 0.75}})
    Difference(largest=0.25, changed=1, rows=1, mean_cosine=None, least_cosine=None)
    """
    largest, changed = 0.0, 0
    common = first.keys() & second.keys()
    for row in common:
        is_same = True
        for one, other in _pairs(first[row], second[row]):
            apart = _apart(one, other)
            is_same = is_same and apart is not None
            largest = max(largest, apart or 0.0)
        changed += not is_same
    cosines = [found for row in common if (found := _cosine(first[row], second[row])) is not None]
    if not cosines:
        return Difference(largest, changed, len(common))
    return Difference(largest, changed, len(common), float(np.mean(cosines)), min(cosines))


def _cosine(first: Any, second: Any) -> float | None:
    """Return the cosine of two predictions that are vectors."""
    one, other = (getattr(each, "inference", each) for each in (first, second))
    if not (
        isinstance(one, np.ndarray) and isinstance(other, np.ndarray) and one.ndim == 1 and one.shape == other.shape
    ):
        return None
    lengths = float(np.linalg.norm(one) * np.linalg.norm(other))
    return float(one @ other) / lengths if lengths > 0 else None


def _pairs(first: Any, second: Any) -> Iterator[tuple[Any, Any]]:
    """Yield pairs of the innermost values."""
    first, second = getattr(first, "inference", first), getattr(second, "inference", second)
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        named = cast("dict[Any, Any]", first)
        for name in named:
            yield from _pairs(named[name], second[name])
    elif isinstance(first, list | tuple) and isinstance(second, list | tuple):
        ours, theirs = cast("list[Any]", first), cast("list[Any]", second)
        if len(ours) != len(theirs):
            yield None, theirs
        else:
            for one, other in zip(ours, theirs, strict=True):
                yield from _pairs(one, other)
    else:
        yield first, second


def _apart(first: Any, second: Any) -> float | None:
    """Return the largest difference, or None if the values differ and can't be subtracted."""
    try:
        one, other = np.asarray(first, np.float64), np.asarray(second, np.float64)
    except (TypeError, ValueError):
        return 0.0 if _is_equal(first, second) else None
    if one.shape != other.shape:
        return None
    apart = np.abs(one - other)
    # NaN on one side only counts as infinitely different.
    return float(np.where(np.isnan(one) & np.isnan(other), 0.0, np.nan_to_num(apart, nan=math.inf)).max(initial=0.0))


def _is_equal(first: Any, second: Any) -> bool:
    return bool(np.all(first == second))
