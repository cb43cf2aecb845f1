"""Panes of windows that do not merge and fire when they end: an own way, since Beam's trigger machine is slow."""

from __future__ import annotations

import heapq
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Any

from apache_beam.transforms.core import Windowing
from apache_beam.transforms.window import BoundedWindow
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import PaneInfo, PaneInfoTiming, WindowedValue

from luminosity.engine.data.event_time import expiry_micros
from luminosity.engine.data.panes.pane_rows import Panes
from luminosity.engine.data.panes.pane_values import PaneValues

__all__ = ["WindowPanes"]


@dataclass(slots=True, eq=False)
class _Values:
    """What a window has of one key."""

    values: PaneValues = field(default_factory=PaneValues)
    time: Timestamp | None = None  # of the next pane; None: the end of the window
    panes: int = 0  # that have fired
    hold: int | None = None


@dataclass(slots=True)
class _Window:
    """An open window."""

    window: BoundedWindow
    end_micros: int
    expiry_micros: int
    last: Timestamp  # its last timestamp
    keys: dict[bytes, _Values] = field(default_factory=dict[bytes, _Values])


class WindowPanes(Panes[_Values]):
    """Keeps the values of all keys window by window. A window fires when the watermark passes its end.

    Elements that come later, but not too late, fire a pane at once. Fires what Beam's trigger machine would.
    """

    def __init__(self, windowing: Windowing) -> None:
        super().__init__(windowing)
        self._windows: dict[BoundedWindow, _Window] = {}
        self._ends: list[tuple[int, int, _Window]] = []  # a heap of windows that have not fired
        self._expiries: list[tuple[int, int, _Window]] = []  # a heap of all windows
        self._count = 0  # of all windows so far, since windows have no order
        self._restored_windows: dict[bytes, _Window] = {}  # by their encoding, which is quicker to compare

    def restore(self, saved: Iterable[tuple[bytes, bytes]]) -> Iterator[None]:
        """Take over the rows of a checkpoint, in the order of their keys, after :meth:`track`."""
        yield from super().restore(saved)
        self._restored_windows.clear()

    def _fields(self, entry: _Values, of: tuple[BoundedWindow, bytes]) -> tuple[Any, ...]:
        assert self._codec is not None
        window, key = of
        time = entry.time.micros if entry.time is not None else None
        return self._codec.encode_window(window), key, time, entry.panes, entry.hold

    def _restored(self, fields: tuple[Any, ...]) -> _Values:
        assert self._codec is not None
        encoded, key, time, panes, hold = fields
        of_window = self._restored_windows.get(encoded)
        if of_window is None:
            window = self._codec.decode_window(encoded)
            self._restored_windows[encoded] = of_window = self._windows.get(window) or self._open(window)
        entry = of_window.keys[key] = _Values(time=Timestamp(micros=time) if time is not None else None, panes=panes)
        self._set_hold(entry, hold)
        self.memory_bytes += self._entry_bytes + len(key)
        return entry

    @property
    def is_empty(self) -> bool:
        """Whether no window is open."""
        return not self._windows

    def add(self, key: bytes, values: list[WindowedValue]) -> Iterator[tuple[bytes, WindowedValue]]:
        """Add values of a key, in windows that have not expired, and yield the panes that fire at once."""
        late: dict[BoundedWindow, _Window] = {}
        size = 0
        for value in values:
            for window in value.windows:
                of_window = self._windows.get(window) or self._open(window)
                entry = of_window.keys.get(key)
                if entry is None:
                    entry = of_window.keys[key] = _Values()
                    size += self._entry_bytes + len(key)
                if self._rows is not None:
                    self._rows.change(entry, (window, key))
                size += entry.values.append(value.value)
                self._hold(of_window, entry, value.timestamp)
                if of_window.end_micros <= self._watermark:
                    late[window] = of_window
        self.memory_bytes += size
        for of_window in late.values():
            yield key, self._pane(of_window, key, of_window.keys[key], PaneInfoTiming.LATE)

    def advance(self, watermark: int) -> Iterator[tuple[bytes, WindowedValue] | None]:
        """Move event time to ``watermark``, and yield the panes of windows that end by then.

        Yields None between panes if there is much to do, so that you can continue later. Add nothing in between.
        """
        self._watermark = watermark
        while self._ends and self._ends[0][0] <= watermark:
            _, _, of_window = heapq.heappop(self._ends)
            if of_window.expiry_micros < watermark:
                # One key after the other, since to free millions of them at once would take long.
                for key in list(of_window.keys):
                    entry = of_window.keys.pop(key)
                    yield key, self._pane(of_window, key, entry, PaneInfoTiming.ON_TIME)
                    self._close(key, entry)
            else:
                for key, entry in of_window.keys.items():
                    yield key, self._pane(of_window, key, entry, PaneInfoTiming.ON_TIME)
        while self._expiries and self._expiries[0][0] < watermark:
            _, _, of_window = heapq.heappop(self._expiries)
            del self._windows[of_window.window]
            while of_window.keys:
                self._close(*of_window.keys.popitem())
                yield None
        self.settle()

    def _last_first(self) -> Iterator[_Values]:
        windows = sorted(self._windows.values(), key=lambda of_window: of_window.end_micros, reverse=True)
        return (entry for of_window in windows for entry in of_window.keys.values())

    def _clear(self) -> None:
        self._windows.clear()

    def _open(self, window: BoundedWindow) -> _Window:
        of_window = _Window(window, window.end.micros, expiry_micros(window, self._windowing), window.max_timestamp())
        self._windows[window] = of_window
        self._count += 1
        if of_window.end_micros > self._watermark:
            heapq.heappush(self._ends, (of_window.end_micros, self._count, of_window))
        heapq.heappush(self._expiries, (of_window.expiry_micros, self._count, of_window))
        return of_window

    def _hold(self, of_window: _Window, entry: _Values, timestamp: Timestamp) -> None:
        """Note the timestamp of the next pane, and hold the watermark back for it, unless it is late already."""
        time = of_window.last
        if self._keeps_times:
            time = self._combiner.assign_output_time(of_window.window, timestamp)
            if time.micros < self.output_watermark:
                return
            entry.time = time = self._combiner.combine(entry.time, time) if entry.time is not None else time
        hold = time.micros // 1000 * 1000
        if hold >= self.output_watermark // 1000 * 1000:
            self._set_hold(entry, hold)

    def _pane(self, of_window: _Window, key: bytes, entry: _Values, timing: int) -> WindowedValue:
        if self._rows is not None:
            self._rows.change(entry, (of_window.window, key))
        pane = PaneInfo(
            is_first=entry.panes == 0, is_last=False, timing=timing, index=entry.panes, nonspeculative_index=entry.panes
        )
        values = entry.values
        if self._accumulates:
            values = values.copy()
        else:
            entry.values = PaneValues()
            self.memory_bytes -= values.memory_bytes
        time = entry.time if entry.time is not None else of_window.last
        entry.time = None
        entry.panes += 1
        self._set_hold(entry, None)
        return WindowedValue(values, time, (of_window.window,), pane)
