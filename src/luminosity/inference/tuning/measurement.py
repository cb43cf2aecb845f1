"""Measures how fast the model host runs one handler in this process."""

from __future__ import annotations

import sys
import time
from collections import Counter
from dataclasses import dataclass, field
from typing import Any

import numpy as np

from luminosity.core import computed_by
from luminosity.inference.blocks import piece, rows
from luminosity.inference.handler import Handler
from luminosity.inference.host.host import host_of
from luminosity.inference.host.interface import BatchStats, LaneSettings, Outcome
from luminosity.inference.preparing import Preparer

__all__ = ["Measurement", "ModelUnderTest", "preparing_rate"]

_BLOCK = 256  # examples submitted at once, as in a pipeline
_LEAST_PASS = 256  # fewer rows don't show how large batches grow
_COMPARED = 128  # rows whose predictions are kept
_MOST_ROWS = 1_000_000  # in one pass, so that its results fit into memory
_MOST_TRIES = 6  # to find a number of rows that takes long enough
_PREPARING_S = 1.0  # how long the rate of prepare() is measured


@dataclass(frozen=True)
class Measurement:
    """The results of one pass over the rows, summed over several workers."""

    rows_per_second: float
    rows: int
    seconds: float
    batches: int
    useful_cost: float
    padded_cost: float
    budget: float
    """The batch budget that the host found: the largest cost of one batch."""
    largest_batch: int
    busy_share: float
    """The share of the time in which the device computed."""
    out_of_memory: int
    """How often a batch did not fit into memory."""
    memory_bytes: int
    memory_of: str
    """"device", or "process": then the memory is the growth of the process since before the model was loaded."""

    first_seconds: float = 0.0
    """The time from the start of the load to the first predictions, in a process that has imported the libraries."""
    computed_by: str = ""
    """How a model of texts ran, as :func:`luminosity.core.computed_by` says."""

    @property
    def padding(self) -> float:
        """The share of the work that was spent on padding."""
        return 1 - self.useful_cost / self.padded_cost if self.padded_cost else 0.0


@dataclass(frozen=True)
class _Pass:
    rows: int
    seconds: float
    batches: list[BatchStats]

    @property
    def rate(self) -> float:
        return self.rows / self.seconds

    @property
    def budget(self) -> float:
        return max((batch.budget for batch in self.batches), default=0.0)


