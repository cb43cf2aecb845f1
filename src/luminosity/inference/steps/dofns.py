"""The steps of RunInference: Prepare gathers examples into blocks, Infer runs them, Results returns elements."""

from __future__ import annotations

import time
from collections.abc import Hashable, Iterator
from dataclasses import replace
from typing import Any

import apache_beam as beam
import numpy as np
from apache_beam import pvalue
from apache_beam.ml.inference.base import ModelHandler
from apache_beam.transforms.window import WindowedValue

from luminosity.core import ELEMENT_AT_FAULT
from luminosity.errors import ModelFailed
from luminosity.inference.adapting.adapt import THE_MODEL, ModelSet
from luminosity.inference.blocks import Indices, join, part_of, rows, size, take
from luminosity.inference.host.interface import Outcome
from luminosity.inference.preparing import Preparer
from luminosity.inference.steps.carried import Examples, as_list, joined, taken
from luminosity.inference.steps.messages import (
    Failed,
    PreparedBlock,
    ResultBlock,
    StepSettings,
    at_fault,
    by_identity,
    describe_failure,
    earliest,
)
from luminosity.inference.steps.routing import LaneRouter
from luminosity.inference.steps.sessions import Sessions, load_models, release_models

__all__ = ["FAILED", "BlockSize", "InferDoFn", "PrepareDoFn", "ResultsDoFn"]

FAILED = "failed"
"""The tag of the output for dead letters."""
_MOST_GATHERED = 16_384  # examples of all windows and models together; more would only take memory
_FIRST = 64  # examples in the first block
_LARGEST = 1024  # examples; larger blocks hardly cost less per example
_LARGEST_BYTES = 16_000_000
_SLOW_S = 0.1  # the device may wait this long for its first block
_QUICK_S = 0.04  # a block of twice the size is not slow, either
_TRY_AGAIN_AFTER = 16  # blocks
_ALIKE = 1.5  # times that differ by a smaller factor count as equal


class PrepareDoFn(beam.DoFn):
    """Gathers examples into blocks and prepares them, on CPU workers.

    All examples of a block belong to one window, one model and one bundle.
    """

    def __init__(self, models: ModelSet, settings: StepSettings) -> None:
        self._models = models
        self._settings = settings
        self._block_size = BlockSize()
        self._gathered: dict[tuple[Any, Hashable], tuple[list[Any], list[Any]]] = {}

    def setup(self) -> None:
        """Set up the process and one preparer for each model."""
        self._settings.set_up_process()
        for handler in self._models.handlers.values():
            handler.set_environment_vars()
        self._preparers = {name: Preparer(handler) for name, handler in self._models.handlers.items()}

    def start_bundle(self) -> None:
        """Discard the examples of a bundle that failed."""
        self._gathered = {}

    def get_input_batch_type(self, input_element_type: Any) -> Any:
        """Tell Beam to pass lists of elements."""
        return list[input_element_type]

    @beam.DoFn.yields_elements
    def process_batch(  # type: ignore[override]  # Beam passes elements of one timestamp and window together, at a tenth of the cost.
        self, batch: list[Any], timestamp: Any = beam.DoFn.TimestampParam, window: Any = beam.DoFn.WindowParam
    ) -> Iterator[WindowedValue]:
        """Gather examples of one window, and emit the blocks that are full."""
        by_model, failed = self._by_model(batch, timestamp)
        if failed:
            name = next(iter(self._models.handlers))  # Any model will do: the failure holds its example.
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

    def finish_bundle(self) -> Iterator[WindowedValue]:  # type: ignore[override]  # Beam's annotation says None.
        """Emit the gathered examples."""
        for (window, name), (examples, timestamps) in self._gathered.items():
            if examples:
                yield self._emit(window, name, examples, timestamps)
        self._gathered = {}

    def _by_model(self, batch: list[Any], timestamp: Any) -> tuple[dict[Hashable, list[Any]], tuple[Failed, ...]]:
        """Return the examples by model, and those that belong to no model."""
        if not self._models.is_keyed:
            return {THE_MODEL: batch}, ()
        by_model: dict[Hashable, list[Any]] = {}
        failed: list[Failed] = []
        for example in batch:
            try:
                by_model.setdefault(self._models.name_of(example), []).append(example)
            except self._settings.caught as error:
                failed.append(Failed(example, timestamp, describe_failure(error)))
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
        failed = tuple(
            Failed(examples[place], timestamps[place], describe_failure(error)) for place, error in attempt.failed
        )
        prepared = attempt.prepared
        if prepared is None:
            return PreparedBlock([], [], None, failed=failed)
        if failed:
            timestamps = take(timestamps, attempt.places)
        block = None if prepared.block is prepared.examples else prepared.block
        return PreparedBlock(prepared.examples, timestamps, block, prepared.costs, prepared.weights, failed)


