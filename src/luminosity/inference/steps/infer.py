"""The steps Infer and Results: run blocks through the model host, and turn them back into elements."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import apache_beam as beam
from apache_beam import pvalue
from apache_beam.ml.inference.base import ModelHandler
from apache_beam.transforms.window import WindowedValue

from luminosity.core import ELEMENT_AT_FAULT
from luminosity.errors import ModelFailed
from luminosity.inference.adapting.adapt import ModelSet
from luminosity.inference.blocks import join, rows, take
from luminosity.inference.host.interface import Outcome
from luminosity.inference.steps.messages import Failed, PreparedBlock, ResultBlock, at_fault, describe_failure, earliest
from luminosity.inference.steps.routing import LaneRouter
from luminosity.inference.steps.sessions import Sessions, load_models, release_models
from luminosity.inference.steps.settings import StepSettings

__all__ = ["FAILED", "InferDoFn", "ResultsDoFn"]

FAILED = "failed"
"""The tag of the output for dead letters."""


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
                prepared = part.examples if part.prepared is None else part.prepared
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
        examples: list[Any] = []
        timestamps: list[Any] = []
        values: list[Any] = []
        failed: list[Failed] = []
        for outcome in outcomes:
            block: PreparedBlock = outcome.tag[1]
            taken, times = take(block.examples, outcome.places), take(block.timestamps, outcome.places)
            if outcome.error is None:
                examples += taken
                timestamps += times
                values.append(outcome.values)
            elif isinstance(outcome.error, self._settings.caught):
                error = describe_failure(outcome.error)
                failed += [Failed(example, time, error) for example, time in zip(taken, times, strict=True)]
            elif isinstance(outcome.error, Exception):
                if outcome.batch_count:
                    setattr(outcome.error, ELEMENT_AT_FAULT, at_fault(taken[0], outcome.batch_count))
                raise outcome.error
            else:  # Such as SystemExit, which must not end this thread.
                raise ModelFailed(f"the model's code raised {outcome.error!r}") from outcome.error
        return ResultBlock(examples, timestamps, join(values), model_id, tuple(failed), model)


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
        windows, flatten, result = (window,), handler.should_skip_batching(), handler.result
        for example, timestamp, value in zip(block.examples, block.timestamps, rows(block.values), strict=True):
            predicted = result(example, value, block.model_id, self._drop_example)
            if flatten:
                for each in predicted:
                    yield WindowedValue(each, timestamp, windows)
            else:
                yield WindowedValue(predicted, timestamp, windows)
        for failed in block.failed:
            letter = failed.example if flatten else [failed.example], failed.error
            yield pvalue.TaggedOutput(FAILED, WindowedValue(letter, failed.timestamp, windows))
