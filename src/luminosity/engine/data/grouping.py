"""GroupByKey: groups elements by key and window, without decoding the values."""

from __future__ import annotations

import itertools
from collections import deque
from collections.abc import Callable, Iterator
from functools import partial
from operator import attrgetter

from apache_beam.transforms.core import Windowing

from luminosity.engine.data.blocks import Block, BlockStore
from luminosity.engine.data.event_time import MAX, Holds
from luminosity.engine.data.group_rules import VALUES_LENGTH, Group, rule_of, values_in_state
from luminosity.engine.data.saved_rows import BlockRows, Changes, SavedRows, SingleRow
from luminosity.engine.data.state import StateStore
from luminosity.engine.data.wire import BLOCK_BYTES
from luminosity.engine.plan.codecs import ElementCodec
from luminosity.engine.spill.files import SpillFile
from luminosity.engine.spill.table import LARGE_BYTES, GroupTable

__all__ = ["Grouping"]

_SMALL_BYTES = 16 << 20  # of a table: the runner groups them in less time than workers take to share them out
_SMALL_PART = 16  # of the memory budget: what is grouped here is kept until it is known to be small
_PROGRESS_KEY, _BLOCKS_KEY = b"p", b"b"  # of rows in a checkpoint: the output so far; references to the input


class Grouping:
    """Collects the input of a GroupByKey, and produces its output block by block once the input is complete.

    The values of a large group stay in ``state``, where workers read them piece by piece. Only the loop's thread uses
    it. Owns the pending blocks and the table; call :meth:`release` when the run ends.

    A checkpoint has the input and the number of groups that have left. After a restart the input is grouped again, and
    that number of groups is skipped: with :meth:`track` groups leave in the order of their ids.

    With :meth:`may_split`, it keeps its input until the table gets large. Then it drops the table, and hands all input
    over to workers, which group it by partitions.
    """

    def __init__(
        self,
        written: ElementCodec,
        read: ElementCodec,
        windowing: Windowing,
        state: StateStore,
        blocks: BlockStore,
        folder: str,
    ) -> None:
        self._rule = rule_of(written, read, windowing)
        self.table = GroupTable(partial(SpillFile, folder), blocks.ledger, self._rule.combine_times)
        self._state = state
        self._blocks = blocks
        self.pending: deque[Block] = deque()  # not grouped yet
        self._pending_holds = Holds()
        self.may_refer_to_state = True  # whether readers can fetch a large group's values from the state
        self._output: Iterator[Block] | None = None
        self.is_exhausted = False  # whether all groups have left
        # The input in the table, in the order of arrival: if the run is saved, or workers may still take it over.
        self.absorbed: list[Block] | None = None
        self._hand_over: Callable[[Block], None] | None = None
        self._small_bytes = min(_SMALL_BYTES, blocks.ledger.limit // _SMALL_PART)
        self._input_holds = Holds()  # of the input that workers may still take over
        self.is_split = False  # whether workers group the input
        self._groups_out = 0
        self._rows = BlockRows(_BLOCKS_KEY)
        self._progress = SingleRow(_PROGRESS_KEY)

    def track(self) -> None:
        """Keep what a checkpoint needs: the input, until all groups have left. Call it before the first block."""
        self.absorbed = []

    def may_split(self, hand_over: Callable[[Block], None]) -> None:
        """Let workers group the input if it is large: ``hand_over`` takes it over. Call it before the first block."""
        self.absorbed = []
        self._hand_over = hand_over

    def save(self, changes: Changes, owner: str) -> None:
        """Write what has changed since the last checkpoint."""
        self._progress.save((self._groups_out, self.is_exhausted), changes, owner)
        if self.is_exhausted:
            self._rows.clear(changes, owner)
        else:
            self._rows.save((*(self.absorbed or ()), *self.pending), changes, owner)

    def restore(self, saved: SavedRows, owner: str) -> None:
        """Take over what a checkpoint has. Call it once, after :meth:`track` and before anything else."""
        for key, value in saved.rows(owner):
            if key == _PROGRESS_KEY:
                self._groups_out, self.is_exhausted = self._progress.restore(value)
                continue
            for block in self._rows.restore(key, value, saved):
                self._queue(block)

    @property
    def earliest(self) -> int:
        """The earliest timestamp that a group may have, in microseconds."""
        return min(self._rule.earliest, self._pending_holds.minimum)

    def add(self, block: Block) -> None:
        """Add input to be grouped by :meth:`absorb`. Takes over the block."""
        if self._output is not None or self._groups_out or self.is_exhausted:
            raise AssertionError("found input for a grouping whose output has begun: a watermark ran ahead")
        self._queue(block)

    @property
    def input_hold(self) -> int:
        """The earliest hold of the input that workers may still take over."""
        return self._input_holds.minimum

    def _queue(self, block: Block) -> None:
        self.pending.append(block)
        self._pending_holds.add(block.hold)
        if self._hand_over is not None:
            self._input_holds.add(block.hold)

    def absorb(self) -> None:
        """Group the elements of one pending block, or hand it over to workers."""
        block = self.pending.popleft()
        self._pending_holds.remove(block.hold)
        if self.is_split:
            assert self._hand_over is not None
            self._input_holds.remove(block.hold)
            self._hand_over(block)
            return
        self._rule.add(self.table, block.data())
        if self.absorbed is None:
            block.release()
            return
        self.absorbed.append(block)
        if self._hand_over is not None and self.table.memory_bytes > self._small_bytes:
            self._begin_to_split()

    def _begin_to_split(self) -> None:
        """Drop the table, and queue the input again, to be handed over."""
        assert self.absorbed is not None
        self.is_split = True
        self.table.release()
        for block in reversed(self.absorbed):
            self.pending.appendleft(block)
            self._pending_holds.add(block.hold)
        self.absorbed = None

    def next_block(self) -> Block | None:
        """Return the next groups, about 1 MB, or None if there are no more. Call it once the input is complete."""
        if self._output is None:
            if self._hand_over is not None:
                self._stay_whole()
            self._output = self._release(skipped=self._groups_out)
        block = next(self._output, None)
        if block is not None:
            self._groups_out += block.count
        else:
            self.is_exhausted = True
            self._release_absorbed()
        return block

    def _stay_whole(self) -> None:
        """Forget the input, which is in the table: it is complete, and was not too large."""
        for block in self.absorbed or ():
            self._input_holds.remove(block.hold)
        self._release_absorbed()
        self.absorbed = self._hand_over = None

    def release(self) -> None:
        """Release all data."""
        for block in self.pending:
            block.release()
        self.pending.clear()
        self._release_absorbed()
        self.table.release()

    def _release_absorbed(self) -> None:
        if self.absorbed is not None:
            for block in self.absorbed:
                block.release()
            self.absorbed.clear()

    def _groups(self) -> Iterator[Group]:
        """Yield all groups. If the run is saved, they come in an order that a restart repeats."""
        if self.absorbed is None:
            for entry in self.table.take():
                yield from self._rule.groups(entry)
            return
        for entry in self.table.take(in_order=True):
            # Windows may come in the order of their hashes, which are others in each process.
            yield from sorted(self._rule.groups(entry), key=attrgetter("start"))

    def _release(self, skipped: int) -> Iterator[Block]:
        """Yield the groups in blocks, without the first ``skipped`` ones."""
        parts: list[bytes] = []
        size = count = 0
        hold = MAX
        for group in itertools.islice(self._groups(), skipped, None):
            value_bytes = sum(chunk.size for chunk in group.chunks)
            if value_bytes > LARGE_BYTES and self.may_refer_to_state:
                if count and self.absorbed is not None:  # groups must not overtake each other
                    yield self._blocks.of_bytes(b"".join(parts), count, hold)
                    parts, size, count, hold = [], 0, 0, MAX
                yield self._large_group(group, value_bytes)
                continue
            parts += (group.start, VALUES_LENGTH.pack(group.count), *(chunk.read() for chunk in group.chunks))
            size += len(group.start) + value_bytes
            count += 1
            hold = min(hold, group.timestamp_micros)
            if size >= BLOCK_BYTES:
                yield self._blocks.of_bytes(b"".join(parts), count, hold)
                parts, size, count, hold = [], 0, 0, MAX
        if count:
            yield self._blocks.of_bytes(b"".join(parts), count, hold)

    def _large_group(self, group: Group, value_bytes: int) -> Block:
        token = self._state.add_group(group.chunks)
        data = group.start + values_in_state(token)
        return self._blocks.of_bytes(
            data,
            1,
            group.timestamp_micros,
            weight=len(data) + value_bytes,
            on_free=lambda: self._state.remove_group(token),
            token=token,
        )
