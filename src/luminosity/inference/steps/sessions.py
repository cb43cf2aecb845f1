"""One bundle's sessions with the hosts of its models, and the models that were loaded before the first bundle."""

from __future__ import annotations

import threading
from collections.abc import Iterator, Sequence
from typing import Any

from apache_beam.runners.worker import statesampler

from luminosity.inference.adapting.adapt import ModelSet
from luminosity.inference.blocks import Block
from luminosity.inference.host.interface import Outcome
from luminosity.inference.steps.messages import StepSettings
from luminosity.inference.steps.placement import Host, HostSession
from luminosity.inference.steps.routing import EnteredLane, LaneRouter

__all__ = ["Sessions", "load_models", "release_models"]


class Sessions:
    """A session for each host, opened with the first block for it; belongs to one bundle at a time."""

    def __init__(self) -> None:
        self._open: dict[Host, HostSession] = {}
        self._used: set[EnteredLane] = set()

    def submit(self, entered: EnteredLane, prepared: Block, costs: Any, tag: Any, weights: Any = None) -> None:
        """Submit a block to a lane; block while the lane is full. The tag comes back with the outcomes."""
        session = self._open.get(entered.host)
        if session is None:
            tracker = statesampler.get_current_tracker()  # None outside a bundle
            step = None if tracker is None else tracker.current_state()
            session = self._open[entered.host] = entered.host.open(step)
        session.submit(entered.lane, prepared, costs, tag, weights)
        self._used.add(entered)

    def ready(self) -> Iterator[list[Outcome]]:
        """Yield the outcomes that have arrived, without blocking."""
        for session in self._open.values():
            yield session.ready()

    def finish(self) -> Iterator[list[Outcome]]:
        """Yield all remaining outcomes as they arrive."""
        for session in self._open.values():
            yield from session.finish()

    def end(self, routers: Sequence[LaneRouter]) -> None:
        """Count the batches and loads, leave the lanes of old versions, and close the sessions."""
        for session in self._open.values():
            for lane, stats in session.take_stats().items():
                # Another bundle may have moved this one's examples to a version that this one has not entered.
                known = (router.find(lane) for router in routers)
                entered = next(filter(None, known), None) or next(iter(self._used))
                entered.counters.update(stats, [])
        for router in routers:
            router.count_loads()
            router.leave_all_but(self._used)
        self.close()

    def close(self) -> None:
        """Close the sessions and discard the examples that are not yet computed."""
        for session in self._open.values():
            session.close()
        self._open = {}
        self._used = set()


_lock = threading.Lock()
"""Protects the two variables below."""
_kept: dict[str, LaneRouter] = {}
"""Routers that hold their models, by the id of their step."""
_set_up: set[str] = set()
"""The ids of steps that hold their models themselves."""


def load_models(models: ModelSet, settings: StepSettings) -> None:
    """Load a step's models before Beam sets the step up. Blocks until they are loaded.

    The model host is the same as the step's, so the step finds the models there, or waits for the same load.
    """
    settings.set_up_process()
    router = LaneRouter(models, settings)
    try:
        router.set_up()
    except BaseException:
        router.leave_all()
        raise
    with _lock:
        if settings.step_id not in _set_up:
            _kept[settings.step_id] = router
            return
    router.leave_all()


def release_models(settings: StepSettings) -> None:
    """Stop keeping the models of a step. Call it when the step has entered their lanes itself."""
    with _lock:
        _set_up.add(settings.step_id)
        router = _kept.pop(settings.step_id, None)
    if router is not None:
        router.leave_all()