@dataclass
class ModelUnderTest:
    """A loaded model and its prepared examples, which are submitted block by block as in a pipeline."""

    handler: Handler[Any, Any, Any]
    examples: list[Any]
    predictions: dict[int, Any] = field(default_factory=dict[int, Any])
    """The predictions of the first rows, by index."""

    def __post_init__(self) -> None:
        self._prepared = Preparer(self.handler).prepare(self.examples)
        self._host = host_of(self.handler)  # imports the handler's library, which must not count as the model's memory
        self._memory_before = _memory("VmRSS")
        self._begun, self._first_seconds = time.monotonic(), 0.0
        self._lane = self._host.enter(self, lambda: self.handler, LaneSettings())
        self._host.load(self._lane)
        self._rate = 0.0
        self._hopeless: _Pass | None = None

    __hash__ = object.__hash__

    def warm_up(self, seconds: float, worth: float = 0.0) -> None:
        """Run longer and longer passes, until batches don't grow any more or the time is over.

        On the wrong device, or with the wrong dtype, one row may take seconds. If the model computes fewer rows per
        second than ``worth``, its last pass becomes the measurement.
        """
        begun, count, before = time.monotonic(), 1, _Pass(0, 1.0, [])
        while True:
            last = self._pass(count)
            self._first_seconds = self._first_seconds or time.monotonic() - self._begun
            is_settled = count >= _LEAST_PASS and last.budget == before.budget
            # The first pass may include compilation.
            is_hopeless = count == before.rows and last.rate < worth and last.seconds > seconds / 4
            is_late = before.rows > 0 and time.monotonic() - begun > seconds
            if is_settled or is_hopeless or is_late:
                self._rate, self._hopeless = last.rate, last if is_hopeless else None
                return
            before, count = last, int(np.clip(last.rate * seconds, 1, 4 * count))

    def measure(self, seconds: float) -> Measurement:
        """Run two passes over the same rows, which together take about ``seconds``, and return the faster one."""
        measured = self._hopeless or self._faster_pass(seconds / 2)
        done = [batch for batch in measured.batches if not batch.failed]
        memory, memory_of = self._peak_memory()
        return Measurement(
            measured.rate,
            measured.rows,
            measured.seconds,
            len(done),
            sum(batch.useful for batch in done),
            sum(batch.padded for batch in done),
            measured.budget,
            max(batch.count for batch in done),
            min(1.0, sum(batch.busy for batch in done) / measured.seconds),
            sum(batch.out_of_memory for batch in measured.batches),
            memory,
            memory_of,
            self._first_seconds,
            computed_by(sum((Counter(batch.notes) for batch in done), Counter[str]())),
        )

    def _faster_pass(self, seconds: float) -> _Pass:
        rate, tries = self._rate, 0
        while True:
            count = int(np.clip(rate * seconds, 1, _MOST_ROWS))
            # The first pass may have shapes that are compiled for it.
            found = min(self._pass(count), self._pass(count), key=lambda each: each.seconds)
            tries += 1
            if found.seconds > seconds / 2 or tries == _MOST_TRIES:
                return found
            rate = min(found.rate, 16 * rate)  # the first estimate may be from a cold model

    def _pass(self, count: int) -> _Pass:
        """Run ``count`` rows, starting again from the first row when the last is reached."""
        session = self._host.open()
        begun, left = time.monotonic(), count
        try:
            while left:
                for start in range(0, len(self.examples), _BLOCK):
                    end = min(start + _BLOCK, len(self.examples), start + left)
                    if end > start:
                        block, costs = piece(self._prepared.block, start, end), self._prepared.costs[start:end]
                        session.submit(self._lane, block, costs, start)
                        self._take(session.ready())
                        left -= end - start
            for outcomes in session.finish():
                self._take(outcomes)
            return _Pass(count, max(time.monotonic() - begun, 1e-9), session.take_stats().get(self._lane, []))
        finally:
            session.close()

    def _take(self, outcomes: list[Outcome]) -> None:
        for outcome in outcomes:
            if outcome.error is not None:
                raise outcome.error
            places = outcome.places + outcome.tag
            if places.min() < _COMPARED:
                self.predictions.update(
                    (int(place), value)
                    for place, value in zip(places, rows(outcome.values), strict=True)
                    if place < _COMPARED
                )

    def _peak_memory(self) -> tuple[int, str]:
        device: Any = getattr(self.handler, "device", None)
        torch: Any = sys.modules.get("torch")
        if torch is not None and getattr(device, "type", "") == "cuda":
            return torch.cuda.max_memory_allocated(device), "device"
        jax: Any = sys.modules.get("jax")
        statistics = None if jax is None else jax.local_devices()[0].memory_stats()
        if statistics and "peak_bytes_in_use" in statistics:
            return statistics["peak_bytes_in_use"], "device"
        return max(0, _memory("VmHWM") - self._memory_before), "process"


def preparing_rate(handler: Handler[Any, Any, Any], examples: list[Any]) -> float:
    """Return how many rows per second ``prepare`` and ``cost`` process in this process."""
    preparer = Preparer(handler)
    preparer.prepare(examples[:1])  # loads the tokenizer
    begun, done = time.monotonic(), 0
    # Each row only once: a tokenizer's cache would make the second time too fast.
    for start in range(0, len(examples), _BLOCK):
        block = examples[start : start + _BLOCK]
        preparer.prepare(block)
        done += len(block)
        if time.monotonic() - begun > _PREPARING_S:
            break
    return done / max(time.monotonic() - begun, 1e-9)


def _memory(name: str) -> int:
    with open("/proc/self/status") as file:
        return next(1024 * int(line.split()[1]) for line in file if line.startswith(f"{name}:"))
