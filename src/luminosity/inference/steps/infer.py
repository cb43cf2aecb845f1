"""Blocks to the model host, and back."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any

import apache_beam as beam
from apache_beam.ml.inference.base import ModelHandler
from apache_beam.transforms.window import WindowedValue

from luminosity.core import ELEMENT_AT_FAULT
from luminosity.inference.blocks import join, take
from luminosity.inference.host.contact import Host, HostSession
from luminosity.inference.host.counting import current_step
from luminosity.inference.host.work import Outcome
from luminosity.inference.model_set import ModelSet
from luminosity.inference.steps.lanes import StepLanes, Use
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
        self._lanes = StepLanes(ModelSet(self._handler), self._settings)
        self._sessions: dict[Host, HostSession] = {}
        self._used: set[Use] = set()
        try:
            self._lanes.set_up()
        except BaseException:
            self.teardown()  # Beam does not call it for a step that was never set up.
            raise

    def start_bundle(self) -> None:
        self._close_sessions()

    def process(
        self, block: PreparedBlock, metadata: Any, window: Any = beam.DoFn.WindowParam
    ) -> Iterator[WindowedValue]:
        if block.failed:
            yield _emitted(window, ResultBlock([], [], [], None, block.failed, block.model))
        if block.examples:
            for use, part in self._lanes.parts(block, metadata):
                prepared = part.examples if part.prepared is None else part.prepared
                self._session(use.host).submit(use.lane, prepared, part.costs, (window, part), part.weights)
                self._used.add(use)
                use.counters.prepared(part.seconds)
        for session in self._sessions.values():
            yield from self._emit(session.ready())

    def finish_bundle(self) -> Iterator[WindowedValue]:  # type: ignore[override]  # Beam's says None, and takes these.
        for session in self._sessions.values():
            for outcomes in session.finish():
                yield from self._emit(outcomes)
                self._lanes.look_for_updates()
        for session in self._sessions.values():
            for lane, stats in session.take_stats().items():
                # Another bundle may have given this one's examples to a version that this one does not know yet.
                use = self._lanes.use_of(lane) or next(iter(self._used))
                use.counters.update(stats, [])
        for host, uses in self._lanes.by_host().items():
            loads = host.take_load_stats([use.lane for use in uses])
            for use, stats in zip(uses, loads, strict=True):
                use.counters.update([], stats)
        self._lanes.leave_all_but(self._used)
        self._close_sessions()

    def teardown(self) -> None:
        self._close_sessions()
        self._lanes.leave_all()

    def _session(self, host: Host) -> HostSession:
        session = self._sessions.get(host)
        if session is None:
            session = self._sessions[host] = host.open(current_step())
        return session

    def _close_sessions(self) -> None:
        for session in self._sessions.values():
            session.close()
        self._sessions = {}
        self._used = set()

    def _emit(self, outcomes: list[Outcome]) -> Iterator[WindowedValue]:
        alike: dict[tuple[Any, Any, str | None], list[Outcome]] = {}
        for outcome in outcomes:
            window, block = outcome.tag
            alike.setdefault((window, block.model, outcome.model_id), []).append(outcome)
        for (window, model, model_id), together in alike.items():
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
                error = described(outcome.error)
                failed += [Failed(example, time, error) for example, time in zip(taken, times, strict=True)]
            elif isinstance(outcome.error, Exception):
                if outcome.batch_count:
                    setattr(outcome.error, ELEMENT_AT_FAULT, at_fault(taken[0], outcome.batch_count))
                raise outcome.error
            else:  # It asked to end a thread that is not this one.
                raise RuntimeError(f"The model's code raised {outcome.error!r}") from outcome.error
        return ResultBlock(examples, timestamps, join(values), model_id, tuple(failed), model)


def _emitted(window: Any, block: ResultBlock) -> WindowedValue:
    times = block.timestamps + [failed.timestamp for failed in block.failed]
    return WindowedValue(block, earliest(times), (window,))
