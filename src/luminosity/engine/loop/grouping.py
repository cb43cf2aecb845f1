"""Group by key and window, on encoded bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator
from typing import Any, NamedTuple, Protocol

from apache_beam.transforms import trigger
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.timeutil import TimestampCombinerImpl
from apache_beam.transforms.window import (
    BoundedWindow,
    GlobalWindow,
    GlobalWindows,
    NonMergingWindowFn,
    TimestampCombiner,
)
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import PaneInfo, PaneInfoTiming, WindowedValue

from luminosity.engine.blocks import Block
from luminosity.engine.fnapi.state import StateStore
from luminosity.engine.loop.watermarks import MAX
from luminosity.engine.plan.codecs import ElementCodec
from luminosity.engine.workers.channel import BLOCK_BYTES

_LENGTH = struct.Struct(">i")  # how Beam's iterable coder begins: the length, or -1 for pieces
_REST_IN_STATE = b"\xff" * 9 + b"\x01"  # -1 as a variable-length integer, in place of a piece's length
_LARGE_GROUP_BYTES = 64 << 10


class Group(NamedTuple):
    start: bytes  # header and key, encoded
    values: list[bytes]
    timestamp_micros: int


class _Table(Protocol):
    def add(self, data: bytes) -> None: ...

    def take_groups(self) -> Iterator[Group]: ...


class Grouping:
    """Collects a GroupByKey's input; gives its output once the input is complete.

    The values of a large group stay in ``state``, where workers read them piece by piece.
    """

    def __init__(self, written: ElementCodec, read: ElementCodec, windowing: Windowing, state: StateStore) -> None:
        self._table = _table(written, read, windowing)
        self._state = state
        self.may_refer_to_state = True
        self.is_released = False

    def add(self, block: Block) -> None:
        if self.is_released:
            raise AssertionError("input came to a grouping whose output was released: a watermark ran ahead")
        self._table.add(block.data())
        block.release()

    def release(self) -> Iterator[Block]:
        """All groups, as blocks of about 1 MB. The watermark has passed every window."""
        self.is_released = True
        parts: list[bytes] = []
        size = count = 0
        hold = MAX
        for group in self._table.take_groups():
            value_bytes = sum(map(len, group.values))
            if value_bytes > _LARGE_GROUP_BYTES and self.may_refer_to_state:
                yield self._large_group(group)
                continue
            parts += (group.start, _LENGTH.pack(len(group.values)), *group.values)
            size += len(group.start) + value_bytes
            count += 1
            hold = min(hold, group.timestamp_micros)
            if size >= BLOCK_BYTES:
                yield Block.of_bytes(b"".join(parts), count, hold)
                parts, size, count, hold = [], 0, 0, MAX
        if count:
            yield Block.of_bytes(b"".join(parts), count, hold)

    def _large_group(self, group: Group) -> Block:
        token = self._state.add_group(_chunks(group.values))
        data = b"".join((group.start, _LENGTH.pack(-1), _REST_IN_STATE, bytes([len(token)]), token))
        return Block.of_shared_bytes(data, 1, group.timestamp_micros, lambda: self._state.remove_group(token))


def _table(written: ElementCodec, read: ElementCodec, windowing: Windowing) -> _Table:
    if windowing.is_default():
        return _GlobalTable(written, read)
    if isinstance(windowing.windowfn, NonMergingWindowFn) and windowing.triggerfn == trigger.DefaultTrigger():
        return _WindowTable(written, read, windowing)
    return _TriggerTable(written, read, windowing)


class _GlobalTable:
    """One window, one firing: timestamps and panes are of no interest."""

    _PANE = PaneInfo(is_first=True, is_last=True, timing=PaneInfoTiming.ON_TIME, index=0, nonspeculative_index=0)

    def __init__(self, written: ElementCodec, read: ElementCodec) -> None:
        self._written = written
        self._read = read
        self._values: dict[bytes, list[bytes]] = {}

    def add(self, data: bytes) -> None:
        values = self._values
        for element in self._written.keyed_elements(data, with_header=False):
            if (known := values.get(element.key)) is None:
                values[element.key] = [element.value]
            else:
                known.append(element.value)

    def take_groups(self) -> Iterator[Group]:
        timestamp = GlobalWindow().max_timestamp()
        header = self._read.encode_header(GlobalWindows.windowed_value(None, timestamp=timestamp, pane_info=self._PANE))
        while self._values:
            key, values = self._values.popitem()
            yield Group(header + key, values, _encoded_micros(timestamp))


class _WindowTable:
    """Windows that do not merge, each firing once, when it ends."""

    _PANE = PaneInfo(is_first=True, is_last=False, timing=PaneInfoTiming.ON_TIME, index=0, nonspeculative_index=0)

    def __init__(self, written: ElementCodec, read: ElementCodec, windowing: Windowing) -> None:
        self._written = written
        self._read = read
        combiner: Any = windowing.timestamp_combiner
        self._combiner: TimestampCombinerImpl = TimestampCombiner.get_impl(combiner, windowing.windowfn)
        self._keeps_times = windowing.timestamp_combiner != TimestampCombiner.OUTPUT_AT_EOW
        self._values: dict[bytes, dict[BoundedWindow, list[bytes]]] = {}
        self._times: dict[tuple[bytes, BoundedWindow], Timestamp] = {}

    def add(self, data: bytes) -> None:
        for element in self._written.keyed_elements(data):
            header: Any = element.header
            windows = self._values.setdefault(element.key, {})
            for window in header.windows:
                windows.setdefault(window, []).append(element.value)
                if self._keeps_times:
                    self._add_time(element.key, window, header.timestamp)

    def _add_time(self, key: bytes, window: BoundedWindow, timestamp: Timestamp) -> None:
        time = self._combiner.assign_output_time(window, timestamp)
        known = self._times.get((key, window))
        self._times[key, window] = time if known is None else self._combiner.combine(known, time)

    def take_groups(self) -> Iterator[Group]:
        while self._values:
            key, windows = self._values.popitem()
            for window, values in windows.items():
                time = self._times.pop((key, window), None) or window.max_timestamp()
                header = self._read.encode_header(WindowedValue(None, time, (window,), self._PANE))
                yield Group(header + key, values, _encoded_micros(time))


class _TriggerTable:
    """Everything else: Beam's own trigger machine, key by key."""

    def __init__(self, written: ElementCodec, read: ElementCodec, windowing: Windowing) -> None:
        self._written = written
        self._read = read
        self._windowing = windowing
        self._values: dict[bytes, list[WindowedValue]] = {}

    def add(self, data: bytes) -> None:
        for element in self._written.keyed_elements(data):
            header: Any = element.header
            self._values.setdefault(element.key, []).append(header.with_value(element.value))

    def take_groups(self) -> Iterator[Group]:
        driver = trigger.create_trigger_driver(self._windowing, is_batch=True)
        while self._values:
            key, windowed = self._values.popitem()
            for pane in driver.process_entire_key(key, windowed):
                yield Group(self._read.encode_header(pane) + key, list(pane.value[1]), _encoded_micros(pane.timestamp))


def _encoded_micros(timestamp: Timestamp) -> int:
    """What is left of a timestamp when it is encoded: Beam writes milliseconds."""
    return timestamp.micros // 1000 * 1000


def _chunks(values: Iterable[bytes]) -> list[bytes]:
    """Values joined to pieces of a size that is worth a request."""
    chunks: list[bytes] = []
    piece: list[bytes] = []
    size = 0
    for value in values:
        piece.append(value)
        size += len(value)
        if size >= BLOCK_BYTES:
            chunks.append(b"".join(piece))
            piece, size = [], 0
    if piece:
        chunks.append(b"".join(piece))
    return chunks
