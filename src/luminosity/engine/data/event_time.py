"""Event time, in microseconds: its ends, the holds that keep a watermark back, and when windows expire.

Elements of an expired window are dropped, and what a stateful step keeps for it is forgotten.
"""

from __future__ import annotations

import heapq
import sys
from collections.abc import Iterable, Iterator, Mapping, Sized
from typing import Any

from apache_beam.coders.coder_impl import IntervalWindowCoderImpl
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.window import BoundedWindow
from apache_beam.utils import timestamp
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.engine.data.wire import StateKeys
from luminosity.engine.plan.codecs import Codecs, ElementCodec, KeyedElement, TimerRecord
from luminosity.engine.plan.graph import may_never_end

__all__ = ["MAX", "MIN", "CellExpiry", "Holds", "WindowExpiry", "expiry_micros"]

MIN: int = timestamp.MIN_TIMESTAMP.micros
MAX: int = timestamp.MAX_TIMESTAMP.micros
_REMOVED_AT_LEAST = 1000  # timestamps in a heap, before the removed ones are worth dropping
_MOST_KNOWN = 10_000  # bounds the cache of decoded windows to about a megabyte


class Holds:
    """A multiset of timestamps that knows its minimum. There may be millions of them, such as one for each timer.

    >>> holds = Holds()
    >>> holds.add(5); holds.add(3); holds.remove(3)
    >>> holds.minimum
    5
    """

    def __init__(self) -> None:
        self._counts: dict[int, int] = {}
        self._heap: list[int] = []  # the timestamps, and some that were removed

    def add(self, hold: int) -> None:
        """Add one occurrence of a timestamp."""
        hold = min(hold, MAX - 1)  # as long as there is a hold, the watermark must not reach MAX
        count = self._counts.get(hold, 0)
        self._counts[hold] = count + 1
        if not count:
            heapq.heappush(self._heap, hold)
            if len(self._heap) > 2 * len(self._counts) + _REMOVED_AT_LEAST:
                self._heap = list(self._counts)
                heapq.heapify(self._heap)

    def fill(self, holds: Iterable[int]) -> None:
        """Add many timestamps. Quicker than :meth:`add`."""
        for hold in holds:
            hold = hold if hold < MAX else MAX - 1
            self._counts[hold] = self._counts.get(hold, 0) + 1
        self._heap = list(self._counts)
        heapq.heapify(self._heap)

    def remove(self, hold: int) -> None:
        """Remove one occurrence of a timestamp that was added."""
        hold = min(hold, MAX - 1)
        count = self._counts[hold] - 1
        if count:
            self._counts[hold] = count
        else:
            del self._counts[hold]

    @property
    def minimum(self) -> int:
        """The earliest timestamp, or ``MAX`` if there is none."""
        while self._heap and self._heap[0] not in self._counts:
            heapq.heappop(self._heap)
        return self._heap[0] if self._heap else MAX


def expiry_micros(window: BoundedWindow, windowing: Windowing) -> int:
    """Return the last microsecond of event time at which a window takes elements."""
    return min(window.max_timestamp().micros + windowing.allowed_lateness.micros, MAX - 1)


class WindowExpiry:
    """Knows the windows of a stateful step's input, and drops elements that come after their windows have expired."""

    def __init__(self, windowing: Windowing, codec: ElementCodec, window_coder: Any) -> None:
        self.lateness = windowing.allowed_lateness.micros
        self._windowing = windowing
        self._codec = codec
        self._known: dict[bytes, int] = {}  # when windows expire
        self._window_coder = window_coder  # of state keys: in elements, windows may have their length before them

    @classmethod
    def of(cls, pcollection_id: str, coder_id: str, codecs: Codecs) -> WindowExpiry | None:
        """Return when the windows of a PCollection expire. None if they never do: in the global window, or in batch."""
        components = codecs.graph.components
        codec = codecs.elements(coder_id)
        if codec.is_global or not may_never_end(pcollection_id, components):
            return None
        strategy = components.windowing_strategies[components.pcollections[pcollection_id].windowing_strategy_id]
        return cls(codecs.windowing(pcollection_id), codec, codecs.impl(strategy.window_coder_id))

    def of_state_key(self, window: bytes) -> int:
        """Return when the window in the key of a state cell expires."""
        if (known := self._known.get(window)) is None:
            if len(self._known) >= _MOST_KNOWN:
                self._known.clear()
            known = self._known[window] = expiry_micros(self._window_coder.decode(window), self._windowing)
        return known

    def expired_ms(self, passed_micros: int) -> int | None:
        """Return the end of the last windows that have expired, in milliseconds, if time has passed so far.

        None if the windows are not Beam's intervals, whose ends workers can read from state keys.
        """
        if not isinstance(self._window_coder, IntervalWindowCoderImpl):
            return None
        return (passed_micros - self.lateness) // 1000

    def allows(self, timer: TimerRecord) -> bool:
        """Return whether an event-time timer may fire at its time: not after its window has expired."""
        return timer.fire_micros <= timer.window_micros + self.lateness + 1  # one for the end of the window is fine

    def kept(self, elements: Iterable[KeyedElement], watermark: int) -> Iterator[tuple[KeyedElement, int]]:
        """Yield each element with the number of its windows that have expired, and only the windows that have not."""
        for element in elements:
            header: Any = element.header
            windows = tuple(w for w in header.windows if expiry_micros(w, self._windowing) >= watermark)
            expired = len(header.windows) - len(windows)
            if expired:
                encoded = b""
                if windows:
                    header = WindowedValue(None, header.timestamp, windows, header.pane_info)
                    encoded = self._codec.encode_header(header) + element.key + element.value
                element = element._replace(encoded=encoded)
            yield element, expired


class CellExpiry:
    """The cells of one shard's state by the time at which their windows expire."""

    def __init__(self) -> None:
        self._expiry_of: dict[bytes, int] = {}
        self._cells: dict[int, dict[bytes, None]] = {}  # by the time at which they expire
        self._times: list[int] = []  # a heap of these times

    def __len__(self) -> int:
        return len(self._expiry_of)

    def note(self, cells: Mapping[bytes, Sized], expiry: WindowExpiry) -> None:
        """Note cells that a bundle has written. Empty ones are no longer there."""
        state_keys = StateKeys()
        for cell_key, cell in cells.items():
            known = self._expiry_of.get(cell_key)
            if known is not None and not cell:
                del self._expiry_of[cell_key]
                del self._cells[known][cell_key]
            elif known is None and cell:
                state_keys.read(cell_key)
                time = expiry.of_state_key(state_keys.window)
                self._expiry_of[cell_key] = time
                if time not in self._cells:
                    self._cells[time] = {}
                    heapq.heappush(self._times, time)
                self._cells[time][cell_key] = None

    @property
    def next_expiry(self) -> int:
        """When the first window that may have cells expires, in microseconds."""
        return self._times[0] if self._times else MAX

    def take(self, watermark: int, limit: int = sys.maxsize) -> list[bytes]:
        """Remove and return cells whose windows have expired, up to ``limit``."""
        taken: list[bytes] = []
        while self._times and self._times[0] < watermark and len(taken) < limit:
            cells = self._cells[self._times[0]]
            while cells and len(taken) < limit:
                taken.append(cells.popitem()[0])
            if not cells:
                del self._cells[heapq.heappop(self._times)]
        for cell_key in taken:
            del self._expiry_of[cell_key]
        return taken
