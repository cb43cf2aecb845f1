"""Blocks to the model host, and back."""

from __future__ import annotations

from collections.abc import Iterator
from copy import deepcopy
from typing import Any, cast

import apache_beam as beam
from apache_beam import pvalue
from apache_beam.ml.inference.base import ModelHandler
from apache_beam.transforms.window import WindowedValue

from luminosity.core import ELEMENT_AT_FAULT
from luminosity.inference.adapt import adapt
from luminosity.inference.blocks import join, take
from luminosity.inference.host.counting import current_step
from luminosity.inference.host.host import ModelHost
from luminosity.inference.host.hosts import host_of
from luminosity.inference.host.lane import Lane, LaneSettings
from luminosity.inference.host.session import Session
from luminosity.inference.host.work import Outcome
from luminosity.inference.isolated import IsolatedHandler
from luminosity.inference.steps.counters import StepCounters
from luminosity.inference.steps.messages import Failed, PreparedBlock, ResultBlock, at_fault, described, earliest
from luminosity.inference.steps.settings import StepSettings

__all__ = ["InferDoFn"]


class InferDoFn(beam.DoFn):
    """`process` hands blocks over and emits what is ready; `finish_bundle` waits for the rest."""

    def __init__(self, handler: ModelHandler[Any, Any, Any], settings: StepSettings) -> None:
        self._handler = handler
        self._settings = settings

    def setup(self) -> None:
        self._settings.set_up_process()
        self._handler.set_environment_vars()
        self._host: ModelHost = host_of(adapt(self._handler))
        self._lanes: dict[str, Lane] = {}
        self._counters: dict[Lane, StepCounters] = {}
        self._sessions: dict[Lane, Session] = {}
        self._path = ""
        self._key_paths: Any = None
        if not self._settings.load_late:
            try:
                self._lane("").models.load()
            except BaseException:
                self.teardown()  # Beam does not call it for a step that was never set up.
                raise

    def start_bundle(self) -> None:
        self._close_sessions()

    def process(
        self, block: PreparedBlock, metadata: Any, window: Any = beam.DoFn.WindowParam
    ) -> Iterator[WindowedValue]:
        if block.failed:
            yield _emitted(window, ResultBlock([], [], [], None, block.failed))
        if block.examples:
            session = self._session(self._lane_for(metadata))
            prepared = block.examples if block.prepared is None else block.prepared
            session.submit(prepared, block.costs, (window, block), block.weights)
            self._counters[session.lane].prepared(block.seconds)
        for session in self._sessions.values():
            yield from self._emit(session.ready())

    def finish_bundle(self) -> Iterator[WindowedValue]:  # type: ignore[override]  # Beam's says None, and takes these.
        for lane, session in self._sessions.items():
            for outcomes in session.finish():
                yield from self._emit(outcomes)
            self._counters[lane].update(session.take_stats(), lane.models.take_load_stats())
        self._leave_old_versions()
        self._close_sessions()

    def teardown(self) -> None:
        self._close_sessions()
        for lane in self._lanes.values():
            self._host.leave(lane)
        self._lanes = {}

    def _lane_for(self, metadata: Any) -> Lane:
        """The model that the side input names; where it names none, the one that was used last."""
        if not metadata or isinstance(metadata, pvalue.EmptySideInput):
            return self._lane(self._path)
        if isinstance(metadata, list):
            return self._updated_per_key(cast("list[Any]", metadata))
        self._path = metadata.model_id
        return self._lane(metadata.model_id, metadata.model_name)

    def _lane(self, path: str, name: str = "") -> Lane:
        lane = self._lanes.get(path)
        if lane is None:
            lane = self._lanes[path] = self._enter(path)
            self._counters[lane] = StepCounters(lane.handler, self._settings.metrics_namespace, name)
        return lane

    def _leave_old_versions(self) -> None:
        """What neither this bundle used nor the next one will, unless its side input says so."""
        for path, lane in list(self._lanes.items()):
            if path != self._path and lane not in self._sessions:
                self._host.leave(lane)
                del self._lanes[path], self._counters[lane]

    def _enter(self, path: str) -> Lane:
        settings = self._settings

        def handler_of_this_version() -> Any:
            handler = deepcopy(self._handler) if path else self._handler
            if path:
                handler.update_model_path(path)
            adapted = adapt(handler)
            return IsolatedHandler(adapted) if settings.use_subprocess else adapted

        lane_settings = LaneSettings(
            (settings.model_tag, path, settings.use_subprocess),
            path or settings.model_tag,
            settings.inference_args,
            bool(settings.caught),
            settings.timeout,
            settings.clock,
        )
        return self._host.enter((settings.step_id, path), handler_of_this_version, lane_settings)

    def _updated_per_key(self, paths: list[Any]) -> Lane:
        """A handler of many models changes them by itself; not while examples for the old ones are under way."""
        lane = self._lane("")
        if paths != self._key_paths:
            session = self._session(lane)
            session.settle()
            for model in lane.models.load():
                lane.handler.update_model_paths(model, paths)
            self._key_paths = paths
        return lane

    def _session(self, lane: Lane) -> Session:
        session = self._sessions.get(lane)
        if session is None:
            session = self._sessions[lane] = self._host.open(lane, current_step())
        return session

    def _close_sessions(self) -> None:
        for session in self._sessions.values():
            session.close()
        self._sessions = {}

    def _emit(self, outcomes: list[Outcome]) -> Iterator[WindowedValue]:
        by_window: dict[tuple[Any, str | None], list[Outcome]] = {}
        for outcome in outcomes:
            by_window.setdefault((outcome.tag[0], outcome.model_id), []).append(outcome)
        for (window, model_id), together in by_window.items():
            yield _emitted(window, self._result_block(together, model_id))

    def _result_block(self, outcomes: list[Outcome], model_id: str | None) -> ResultBlock:
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
                error = described(outcome.error)
                failed += [Failed(example, time, error) for example, time in zip(taken, times, strict=True)]
            elif isinstance(outcome.error, Exception):
                if outcome.batch_count:
                    setattr(outcome.error, ELEMENT_AT_FAULT, at_fault(taken[0], outcome.batch_count))
                raise outcome.error
            else:  # It asked to end a thread that is not this one.
                raise RuntimeError(f"The model's code raised {outcome.error!r}") from outcome.error
        return ResultBlock(examples, timestamps, join(values), model_id, tuple(failed))


def _emitted(window: Any, block: ResultBlock) -> WindowedValue:
    times = block.timestamps + [failed.timestamp for failed in block.failed]
    return WindowedValue(block, earliest(times), (window,))
