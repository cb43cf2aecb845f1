"""GroupByKey: groups elements by key and window, without decoding the values."""

from __future__ import annotations

import itertools
import struct
from collections import deque
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from operator import attrgetter
from typing import Any, Protocol

from apache_beam.transforms import trigger
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.timeutil import TimeDomain, TimestampCombinerImpl
from apache_beam.transforms.window import (
    BoundedWindow,
    GlobalWindow,
    GlobalWindows,
    NonMergingWindowFn,
    TimestampCombiner,
)
from apache_beam.utils.timestamp import MAX_TIMESTAMP, MIN_TIMESTAMP, Timestamp
from apache_beam.utils.windowed_value import PaneInfo, PaneInfoTiming, WindowedValue

from luminosity.engine.data.blocks import Block, BlockStore
from luminosity.engine.data.event_time import MAX, Holds
from luminosity.engine.data.saved_rows import BlockRows, Changes, SavedRows, SingleRow
from luminosity.engine.data.state import StateStore
from luminosity.engine.data.wire import BLOCK_BYTES
from luminosity.engine.plan.codecs import ElementCodec
from luminosity.engine.spill.files import Chunk, MemoryChunk, pieces
from luminosity.engine.spill.table import LARGE_BYTES, Entry, GroupTable

__all__ = ["VALUES_LENGTH", "Group", "Grouping", "values_in_state"]

VALUES_LENGTH = struct.Struct(">i")  # Beam's iterable coder begins with the length, or -1 if values come in pieces
_REST_IN_STATE = b"\xff" * 9 + b"\x01"  # -1 as a variable-length integer, in place of a piece's length
_MOST_SUFFIXES = 10_000  # bounds the cache of encoded windows to about a megabyte
_PROGRESS_KEY, _BLOCKS_KEY = b"p", b"b"  # of rows in a checkpoint: the output so far; references to the input


@dataclass(frozen=True, slots=True)
class Group:
    """One group of the output: a key, a window and the values."""

    start: bytes  # header and key, encoded
    count: int  # of values
    chunks: list[Chunk]  # the encoded values, one after the other
    timestamp_micros: int


