"""One bundle's conversations with the hosts of its models."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from luminosity.inference.blocks import Block
from luminosity.inference.host.counting import current_step
from luminosity.inference.host.interface import Host, HostSession
from luminosity.inference.host.work import Outcome
from luminosity.inference.steps.routing import EnteredLane, LaneRouter

__all__ = ["Sessions"]


class Sessions:
    """A session for each host, opened when it is first needed; for any number of models."""

    def __init__(self) -> None:
        self._open: dict[Host, HostSession] = {}
        self._used: set[EnteredLane] = set()

    def submit(self, use: EnteredLane, prepared: Block, costs: Any, tag: Any, weights: Any = None) -> None:
        session = self._open.get(use.host)
        if session is None:
            session = self._open[use.host] = use.host.open(current_step())
        session.submit(use.lane, prepared, costs, tag, weights)
        self._used.add(use)

    def ready(self) -> Iterator[list[Outcome]]:
        """What is there, without waiting."""
        for session in self._open.values():
            yield session.ready()

    def finish(self) -> Iterator[list[Outcome]]:
        """Everything that is still to come, as it comes."""
        for session in self._open.values():
            yield from session.finish()

    def end(self, models: Sequence[LaneRouter]) -> None:
        """All is done: count it for the models that did it, leave those that are not needed again, and close."""
        for session in self._open.values():
            for lane, stats in session.take_stats().items():
                # Another bundle may have given this one's examples to a version that this one does not know yet.
                known = (lanes.use_of(lane) for lanes in models)
                use = next(filter(None, known), None) or next(iter(self._used))
                use.counters.update(stats, [])
        for lanes in models:
            lanes.count_loads()
            lanes.leave_all_but(self._used)
        self.close()

    def close(self) -> None:
        """Leave; what is not yet computed is forgotten."""
        for session in self._open.values():
            session.close()
        self._open = {}
        self._used = set()
