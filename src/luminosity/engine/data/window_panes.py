"""Panes of windows that do not merge and fire when they end: an own way, since Beam's trigger machine is slow."""

from __future__ import annotations

import heapq
from collections.abc import Iterator
from dataclasses import dataclass, field
from typing import Any

from apache_beam.transforms import trigger
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.timeutil import TimestampCombinerImpl
from apache_beam.transforms.window import BoundedWindow, TimestampCombiner
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import PaneInfo, PaneInfoTiming, WindowedValue

from luminosity.engine.data.expiry import expiry_micros
from luminosity.engine.data.watermarks import MIN, Holds

__all__ = ["WindowPanes"]


@dataclass(slots=True)
class _Values:
    """What a window has of one key."""

    values: list[bytes] = field(default_factory=list[bytes])
    time: Timestamp | None = None  # of the next pane; None: the end of the window
    panes: int = 0  # that have fired
    hold: int | None = None


@dataclass(slots=True)
class _Window:
    """An open window."""

    window: BoundedWindow
    end_micros: int
    last: Timestamp  # its last timestamp
    keys: dict[bytes, _Values] = field(default_factory=dict[bytes, _Values])


class WindowPanes:
    """Keeps the values of all keys window by window. A window fires when the watermark passes its end.

    Elements that come later, but not too late, fire a pane at once. Fires what Beam's trigger machine would.
    """

    def __init__(self, windowing: Windowing) -> None:
        combiner: Any = windowing.timestamp_combiner
        self._windowing = windowing
        self._combiner: TimestampCombinerImpl = TimestampCombiner.get_impl(combiner, windowing.windowfn)
        self._keeps_times = windowing.timestamp_combiner != TimestampCombiner.OUTPUT_AT_EOW
        self._accumulates = windowing.accumulation_mode == trigger.AccumulationMode.ACCUMULATING
        self._windows: dict[BoundedWindow, _Window] = {}
        self._ends: list[tuple[int, int, _Window]] = []  # a heap of windows that have not fired
        self._expiries: list[tuple[int, int, _Window]] = []  # a heap of all windows
        self._count = 0  # of all windows so far, since windows have no order
        self._holds = Holds()
        self._watermark = self.output_watermark = MIN

    @property
    def earliest(self) -> int:
        """The earliest timestamp that a pane may have, in microseconds."""
        return self._holds.minimum

    @property
    def is_empty(self) -> bool:
        """Whether no window is open."""
        return not self._windows

    def next_fire(self) -> int | None:
        """Return None: no pane depends on the clock."""
        return None

    def add(self, key: bytes, values: list[WindowedValue]) -> Iterator[tuple[bytes, WindowedValue]]:
        """Add values of a key, in windows that have not expired, and yield the panes that fire at once."""
        late: dict[BoundedWindow, _Window] = {}
        for value in values:
            for window in value.windows:
                of_window = self._windows.get(window) or self._open(window)
                entry = of_window.keys.get(key)
                if entry is None:
                    entry = of_window.keys[key] = _Values()
                entry.values.append(value.value)
                self._hold(of_window, entry, value.timestamp)
                if of_window.end_micros <= self._watermark:
                    late[window] = of_window
        for of_window in late.values():
            yield key, self._pane(of_window, of_window.keys[key], PaneInfoTiming.LATE)

    def advance(self, watermark: int) -> Iterator[tuple[bytes, WindowedValue]]:
        """Move event time to ``watermark``, and yield the panes of windows that end by then."""
        self._watermark = watermark
        while self._ends and self._ends[0][0] <= watermark:
            _, _, of_window = heapq.heappop(self._ends)
            for key, entry in of_window.keys.items():
                yield key, self._pane(of_window, entry, PaneInfoTiming.ON_TIME)
        while self._expiries and self._expiries[0][0] < watermark:
            _, _, of_window = heapq.heappop(self._expiries)
            del self._windows[of_window.window]
        self.output_watermark = max(self.output_watermark, min(watermark, self._holds.minimum))

    def _open(self, window: BoundedWindow) -> _Window:
        of_window = _Window(window, window.end.micros, window.max_timestamp())
        self._windows[window] = of_window
        self._count += 1
        if of_window.end_micros > self._watermark:
            heapq.heappush(self._ends, (of_window.end_micros, self._count, of_window))
        heapq.heappush(self._expiries, (expiry_micros(window, self._windowing), self._count, of_window))
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

    def _pane(self, of_window: _Window, entry: _Values, timing: int) -> WindowedValue:
        pane = PaneInfo(
            is_first=entry.panes == 0, is_last=False, timing=timing, index=entry.panes, nonspeculative_index=entry.panes
        )
        values = entry.values
        entry.values = list(values) if self._accumulates else []
        time = entry.time if entry.time is not None else of_window.last
        entry.time = None
        entry.panes += 1
        self._set_hold(entry, None)
        return WindowedValue(values, time, (of_window.window,), pane)

    def _set_hold(self, entry: _Values, hold: int | None) -> None:
        if hold != entry.hold:
            if entry.hold is not None:
                self._holds.remove(entry.hold)
            if hold is not None:
                self._holds.add(hold)
            entry.hold = hold
