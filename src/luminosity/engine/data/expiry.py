"""When windows expire: later elements are dropped, and what a stateful step keeps for them is forgotten."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from typing import Any

from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.window import BoundedWindow
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.engine.data.watermarks import MAX
from luminosity.engine.plan.codecs import ElementCodec, KeyedElement, TimerRecord

__all__ = ["CellExpiry", "WindowExpiry", "expiry_micros"]


def expiry_micros(window: BoundedWindow, windowing: Windowing) -> int:
    """Return the last microsecond of event time at which a window takes elements."""
    return min(window.max_timestamp().micros + windowing.allowed_lateness.micros, MAX - 1)


class WindowExpiry:
    """Knows the windows of a stateful step's input, and drops elements that come after their windows have expired."""

    def __init__(self, windowing: Windowing, codec: ElementCodec, window_coder: Any) -> None:
        self.lateness = windowing.allowed_lateness.micros
        self._windowing = windowing
        self._codec = codec
        self._window_coder = window_coder  # of state keys: in elements, windows may have their length before them

    def of_state_key(self, window: bytes) -> int:
        """Return when the window in the key of a state cell expires."""
        return expiry_micros(self._window_coder.decode(window), self._windowing)

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
        self._heap: list[tuple[int, bytes]] = []
        self._known: set[bytes] = set()

    def note(self, cell_keys: Iterable[bytes], expiry: WindowExpiry) -> None:
        """Note cells that a bundle has written."""
        for cell_key in cell_keys:
            if cell_key not in self._known:
                state_key = beam_fn_api_pb2.StateKey.FromString(cell_key)
                user_state = getattr(state_key, str(state_key.WhichOneof("type")))
                self._known.add(cell_key)
                heapq.heappush(self._heap, (expiry.of_state_key(user_state.window), cell_key))

    def take(self, watermark: int) -> list[bytes]:
        """Remove and return the cells whose windows have expired."""
        taken: list[bytes] = []
        while self._heap and self._heap[0][0] < watermark:
            taken.append(heapq.heappop(self._heap)[1])
        self._known.difference_update(taken)
        return taken
