"""Group by key and window, on encoded bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterator

from apache_beam.transforms import trigger
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.window import GlobalWindow, GlobalWindows
from apache_beam.utils.windowed_value import PaneInfo, PaneInfoTiming, WindowedValue

from luminosity.engine.blocks import Block
from luminosity.engine.fnapi.state import StateStore
from luminosity.engine.loop.watermarks import MAX
from luminosity.engine.plan.codecs import ElementCodec
from luminosity.engine.workers.channel import BLOCK_BYTES

_ONLY_PANE = PaneInfo(is_first=True, is_last=True, timing=PaneInfoTiming.ON_TIME, index=0, nonspeculative_index=0)
_LENGTH = struct.Struct(">i")  # how Beam's iterable coder begins: the length, or -1 for pieces
_REST_IN_STATE = b"\xff" * 9 + b"\x01"  # -1 as a variable-length integer, in place of a piece's length
_LARGE_GROUP_BYTES = 64 << 10


class Grouping:
    """Collects a GroupByKey's input; gives its output once the input is complete.

    The values of a large group stay in ``state``, where workers read them piece by piece.
    """

    def __init__(self, written: ElementCodec, read: ElementCodec, windowing: Windowing, state: StateStore) -> None:
        self._written = written
        self._read = read
        self._windowing = windowing
        self._state = state
        self.may_refer_to_state = True
        self._is_global = windowing.is_default()
        self._values: dict[bytes, list[bytes]] = {}
        self._windowed: dict[bytes, list[WindowedValue]] = {}
        self.is_released = False

    def add(self, block: Block) -> None:
        data = block.data()
        block.release()
        if self._is_global:
            values = self._values
            for element in self._written.keyed_elements(data, with_header=False):
                if (known := values.get(element.key)) is None:
                    values[element.key] = [element.value]
                else:
                    known.append(element.value)
        else:
            for element in self._written.keyed_elements(data):
                assert element.header is not None
                self._windowed.setdefault(element.key, []).append(element.header.with_value(element.value))

    def release(self) -> Iterator[Block]:
        """All groups, as blocks of about 1 MB. The watermark has passed every window."""
        self.is_released = True
        groups = self._global_groups() if self._is_global else self._window_groups()
        parts: list[bytes] = []
        size = count = 0
        hold = MAX
        for start, values, timestamp in groups:
            value_bytes = sum(map(len, values))
            if value_bytes > _LARGE_GROUP_BYTES and self.may_refer_to_state:
                yield self._large_group(start, values, timestamp)
                continue
            parts += (start, _LENGTH.pack(len(values)), *values)
            size += len(start) + value_bytes
            count += 1
            hold = min(hold, timestamp)
            if size >= BLOCK_BYTES:
                yield Block.of_bytes(b"".join(parts), count, hold)
                parts, size, count, hold = [], 0, 0, MAX
        if count:
            yield Block.of_bytes(b"".join(parts), count, hold)

    def _large_group(self, start: bytes, values: list[bytes], hold: int) -> Block:
        token = self._state.add_group(_chunks(values))
        data = b"".join((start, _LENGTH.pack(-1), _REST_IN_STATE, bytes([len(token)]), token))
        return Block.of_shared_bytes(data, 1, hold, lambda: self._state.remove_group(token))

    def _global_groups(self) -> Iterator[tuple[bytes, list[bytes], int]]:
        timestamp = GlobalWindow().max_timestamp()
        header = self._read.encode_header(GlobalWindows.windowed_value(None, timestamp=timestamp, pane_info=_ONLY_PANE))
        while self._values:
            key, values = self._values.popitem()
            yield header + key, values, timestamp.micros

    def _window_groups(self) -> Iterator[tuple[bytes, list[bytes], int]]:
        driver = trigger.create_trigger_driver(self._windowing, is_batch=True)
        while self._windowed:
            key, windowed = self._windowed.popitem()
            for pane in driver.process_entire_key(key, windowed):
                yield self._read.encode_header(pane) + key, list(pane.value[1]), pane.timestamp.micros


def _chunks(values: list[bytes]) -> list[bytes]:
    """Values joined to pieces of a size that is worth a request."""
    chunks: list[bytes] = []
    start = size = 0
    for index, value in enumerate(values):
        size += len(value)
        if size >= BLOCK_BYTES:
            chunks.append(b"".join(values[start : index + 1]))
            start, size = index + 1, 0
    if start < len(values):
        chunks.append(b"".join(values[start:]))
    return chunks
