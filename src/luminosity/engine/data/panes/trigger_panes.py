"""Panes of any window and trigger, by Beam's triggers.

When a pane fires: Beam's trigger sees an element and sets a timer of its window (``WindowState.set_timer``), the
``Schedule`` holds all timers by their time, and ``advance`` takes those that are due and asks the trigger again
(``_fire``).
"""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from apache_beam.internal import pickler
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.window import BoundedWindow, NonMergingWindowFn, WindowFn
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import PaneInfo, PaneInfoTiming, WindowedValue

from luminosity.engine.data.event_time import MIN, expiry_micros
from luminosity.engine.data.panes.pane_rows import Panes
from luminosity.engine.data.panes.pane_values import PaneValues
from luminosity.engine.data.panes.trigger_state import EXPIRY, Schedule, WindowState
from luminosity.engine.data.saved_rows import Changes
from luminosity.engine.data.world import Clock

__all__ = ["TriggerPanes"]

_COMBINE_PREFIX = b"u"  # of rows in a checkpoint: a combining function of triggers. They come before those of entries


class TriggerPanes(Panes[WindowState]):
    """Keeps the state and the timers of triggers, for each key and window.

    Fires what Beam's ``GeneralTriggerDriver`` does, with the same triggers, but keeps the state of each window apart.
    So an element, a timer and a hold cost the same, however many windows of a key are open. Merging windows are the
    exception: their function is asked about all windows of a key. Holds the watermark back for panes that are still to
    come, and forgets windows that have expired.
    """

    def __init__(self, windowing: Windowing, clock: Clock) -> None:
        super().__init__(windowing)
        self._clock = clock
        self._trigger: Any = windowing.triggerfn
        self._has_on_time_pane = self._trigger.has_ontime_pane()
        self._merges = not isinstance(windowing.windowfn, NonMergingWindowFn)
        self._keys: dict[bytes, dict[BoundedWindow, WindowState]] = {}
        self._schedule = Schedule(clock)
        self._last_number = 0  # of a window
        self._watermark_time = Timestamp(micros=MIN)
        self._combines: dict[str, Any] = {}  # combining functions that a checkpoint has, by tag

    def save(self, changes: Changes, owner: str) -> None:
        """Write what has changed since the last checkpoint. Call it when nothing is left of :meth:`advance`."""
        known = len(self._combines)
        super().save(changes, owner)
        for tag, combine in itertools.islice(self._combines.items(), known, None):
            changes.put(owner, _COMBINE_PREFIX + tag.encode(), pickler.dumps(combine))

    def _restore_shared(self, key: bytes, value: bytes) -> None:
        super()._restore_shared(key, value)
        self._watermark_time = Timestamp(micros=self._watermark)
        if key.startswith(_COMBINE_PREFIX):
            self._combines[key[len(_COMBINE_PREFIX) :].decode()] = pickler.loads(value)

    def _fields(self, entry: WindowState, of: None) -> tuple[Any, ...]:
        assert self._codec is not None
        state = entry
        time = state.time.micros if state.time is not None else None
        counts = state.panes, state.nonspeculative_panes, state.is_finished, state.is_unfired
        machine = state.saved(self._combines)
        return self._codec.encode_window(state.window), state.key, time, state.hold, counts, machine

    def _restored(self, fields: tuple[Any, ...]) -> WindowState:
        assert self._codec is not None
        encoded, key, time, hold, counts, machine = fields
        window = self._codec.decode_window(encoded)
        state = WindowState(key, window, 0, self._schedule)
        state.restore(machine, self._combines)
        state.time = Timestamp(micros=time) if time is not None else None
        state.panes, state.nonspeculative_panes, state.is_finished, state.is_unfired = counts
        self._set_hold(state, hold)
        self._keys.setdefault(key, {})[window] = state
        self._last_number = max(self._last_number, *state.numbers)
        self.memory_bytes += self._entry_bytes + len(key)
        return state

    @property
    def is_empty(self) -> bool:
        """Whether no key has an open window."""
        return not self._keys

    def next_fire(self) -> int | None:
        """Return when the next processing-time trigger fires, in microseconds since 1970, or None if none is set."""
        return self._schedule.next_fire(TimeDomain.REAL_TIME)

    def has_due(self) -> bool:
        """Return whether a late element has set a timer for a time that has passed: fire it with :meth:`advance`."""
        fire = self._schedule.next_fire(TimeDomain.WATERMARK)
        return fire is not None and fire <= self._watermark

    def add(self, key: bytes, values: list[WindowedValue]) -> Iterator[tuple[bytes, WindowedValue]]:
        """Add values of a key, in windows that have not expired, and yield the panes that fire at once."""
        windows = self._keys.get(key)
        if windows is None:
            windows = self._keys[key] = {}
        added: dict[BoundedWindow, list[WindowedValue]] = {}
        for value in values:
            for window in value.windows:
                added.setdefault(window, []).append(value)
        if self._merges and not added.keys() <= windows.keys():
            added = self._merge(windows, added)
        watermark = self._watermark_time
        for window, elements in added.items():
            state = windows.get(window)
            if state is None:
                state = windows[window] = self._open(key, window)
            if state.is_finished:
                continue
            if self._rows is not None:
                self._rows.change(state)
            self._add_time(state, elements)
            on_element = self._trigger.on_element
            append = state.values.append
            size = 0
            for element in elements:
                size += append(element.value)
                on_element(element.value, window, state)
            self.memory_bytes += size
            state.is_unfired = True
            if self._trigger.should_fire(TimeDomain.WATERMARK, watermark, window, state):
                is_last = self._trigger.on_fire(watermark, window, state)
                yield key, self._pane(state, is_last, may_be_on_time=False)
            self._settle(state)

    def advance(self, watermark: int) -> Iterator[tuple[bytes, WindowedValue] | None]:
        """Move event time to ``watermark`` and processing time to the clock's, and yield the panes that fire.

        Yields None between panes if there is much to do, so that you can continue later. Add nothing in between.
        """
        self._watermark = watermark
        self._watermark_time = Timestamp(micros=watermark)
        yield from self._fire(TimeDomain.WATERMARK, watermark)
        yield from self._fire(TimeDomain.REAL_TIME, self._clock.micros())
        while (timer := self._schedule.take_due(EXPIRY, watermark - 1)) is not None:
            state = timer.state
            if state.is_unfired:  # what the trigger has left over
                yield state.key, self._pane(state, True, may_be_on_time=True)
            else:
                yield None
            self._forget(state)
        self.settle()

    def _last_first(self) -> list[WindowState]:
        states = [state for windows in self._keys.values() for state in windows.values()]
        return sorted(states, key=lambda state: state.last.micros, reverse=True)

    def _clear(self) -> None:
        self._keys.clear()

    def _fire(self, domain: str, now: int) -> Iterator[tuple[bytes, WindowedValue] | None]:
        while (timer := self._schedule.take_due(domain, now)) is not None:
            state = timer.state
            if self._rows is not None:
                self._rows.change(state)
            # The time of a processing-time timer says nothing about the window: only the watermark does.
            is_event_time = domain == TimeDomain.WATERMARK
            time = Timestamp(micros=timer.fire_micros) if is_event_time else self._watermark_time
            if state.is_finished or not self._trigger.should_fire(domain, time, state.window, state):
                yield None
                continue
            is_last = self._trigger.on_fire(time, state.window, state)
            yield state.key, self._pane(state, is_last, may_be_on_time=is_event_time)
            self._settle(state)

    def _open(self, key: bytes, window: BoundedWindow) -> WindowState:
        self._last_number += 1
        state = WindowState(key, window, self._last_number, self._schedule)
        state.set_timer("", EXPIRY, Timestamp(micros=expiry_micros(window, self._windowing)))
        self.memory_bytes += self._entry_bytes + len(key)
        return state

    def _forget(self, state: WindowState) -> None:
        """Drop all that is kept of a window."""
        windows = self._keys[state.key]
        del windows[state.window]
        if not windows:
            del self._keys[state.key]
        self._close(state.key, state)

    def _close(self, key: bytes, entry: WindowState) -> None:
        entry.clear_timers()
        super()._close(key, entry)

    def _merge(
        self, windows: dict[BoundedWindow, WindowState], added: dict[BoundedWindow, list[WindowedValue]]
    ) -> dict[BoundedWindow, list[WindowedValue]]:
        """Merge the windows of a key with those of new elements. Returns the elements by merged window."""
        merged_into: dict[BoundedWindow, BoundedWindow] = {}
        results: dict[BoundedWindow, WindowState] = {}
        merge_states = self._merge_states

        class Context(WindowFn.MergeContext):
            def merge(self, to_be_merged: Iterable[BoundedWindow], merge_result: BoundedWindow) -> None:
                to_be_merged = list(to_be_merged)
                for window in to_be_merged:
                    if window != merge_result:
                        merged_into[window] = merge_result
                if (state := merge_states(windows, to_be_merged, merge_result)) is not None:
                    results[merge_result] = state

        self._windowing.windowfn.merge(Context({*windows, *added}))
        merged: dict[BoundedWindow, list[WindowedValue]] = {}
        for window, elements in added.items():
            while window in merged_into:
                window = merged_into[window]
            merged.setdefault(window, []).extend(elements)
        for window, state in results.items():
            if windows.get(window) is state and window not in merged:
                # Triggers clear their timer when windows merge, and set it again with the next element.
                state.set_timer("merged", TimeDomain.WATERMARK, window.end)
                self._settle(state)
        return merged

    def _merge_states(
        self, windows: dict[BoundedWindow, WindowState], to_be_merged: list[BoundedWindow], result: BoundedWindow
    ) -> WindowState | None:
        """Merge what is kept of windows. Returns the state of the result, or None if nothing was kept of any."""
        state = windows.get(result)
        for window in to_be_merged:
            if window == result or (other := windows.pop(window, None)) is None:
                continue
            if state is None:
                state = windows[result] = other
                state.window, state.last = result, result.max_timestamp()
                state.panes = state.nonspeculative_panes = 0  # not known of merged windows
                continue
            if other.time is not None:
                state.time = other.time if state.time is None else self._combiner.combine(state.time, other.time)
            if self._rows is not None and other.values.is_on_disk:
                self._rows.rewrite_values(state)  # those on disk come before those in memory
            state.absorb(other)
            self._close(other.key, other)
        if state is not None:
            if self._rows is not None:
                self._rows.change(state)
            if state.time is not None and not self._keeps_times:
                state.time = state.last
            self._trigger.on_merge(to_be_merged, result, state)
            state.set_timer("", EXPIRY, Timestamp(micros=expiry_micros(result, self._windowing)))
        return state

    def _add_time(self, state: WindowState, elements: list[WindowedValue]) -> None:
        """Combine the timestamps of new elements with that of the next pane."""
        time: Timestamp | None = state.last
        if self._keeps_times:
            assign, window = self._combiner.assign_output_time, state.window
            times = [time for e in elements if (time := assign(window, e.timestamp)).micros >= self.output_watermark]
            time = self._combiner.combine_all(times)
        if time is not None:
            is_new = state.time is None or state.time is time
            state.time = time if is_new else self._combiner.combine(state.time, time)

    def _pane(self, state: WindowState, is_last: bool, *, may_be_on_time: bool) -> WindowedValue:
        """Return the next pane of a window.

        A pane is early until the watermark of the input has passed the window. Beam's own machine looks at the
        watermark of the output, which other windows may hold back, even if this window has ended.
        """
        index = state.panes
        state.panes += 1
        if self._watermark <= state.last.micros:
            timing, nonspeculative = PaneInfoTiming.EARLY, state.nonspeculative_panes or -1
            if state.nonspeculative_panes:  # late data has moved the end of the window
                state.nonspeculative_panes += 1
        else:
            nonspeculative = state.nonspeculative_panes
            state.nonspeculative_panes += 1
            timing = PaneInfoTiming.ON_TIME if may_be_on_time and not nonspeculative else PaneInfoTiming.LATE
        pane = PaneInfo(index == 0, bool(is_last), timing, index, nonspeculative)
        state.is_unfired = False
        state.is_finished |= bool(is_last)
        values = state.values
        if is_last or not self._accumulates:
            state.values = PaneValues()
            self.memory_bytes -= values.memory_bytes
        else:
            values = values.copy()
        time = state.time
        if time is None:
            time = state.last
        elif is_last or not self._has_on_time_pane or self._watermark >= state.window.end.micros:
            # Otherwise the watermark is held for a pane at the end of the window, even if it is empty.
            state.time = None
        return WindowedValue(values, time, (state.window,), pane)

    def _settle(self, state: WindowState) -> None:
        """Hold the watermark for the next pane of a window, unless that pane is late already."""
        hold = state.time.micros // 1000 * 1000 if state.time is not None else None
        is_late = hold is not None and hold < self.output_watermark // 1000 * 1000
        self._set_hold(state, None if is_late else hold)
