"""Keep what the engine holds within its budget: what can wait longest goes to disk first."""

from __future__ import annotations

from collections.abc import Callable, Iterator

from luminosity.engine.data.blocks import BlockStore
from luminosity.engine.data.grouping import Grouping
from luminosity.engine.data.sideinputs import SideInputData
from luminosity.engine.data.state import StateStore
from luminosity.engine.loop.stage import StageRun

# Above the first part of the budget, make room down to the second: workers fill the rest while that is done.
_HIGH = 0.85
_LOW = 0.65
# Smaller tables are not worth a file: there would be too many to merge.
_TABLE_PART = 32
_RETRY_PART = 64


class SpillPolicy:
    def __init__(self, store: BlockStore, state: StateStore, stages: list[StageRun]) -> None:
        self._store = store
        self._state = state
        self._stages = stages
        self.groupings: list[Grouping] = []
        self.side_inputs: list[SideInputData] = []
        self._high = int(_HIGH * store.ledger.limit)
        self._low = int(_LOW * store.ledger.limit)
        self._step = store.ledger.limit // _RETRY_PART
        self._next_at = self._high

    def check(self) -> None:
        """Make room if there is too little. Cheap where there is enough, so it may be called often."""
        used = self._store.ledger.used
        if used > self._next_at:
            self._relieve()
            used = self._store.ledger.used
            self._next_at = used + self._step
        # What is left may be out of reach, in running bundles: look again when there is more, or less and then more.
        self._next_at = max(self._high, min(self._next_at, used + self._step))

    def _relieve(self) -> None:
        for spill in self._in_order():
            wanted = self._store.ledger.used - self._low
            if wanted <= 0:
                return
            spill(wanted)

    def _in_order(self) -> Iterator[Callable[[int], int]]:
        """Ways to free memory, the least harmful first."""
        for side_input in self.side_inputs:
            yield lambda wanted, data=side_input: data.spill(self._store, wanted)
        for stage in self._stages:
            if not stage.is_ready:
                yield lambda wanted, stage=stage: self._store.spill(stage.waiting_blocks(), wanted)
        for grouping in sorted(self.groupings, key=lambda g: -g.table.memory_bytes):
            if grouping.table.memory_bytes >= self._store.ledger.limit // _TABLE_PART:
                yield grouping.table.spill
        yield self._state.spill
        for grouping in self.groupings:
            yield lambda wanted, pending=grouping.pending: self._store.spill(reversed(pending), wanted)
        # First stages first: their input waits longest, since last stages are served first.
        for stage in self._stages:
            yield lambda wanted, stage=stage: self._store.spill(stage.waiting_blocks(), wanted)
