"""Rows into blocks: gathered, prepared, weighed."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

import apache_beam as beam
from apache_beam.transforms.window import WindowedValue

from luminosity.inference.adapting.model_set import THE_MODEL, ModelSet
from luminosity.inference.blocks import size, take
from luminosity.inference.preparing import Preparer
from luminosity.inference.steps.messages import Failed, PreparedBlock, described, earliest
from luminosity.inference.steps.settings import StepSettings

__all__ = ["BlockSize", "PrepareDoFn"]


_MOST_GATHERED = 16_384

_FIRST = 64
_LARGEST = 1024
_LARGEST_BYTES = 16_000_000
_SLOW_S = 0.1
_QUICK_S = 0.04  # Twice as many would not be slow.
_TRY_AGAIN_AFTER = 16  # blocks
_ALIKE = 1.5  # Two times that differ by less are those of a call, whatever the number of its examples.


class PrepareDoFn(beam.DoFn):
    """Runs on CPU workers. A block never crosses a window or a model, and none outlives its bundle."""

    def __init__(self, models: ModelSet, settings: StepSettings) -> None:
        self._models = models
        self._settings = settings
        self._block_size = BlockSize()
        self._gathered: dict[tuple[Any, Hashable], tuple[list[Any], list[Any]]] = {}

    def setup(self) -> None:
        self._settings.set_up_process()
        for handler in self._models.handlers.values():
            handler.set_environment_vars()
        self._preparers = {name: Preparer(handler) for name, handler in self._models.handlers.items()}

    def start_bundle(self) -> None:
        self._gathered = {}

    def get_input_batch_type(self, input_element_type: Any) -> Any:
        return list[input_element_type]

    @beam.DoFn.yields_elements
    def process_batch(  # type: ignore[override]  # Beam gives elements of one time and window at once: a tenth of the cost.
        self, batch: list[Any], timestamp: Any = beam.DoFn.TimestampParam, window: Any = beam.DoFn.WindowParam
    ) -> Iterator[WindowedValue]:
        by_model, failed = self._parted(batch, timestamp)
        if failed:
            name = next(iter(self._models.handlers))  # Any: the failure knows its own example.
            yield self._emitted(window, PreparedBlock([], [], None, failed=failed, model=name), [timestamp])
        for name, new in by_model.items():
            examples, timestamps = self._gathered.setdefault((window, name), ([], []))
            examples += new
            timestamps += [timestamp] * len(new)
            while len(examples) >= self._block_size.examples:
                count = self._block_size.examples
                yield self._emit(window, name, examples[:count], timestamps[:count])
                del examples[:count], timestamps[:count]
        if len(self._gathered) > 1 and sum(len(examples) for examples, _ in self._gathered.values()) > _MOST_GATHERED:
            yield from self.finish_bundle()

    def finish_bundle(self) -> Iterator[WindowedValue]:  # type: ignore[override]  # Beam's says None, and takes these.
        for (window, name), (examples, timestamps) in self._gathered.items():
            if examples:
                yield self._emit(window, name, examples, timestamps)
        self._gathered = {}

    def _parted(self, batch: list[Any], timestamp: Any) -> tuple[dict[Hashable, list[Any]], tuple[Failed, ...]]:
        """The examples by model; and those that belong to none."""
        if not self._models.is_keyed:
            return {THE_MODEL: batch}, ()
        by_model: dict[Hashable, list[Any]] = {}
        failed: list[Failed] = []
        for example in batch:
            try:
                by_model.setdefault(self._models.name_of(example), []).append(example)
            except self._settings.caught as error:
                failed.append(Failed(example, timestamp, described(error)))
        return by_model, tuple(failed)

    def _emit(self, window: Any, name: Hashable, examples: list[Any], timestamps: list[Any]) -> WindowedValue:
        begun = time.perf_counter()
        block = self._prepare(self._preparers[name], examples, timestamps)
        seconds = time.perf_counter() - begun
        self._block_size.learn(len(examples), size(examples), seconds)
        return self._emitted(window, replace(block, seconds=seconds, model=name), timestamps)

    def _emitted(self, window: Any, block: PreparedBlock, timestamps: list[Any]) -> WindowedValue:
        return WindowedValue(block, earliest(timestamps), (window,))

    def _prepare(self, preparer: Preparer, examples: list[Any], timestamps: list[Any]) -> PreparedBlock:
        attempt = preparer.attempt(examples, self._settings.caught)
        failed = tuple(Failed(examples[place], timestamps[place], described(error)) for place, error in attempt.failed)
        prepared = attempt.prepared
        if prepared is None:
            return PreparedBlock([], [], None, failed=failed)
        if failed:
            timestamps = take(timestamps, attempt.places)
        block = None if prepared.block is prepared.examples else prepared.block
        return PreparedBlock(prepared.examples, timestamps, block, prepared.costs, prepared.weights, failed)


class BlockSize:
    """Large blocks cost less per example; but the device waits for the first ones, and so they must not take long.

    A machine that is busy just now makes blocks smaller than they have to be. So they are made larger again from time
    to time: where a call costs the same for one example and for many, small ones would be ruinous. If that costs much,
    no size is quick, and blocks are made as large as they may be.
    """

    def __init__(self) -> None:
        self.examples = _FIRST
        self._steady = 0
        self._before = (_FIRST, 0.0)
        """The number before the last change, and how long such a block took."""

    def learn(self, examples: int, size: int, seconds: float) -> None:
        """From a block of so many examples and bytes, and the time that it took."""
        if seconds > _SLOW_S:
            self._change(2 * self.examples if self._is_that_of_a_call(seconds) else self.examples // 2, seconds)
        elif examples >= self.examples:  # The last block of a bundle may be quick because it is small.
            self._steady += 1
            if seconds < _QUICK_S or self._steady >= _TRY_AGAIN_AFTER:
                self._change(2 * self.examples, seconds)
        self.examples = max(1, min(self.examples, _LARGEST_BYTES * examples // max(size, 1)))

    def _is_that_of_a_call(self, seconds: float) -> bool:
        """Whether the last change has shown that smaller blocks take about as long as larger ones."""
        before, took = self._before
        return seconds > took / _ALIKE if before > self.examples else seconds < took * _ALIKE

    def _change(self, examples: int, seconds: float) -> None:
        examples = max(1, min(examples, _LARGEST))
        if examples != self.examples:
            self._before = (self.examples, seconds)
        self.examples = examples
        self._steady = 0
