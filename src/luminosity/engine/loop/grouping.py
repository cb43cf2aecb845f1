"""Group by key and window, on encoded bytes."""

from __future__ import annotations

import struct
from collections.abc import Iterable, Iterator

from apache_beam.transforms import trigger
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.window import GlobalWindow, GlobalWindows
from apache_beam.utils.windowed_value import PaneInfo, PaneInfoTiming, WindowedValue

from luminosity.engine.blocks import Block
from luminosity.engine.loop.watermarks import MAX
from luminosity.engine.plan.codecs import ElementCodec
from luminosity.engine.workers.channel import BLOCK_BYTES

_ONLY_PANE = PaneInfo(
    is_first=True, is_last=True, timing=PaneInfoTiming.ON_TIME, index=0, nonspeculative_index=0
)
_LENGTH = struct.Struct(">i")  # how Beam's iterable coder begins when it knows its length


class Grouping:
    """Collects a GroupByKey's input; gives its output once the input is complete."""

    def __init__(self, written: ElementCodec, read: ElementCodec, windowing: Windowing) -> None:
        self._written = written
        self._read = read
        self._windowing = windowing
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
        for encoded, timestamp in groups:
            parts.append(encoded)
            size += len(encoded)
            count += 1
            hold = min(hold, timestamp)
            if size >= BLOCK_BYTES:
                yield Block.of_bytes(b"".join(parts), count, hold)
                parts, size, count, hold = [], 0, 0, MAX
        if count:
            yield Block.of_bytes(b"".join(parts), count, hold)

    def _global_groups(self) -> Iterator[tuple[bytes, int]]:
        timestamp = GlobalWindow().max_timestamp()
        header = self._read.encode_header(
            GlobalWindows.windowed_value(None, timestamp=timestamp, pane_info=_ONLY_PANE)
        )
        while self._values:
            key, values = self._values.popitem()
            yield b"".join((header, key, _iterable(values))), timestamp.micros

    def _window_groups(self) -> Iterator[tuple[bytes, int]]:
        driver = trigger.create_trigger_driver(self._windowing, is_batch=True)
        while self._windowed:
            key, windowed = self._windowed.popitem()
            for pane in driver.process_entire_key(key, windowed):
                header = self._read.encode_header(pane)
                yield b"".join((header, key, _iterable(pane.value[1]))), pane.timestamp.micros


def _iterable(values: Iterable[bytes]) -> bytes:
    values = list(values)
    return _LENGTH.pack(len(values)) + b"".join(values)