class Grouping:
    """Collects the input of a GroupByKey, and produces its output block by block once the input is complete.

    The values of a large group stay in ``state``, where workers read them piece by piece. Only the loop's thread uses
    it. Owns the pending blocks and the table; call :meth:`release` when the run ends.

    A checkpoint has the input and the number of groups that have left. After a restart the input is grouped again, and
    that number of groups is skipped: with :meth:`track` groups leave in the order of their ids.
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
        self._rule = _rule(written, read, windowing)
        self.table = GroupTable(folder, blocks.ledger, self._rule.combine_times)
        self._state = state
        self._blocks = blocks
        self.pending: deque[Block] = deque()  # not grouped yet
        self._pending_holds = Holds()
        self.may_refer_to_state = True  # whether readers can fetch a large group's values from the state
        self._output: Iterator[Block] | None = None
        self.is_exhausted = False  # whether all groups have left
        self.absorbed: list[Block] | None = None  # if the run is saved: the input in the table, in the order of arrival
        self._groups_out = 0
        self._rows = BlockRows(_BLOCKS_KEY)
        self._progress = SingleRow(_PROGRESS_KEY)

    def track(self) -> None:
        """Keep what a checkpoint needs: the input, until all groups have left. Call it before the first block."""
        self.absorbed = []

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

    def _queue(self, block: Block) -> None:
        self.pending.append(block)
        self._pending_holds.add(block.hold)

    def absorb(self) -> None:
        """Group the elements of one pending block."""
        block = self.pending.popleft()
        self._pending_holds.remove(block.hold)
        self._rule.add(self.table, block.data())
        if self.absorbed is None:
            block.release()
        else:
            self.absorbed.append(block)

    def next_block(self) -> Block | None:
        """Return the next groups, about 1 MB, or None if there are no more. Call it once the input is complete."""
        if self._output is None:
            self._output = self._release(skipped=self._groups_out)
        block = next(self._output, None)
        if block is not None:
            self._groups_out += block.count
        else:
            self.is_exhausted = True
            self._release_absorbed()
        return block

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


class _Rule(Protocol):
    """How elements become ids and values of the table, and entries of the table become groups."""

    earliest: int  # timestamp that a group may have
    combine_times: Callable[[int, int], int]

    def add(self, table: GroupTable, data: bytes) -> None:
        """Add encoded elements to the table."""
        ...

    def groups(self, entry: Entry) -> Iterable[Group]:
        """Return the groups of an entry of the table."""
        ...


def _rule(written: ElementCodec, read: ElementCodec, windowing: Windowing) -> _Rule:
    if windowing.is_default():
        return _GlobalRule(written, read)
    if isinstance(windowing.windowfn, NonMergingWindowFn) and windowing.triggerfn == trigger.DefaultTrigger():
        return _WindowRule(written, read, windowing)
    return _TriggerRule(written, read, windowing)


class _GlobalRule:
    """The global window with the default trigger: it fires once. An id is a key."""

    _PANE = PaneInfo(is_first=True, is_last=True, timing=PaneInfoTiming.ON_TIME, index=0, nonspeculative_index=0)

    def __init__(self, written: ElementCodec, read: ElementCodec) -> None:
        self._written = written
        timestamp = GlobalWindow().max_timestamp()
        self._header = read.encode_header(GlobalWindows.windowed_value(None, timestamp=timestamp, pane_info=self._PANE))
        self.earliest = _encoded_micros(timestamp)
        self.combine_times = max

    def add(self, table: GroupTable, data: bytes) -> None:
        table.add_all(self._written.key_value_pairs(data))

    def groups(self, entry: Entry) -> Iterable[Group]:
        return (Group(self._header + entry.id, entry.count, entry.chunks, self.earliest),)


class _WindowRule:
    """Windows that do not merge and fire once, when they end. An id is a key, a window and the window's length."""

    _PANE = PaneInfo(is_first=True, is_last=False, timing=PaneInfoTiming.ON_TIME, index=0, nonspeculative_index=0)
    _LENGTH = struct.Struct("<I")

    def __init__(self, written: ElementCodec, read: ElementCodec, windowing: Windowing) -> None:
        self._written = written
        self._read = read
        combiner: Any = windowing.timestamp_combiner
        self._combiner: TimestampCombinerImpl = TimestampCombiner.get_impl(combiner, windowing.windowfn)
        self._keeps_times = windowing.timestamp_combiner != TimestampCombiner.OUTPUT_AT_EOW
        self._suffixes: dict[BoundedWindow, bytes] = {}
        self.earliest = MAX

    def combine_times(self, one: int, other: int) -> int:
        return self._combiner.combine(Timestamp(micros=one), Timestamp(micros=other)).micros

    def add(self, table: GroupTable, data: bytes) -> None:
        table.add_all(self._pairs(table, data))

    def _pairs(self, table: GroupTable, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        suffixes = self._suffixes
        for element in self._written.keyed_elements(data):
            header: Any = element.header
            for window in header.windows:
                group_id = element.key + (suffixes.get(window) or self._suffix(window))
                if self._keeps_times:
                    time = self._combiner.assign_output_time(window, header.timestamp)
                    table.add_time(group_id, time.micros)
                    self.earliest = min(self.earliest, _encoded_micros(time))
                yield group_id, element.value

    def _suffix(self, window: BoundedWindow) -> bytes:
        if len(self._suffixes) >= _MOST_SUFFIXES:
            self._suffixes.clear()
        encoded = self._written.encode_window(window)
        self._suffixes[window] = suffix = encoded + self._LENGTH.pack(len(encoded))
        if not self._keeps_times:
            self.earliest = min(self.earliest, _encoded_micros(window.max_timestamp()))
        return suffix

    def groups(self, entry: Entry) -> Iterable[Group]:
        end = len(entry.id) - self._LENGTH.size
        (window_bytes,) = self._LENGTH.unpack_from(entry.id, end)
        window: BoundedWindow = self._written.decode_window(entry.id[end - window_bytes : end])
        time = Timestamp(micros=entry.time) if self._keeps_times else window.max_timestamp()
        header = self._read.encode_header(WindowedValue(None, time, (window,), self._PANE))
        return (Group(header + entry.id[: end - window_bytes], entry.count, entry.chunks, _encoded_micros(time)),)


class _StoppedClock:
    """The time at which delays of processing time begin. Bounded input has all its elements at once."""

    def time(self) -> float:
        return 0.0


class _TriggerRule:
    """All other windows and triggers, by Beam's trigger machine. Each value follows its header; an id is a key.

    The machine needs all values of a key at once, so the values of one key must fit in memory.
    """

    def __init__(self, written: ElementCodec, read: ElementCodec, windowing: Windowing) -> None:
        self._written = written
        self._read = read
        self._driver = trigger.create_trigger_driver(windowing, is_batch=True, clock=_StoppedClock())
        self.earliest = MAX
        self.combine_times = max

    def add(self, table: GroupTable, data: bytes) -> None:
        table.add_all(self._pairs(data))

    def _pairs(self, data: bytes) -> Iterator[tuple[bytes, bytes]]:
        for element in self._written.keyed_elements(data):
            header: Any = element.header
            self.earliest = min(self.earliest, _encoded_micros(header.timestamp))
            header_bytes = len(element.encoded) - len(element.key) - len(element.value)
            yield element.key, element.encoded[:header_bytes] + element.value

    def groups(self, entry: Entry) -> Iterable[Group]:
        data = b"".join(entry.read())
        windowed = [header.with_value(value) for header, value in self._written.headed_values(data)]
        for pane in self._panes(windowed):
            values: list[bytes] = list(pane.value)
            chunks: list[Chunk] = list(map(MemoryChunk, pieces(values)))
            start = self._read.encode_header(pane) + entry.id
            yield Group(start, len(values), chunks, _encoded_micros(pane.timestamp))

    def _panes(self, windowed: list[WindowedValue]) -> Iterator[WindowedValue]:
        """Yield the panes of one key.

        All elements are there, so the watermark passes every window before the clock passes any delay. Beam's own
        ``process_entire_key`` has no clock, and fails at timers of processing time.
        """
        state = trigger.InMemoryUnmergedState()
        yield from self._driver.process_elements(state, windowed, MIN_TIMESTAMP, MIN_TIMESTAMP)
        while state.timers:
            fired, _ = state.get_timers(clear=True, processing_time=MIN_TIMESTAMP)
            if not fired:
                fired, _ = state.get_timers(clear=True, processing_time=MAX_TIMESTAMP)
            for window, (name, domain, due, _) in fired:
                for pane in self._driver.process_timer(window, name, domain, due, state):
                    if pane.value or domain != TimeDomain.REAL_TIME:  # a delay that has nothing left fires nothing
                        yield pane


def values_in_state(token: bytes) -> bytes:
    """Return the encoded values of a group that the state store has under ``token``."""
    return b"".join((VALUES_LENGTH.pack(-1), _REST_IN_STATE, bytes([len(token)]), token))


def _encoded_micros(timestamp: Timestamp) -> int:
    """Return a timestamp as it is after encoding: Beam writes milliseconds."""
    return timestamp.micros // 1000 * 1000
