"""Decides what is spilled to disk when the memory budget is almost used up."""

from __future__ import annotations

from collections.abc import Callable, Iterator, Sequence

from luminosity._shared.text import format_bytes
from luminosity.engine.data.blocks import BlockStore
from luminosity.engine.data.complete_side_input import SideInputData
from luminosity.engine.data.grouping import Grouping
from luminosity.engine.data.live_side_input import LiveSideInput
from luminosity.engine.data.panes.live_grouping import LiveGrouping
from luminosity.engine.data.state import StateStore
from luminosity.engine.loop.stage_input import StageInput
from luminosity.errors import ResourcesExceeded

__all__ = ["SpillPolicy"]

_HIGH = 0.85  # of the budget: above it, data is spilled, while workers may fill the rest
_LOW = 0.65  # of the budget: spilling ends below it
_TABLE_PART = 32  # tables below 1/32 of the budget are spilled later: small runs would be too many to merge
_RETRY_PART = 64  # if nothing can be spilled, look again after another 1/64 of the budget


class SpillPolicy:
    """Keeps the memory that the engine holds within its budget. The data that is needed last is spilled first.

    The loop's thread calls :meth:`check` often. If the budget is almost used up, the call blocks while it writes to
    disk. Refers to the stages, groupings and side inputs, but owns none of them.
    """

    def __init__(self, store: BlockStore, state: StateStore, stages: Sequence[StageInput]) -> None:
        self._store = store
        self._state = state
        self._stages = stages
        self.groupings: list[Grouping] = []
        self.live_groupings: list[LiveGrouping] = []
        self.side_inputs: list[SideInputData | LiveSideInput] = []
        self._high = int(_HIGH * store.ledger.limit)
        self._low = int(_LOW * store.ledger.limit)
        self._step = store.ledger.limit // _RETRY_PART
        self._next_at = self._high

    def check(self) -> None:
        """Spill data if memory is short. Cheap if it is not, so you can call it often."""
        used = self._store.ledger.used
        if used > self._next_at:
            self._spill()
            used = self._store.ledger.used
            self._next_at = used + self._step
        # The rest may belong to running bundles and can't be spilled. Look again once memory use has grown from here.
        self._next_at = max(self._high, min(self._next_at, used + self._step))

    def _spill(self) -> None:
        for spill in self._in_order():
            wanted = self._store.ledger.used - self._low
            if wanted <= 0:
                return
            spill(wanted)
        self._check_open_windows()

    def _check_open_windows(self) -> None:
        """Raise ResourcesExceeded if the keys of open windows, which can't be spilled, take more than the budget."""
        limit = self._store.ledger.limit
        if (size := sum(live.memory_bytes for live in self.live_groupings)) > limit:
            raise ResourcesExceeded(
                f"found {format_bytes(size)} of keys in open windows of groupings over unbounded input, expected at "
                f"most the memory budget of {format_bytes(limit)}",
                fix="raise --memory_budget, or use shorter windows, less allowed lateness or fewer keys",
            )

    def _in_order(self) -> Iterator[Callable[[int], int]]:
        """Yield functions that spill a given number of bytes, the least harmful first."""
        for grouping in self.groupings:
            if grouping.absorbed:  # read again after a restart only
                yield lambda wanted, blocks=grouping.absorbed: self._store.spill(blocks, wanted)
        for side_input in self.side_inputs:
            yield lambda wanted, data=side_input: data.spill(self._store, wanted)
        for stage in self._stages:
            if stage.gate is not None:
                yield lambda wanted, gate=stage.gate: self._store.spill(gate.waiting_blocks(), wanted)
            if not stage.is_ready:
                yield lambda wanted, stage=stage: self._store.spill(stage.waiting_blocks(), wanted)
        for grouping in sorted(self.groupings, key=lambda g: -g.table.memory_bytes):
            if grouping.table.memory_bytes >= self._store.ledger.limit // _TABLE_PART:
                yield grouping.table.spill
        for live in sorted(self.live_groupings, key=lambda live: -live.memory_bytes):
            yield live.spill
        yield self._state.spill
        for grouping in self.groupings:
            yield lambda wanted, pending=grouping.pending: self._store.spill(reversed(pending), wanted)
        # First stages first: their input waits longest, since the loop serves the last stages first.
        for stage in self._stages:
            yield lambda wanted, stage=stage: self._store.spill(stage.waiting_blocks(), wanted)
