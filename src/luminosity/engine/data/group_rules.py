"""How elements are grouped by key and window: which id and value of a table an element is, and which groups follow.

The runner and the workers group by the same rules.
"""

from __future__ import annotations

import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
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

from luminosity.engine.data.event_time import MAX
from luminosity.engine.plan.codecs import ElementCodec
from luminosity.engine.spill.files import Chunk, MemoryChunk, pieces
from luminosity.engine.spill.table import Entry, GroupTable

__all__ = ["VALUES_LENGTH", "Group", "Rule", "rule_of", "values_in_state"]

VALUES_LENGTH = struct.Struct(">i")  # Beam's iterable coder begins with the length, or -1 if values come in pieces
_REST_IN_STATE = b"\xff" * 9 + b"\x01"  # -1 as a variable-length integer, in place of a piece's length
_MOST_SUFFIXES = 10_000  # bounds the cache of encoded windows to about a megabyte


@dataclass(frozen=True, slots=True)
class Group:
    """One group of the output: a key, a window and the values."""

    start: bytes  # header and key, encoded
    count: int  # of values
    chunks: list[Chunk]  # the encoded values, one after the other
    timestamp_micros: int


class Rule(Protocol):
    """How elements become ids and values of the table, and entries of the table become groups."""

    is_simple: bool  # whether each id is one group
    earliest: int  # timestamp that a group may have
    combine_times: Callable[[int, int], int]

    def add(self, table: GroupTable, data: bytes) -> None:
        """Add encoded elements to the table."""
        ...

    def groups(self, entry: Entry) -> Iterable[Group]:
        """Return the groups of an entry of the table."""
        ...

    def start(self, group_id: bytes, time: int) -> bytes:
        """Return what the group of an id begins with, its header and key, if the rule is simple.

        ``time`` is the one that the table has combined.
        """
        ...


def rule_of(written: ElementCodec, read: ElementCodec, windowing: Windowing) -> Rule:
    """Return the rule for a windowing, given the codecs of the elements written and of the groups read."""
    if windowing.is_default():
        return _GlobalRule(written, read)
    if isinstance(windowing.windowfn, NonMergingWindowFn) and windowing.triggerfn == trigger.DefaultTrigger():
        return _WindowRule(written, read, windowing)
    return _TriggerRule(written, read, windowing)


class _GlobalRule:
    """The global window with the default trigger: it fires once. An id is a key."""

    is_simple = True

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

    def start(self, group_id: bytes, time: int) -> bytes:
        return self._header + group_id


class _WindowRule:
    """Windows that do not merge and fire once, when they end. An id is a key, a window and the window's length."""

    is_simple = True
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
        start, time = self._start(entry.id, entry.time)
        return (Group(start, entry.count, entry.chunks, _encoded_micros(time)),)

    def start(self, group_id: bytes, time: int) -> bytes:
        return self._start(group_id, time)[0]

    def _start(self, group_id: bytes, micros: int) -> tuple[bytes, Timestamp]:
        end = len(group_id) - self._LENGTH.size
        (window_bytes,) = self._LENGTH.unpack_from(group_id, end)
        window: BoundedWindow = self._written.decode_window(group_id[end - window_bytes : end])
        time = Timestamp(micros=micros) if self._keeps_times else window.max_timestamp()
        header = self._read.encode_header(WindowedValue(None, time, (window,), self._PANE))
        return header + group_id[: end - window_bytes], time


class _StoppedClock:
    """The time at which delays of processing time begin. Bounded input has all its elements at once."""

    def time(self) -> float:
        return 0.0


class _TriggerRule:
    """All other windows and triggers, by Beam's trigger machine. Each value follows its header; an id is a key.

    The machine needs all values of a key at once, so the values of one key must fit in memory.
    """

    is_simple = False

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

    def start(self, group_id: bytes, time: int) -> bytes:
        raise AssertionError("one id may be several groups")

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
