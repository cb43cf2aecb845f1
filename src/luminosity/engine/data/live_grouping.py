"""GroupByKey over unbounded input: panes are emitted while the input goes on, as watermark and clock move."""

from __future__ import annotations

import struct
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from apache_beam.transforms import trigger
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.window import NonMergingWindowFn
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.engine.data.blocks import Block, BlockStore
from luminosity.engine.data.clock import Clock
from luminosity.engine.data.expiry import expiry_micros
from luminosity.engine.data.trigger_panes import TriggerPanes
from luminosity.engine.data.watermarks import MAX, MIN, Holds
from luminosity.engine.data.window_panes import WindowPanes
from luminosity.engine.data.wire import BLOCK_BYTES
from luminosity.engine.plan.codecs import ElementCodec

__all__ = ["LiveGrouping", "panes_of"]

_LENGTH = struct.Struct(">i")  # Beam's iterable coder begins with the length


class _Panes(Protocol):
    """Decides which values of a key come out when."""

    @property
    def earliest(self) -> int: ...

    @property
    def is_empty(self) -> bool: ...

    @property
    def output_watermark(self) -> int: ...

    def add(self, key: bytes, values: list[WindowedValue]) -> Iterator[tuple[bytes, WindowedValue]]: ...

    def advance(self, watermark: int) -> Iterator[tuple[bytes, WindowedValue]]: ...

    def next_fire(self) -> int | None: ...


def panes_of(windowing: Windowing, clock: Clock) -> _Panes:
    """Return what decides on the panes of a GroupByKey with this windowing."""
    is_simple = isinstance(windowing.windowfn, NonMergingWindowFn) and windowing.triggerfn == trigger.DefaultTrigger()
    return WindowPanes(windowing) if is_simple else TriggerPanes(windowing, clock)


class LiveGrouping:
    """Collects the input of a GroupByKey by key and window, and emits a pane whenever a window's trigger fires.

    Drops elements that are later than allowed. Only the loop's thread uses it. Call :meth:`release` when the run ends.
    """

    def __init__(
        self, written: ElementCodec, read: ElementCodec, windowing: Windowing, blocks: BlockStore, clock: Clock
    ) -> None:
        self._written = written
        self._read = read
        self._blocks = blocks
        self._windowing = windowing
        self._panes = panes_of(windowing, clock)
        self.pending: deque[Block] = deque()  # not grouped yet
        self.pending_bytes = 0
        self._pending_holds = Holds()
        self._output: deque[Block] = deque()
        self._parts: list[bytes] = []  # of the block that is being made
        self._parts_bytes = self._parts_count = 0
        self._parts_hold = MAX
        self.watermark = MIN  # of the input that has been grouped
        self.dropped = 0  # elements that came later than their window allows

    @property
    def earliest(self) -> int:
        """The earliest timestamp that a pane or pending input may have, in microseconds."""
        return min(self._panes.earliest, self._pending_holds.minimum)

    @property
    def is_empty(self) -> bool:
        """Whether no key has an open window, and nothing is pending."""
        return self._panes.is_empty and not (self.pending or self._output)

    def add(self, block: Block) -> None:
        """Add input to be grouped by :meth:`absorb`. Takes over the block."""
        self.pending.append(block)
        self.pending_bytes += block.weight
        self._pending_holds.add(block.hold)

    def absorb(self) -> None:
        """Group the elements of one pending block, at the watermark of the last :meth:`advance`."""
        block = self.pending.popleft()
        self.pending_bytes -= block.weight
        by_key: dict[bytes, list[WindowedValue]] = {}
        for element in self._written.keyed_elements(block.data()):
            header: Any = element.header
            windows = tuple(w for w in header.windows if expiry_micros(w, self._windowing) >= self.watermark)
            self.dropped += len(header.windows) - len(windows)
            if windows:
                value = WindowedValue(element.value, header.timestamp, windows, header.pane_info)
                by_key.setdefault(element.key, []).append(value)
        for key, values in by_key.items():
            self._emit(self._panes.add(key, values))
        self._pending_holds.remove(block.hold)
        block.release()
        self._close_block()

    def advance(self, watermark: int) -> None:
        """Move event time to ``watermark`` and processing time to the clock's, and fire what is due by then.

        Nothing may be pending, since it arrived at the watermark before.
        """
        self.watermark = max(self.watermark, watermark)
        self._emit(self._panes.advance(self.watermark))
        self._close_block()

    def next_fire(self) -> int | None:
        """Return when the next processing-time trigger fires, in microseconds since 1970, or None if none is set."""
        return self._panes.next_fire()

    def next_block(self) -> Block | None:
        """Return the next panes, or None if there are none now."""
        return self._output.popleft() if self._output else None

    def release(self) -> None:
        """Release all data."""
        for block in (*self.pending, *self._output):
            block.release()
        self.pending.clear()
        self._output.clear()

    def _emit(self, panes: Iterable[tuple[bytes, WindowedValue]]) -> None:
        for key, pane in panes:
            values: list[bytes] = list(pane.value)
            parts = (self._read.encode_header(pane), key, _LENGTH.pack(len(values)), *values)
            self._parts += parts
            self._parts_bytes += sum(map(len, parts))
            self._parts_count += 1
            # A late pane holds back no watermark that has passed it already.
            hold = max(pane.timestamp.micros // 1000 * 1000, self._panes.output_watermark)
            self._parts_hold = min(self._parts_hold, hold)
            if self._parts_bytes >= BLOCK_BYTES:
                self._close_block()

    def _close_block(self) -> None:
        if self._parts_count:
            self._output.append(self._blocks.of_bytes(b"".join(self._parts), self._parts_count, self._parts_hold))
            self._parts, self._parts_bytes, self._parts_count, self._parts_hold = [], 0, 0, MAX