class BlockSize:
    """Learns how many examples to prepare at once.

    Large blocks cost less per example, but the device waits for the first block, so a block must not take long. When
    the machine is busy, blocks become smaller than necessary; so from time to time a larger size is tried. If a call
    takes about as long for a small block as for a large one, no size is quick, and blocks become as large as allowed.
    """

    def __init__(self) -> None:
        self.examples = _FIRST
        self._steady = 0
        self._before = (_FIRST, 0.0)
        """The number of examples before the last change, and how long that block took."""

    def learn(self, examples: int, size: int, seconds: float) -> None:
        """Adapt the size to a block that had this many examples and bytes, and took this long."""
        if seconds > _SLOW_S:
            self._change(2 * self.examples if self._is_per_call(seconds) else self.examples // 2, seconds)
        elif examples >= self.examples:  # The last block of a bundle is small, and quick for that reason.
            self._steady += 1
            if seconds < _QUICK_S or self._steady >= _TRY_AGAIN_AFTER:
                self._change(2 * self.examples, seconds)
        self.examples = max(1, min(self.examples, _LARGEST_BYTES * examples // max(size, 1)))

    def _is_per_call(self, seconds: float) -> bool:
        """Return whether the last change has shown that the time hardly depends on the size."""
        before, took = self._before
        return seconds > took / _ALIKE if before > self.examples else seconds < took * _ALIKE

    def _change(self, examples: int, seconds: float) -> None:
        examples = max(1, min(examples, _LARGEST))
        if examples != self.examples:
            self._before = (self.examples, seconds)
        self.examples = examples
        self._steady = 0


class InferDoFn(beam.DoFn):
    """Submits blocks to the model host; emits the results that are ready, and the rest at the end of the bundle."""

    def __init__(self, handler: ModelHandler[Any, Any, Any], settings: StepSettings) -> None:
        self._handler = handler
        self._settings = settings

    def load_ahead(self) -> None:
        """Load the model before Beam calls ``setup``. The engine calls it as soon as a device's worker starts."""
        load_models(ModelSet(self._handler), self._settings)

    def setup(self) -> None:
        """Enter the lane of the model, and load it unless its version comes with the data."""
        self._settings.set_up_process()
        self._router = LaneRouter(ModelSet(self._handler), self._settings)
        self._sessions = Sessions()
        try:
            self._router.set_up()
        except BaseException:
            self.teardown()  # Beam does not call it if setup fails.
            raise
        release_models(self._settings)

    def start_bundle(self) -> None:
        """Close the sessions of a bundle that failed."""
        self._sessions.close()

    def process(
        self, block: PreparedBlock, metadata: Any, window: Any = beam.DoFn.WindowParam
    ) -> Iterator[WindowedValue]:
        """Submit a block, and emit the results that have arrived."""
        if block.failed:
            yield _emitted(window, ResultBlock([], [], [], None, block.failed, block.model))
        if block.examples:
            for lane, part in self._router.route(block, metadata):
                prepared = as_list(part.examples) if part.prepared is None else part.prepared
                self._sessions.submit(lane, prepared, part.costs, (window, part), part.weights)
                lane.counters.prepared(part.seconds)
        for outcomes in self._sessions.ready():
            yield from self._emit(outcomes)

    def finish_bundle(self) -> Iterator[WindowedValue]:  # type: ignore[override]  # Beam's annotation says None.
        """Wait for the remaining results and emit them."""
        for outcomes in self._sessions.finish():
            yield from self._emit(outcomes)
            self._router.look_for_updates()
        self._sessions.end([self._router])

    def teardown(self) -> None:
        """Close the sessions and leave all lanes."""
        self._sessions.close()
        self._router.leave_all()

    def _emit(self, outcomes: list[Outcome]) -> Iterator[WindowedValue]:
        by_result: dict[tuple[Any, Any, str | None], list[Outcome]] = {}
        for outcome in outcomes:
            window, block = outcome.tag
            by_result.setdefault((window, block.model, outcome.model_id), []).append(outcome)
        for (window, model, model_id), together in by_result.items():
            yield _emitted(window, self._result_block(together, model, model_id))

    def _result_block(self, outcomes: list[Outcome], model: Any, model_id: str | None) -> ResultBlock:
        examples: list[Examples] = []
        timestamps: list[Any] = []
        values: list[Any] = []
        failed: list[Failed] = []
        for outcome in outcomes:
            block: PreparedBlock = outcome.tag[1]
            found, times = block.examples, block.timestamps
            if not _are_all(outcome.places, len(found)):
                found, times = taken(found, outcome.places), part_of(times, outcome.places)
            if outcome.error is None:
                examples.append(found)
                timestamps += times
                values.append(outcome.values)
            elif isinstance(outcome.error, self._settings.caught):
                error = describe_failure(outcome.error)
                failed += [Failed(example, time, error) for example, time in zip(found, times, strict=True)]
            elif isinstance(outcome.error, Exception):
                if outcome.batch_count:
                    setattr(outcome.error, ELEMENT_AT_FAULT, at_fault(found[0], outcome.batch_count))
                raise outcome.error
            else:  # Such as SystemExit, which must not end this thread.
                raise ModelFailed(f"the model's code raised {outcome.error!r}") from outcome.error
        return ResultBlock(joined(examples), timestamps, join(values), model_id, tuple(failed), model)


def _are_all(places: Indices, count: int) -> bool:
    """Return whether these are the places of all ``count`` examples, in their order, as those of most batches."""
    return len(places) == count and bool((places == np.arange(count)).all())


def _emitted(window: Any, block: ResultBlock) -> WindowedValue:
    times = block.timestamps + [failed.timestamp for failed in block.failed]
    return WindowedValue(block, earliest(times), (window,))


class ResultsDoFn(beam.DoFn):
    """Turns result blocks into elements, each with its timestamp, and dead letters.

    It runs on CPU workers, so that the process of the device handles only blocks.
    """

    def __init__(self, models: ModelSet, drop_example: bool) -> None:
        self._models = models
        self._drop_example = drop_example

    def process(self, block: ResultBlock, window: Any = beam.DoFn.WindowParam) -> Iterator[Any]:
        """Emit the predictions and the dead letters of a block."""
        handler = self._models.handlers[block.model]
        windows, flatten = (window,), handler.should_skip_batching()
        predicted = handler.batch_results(
            as_list(block.examples), rows(block.values), block.model_id, self._drop_example
        )
        # Most timestamps are the same object, and a windowed value is made much faster from another one.
        alike = {key: WindowedValue(None, each, windows) for key, each in by_identity(block.timestamps).items()}
        for timestamp, result in zip(block.timestamps, predicted, strict=True):
            with_value = alike[id(timestamp)].with_value
            if flatten:
                yield from map(with_value, result)
            else:
                yield with_value(result)
        for failed in block.failed:
            letter = failed.example if flatten else [failed.example], failed.error
            yield pvalue.TaggedOutput(FAILED, WindowedValue(letter, failed.timestamp, windows))
