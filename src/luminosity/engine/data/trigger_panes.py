"""Panes of any window and trigger, by Beam's trigger machine."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from typing import Any

from apache_beam.transforms import trigger
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.window import BoundedWindow
from apache_beam.utils.timestamp import MIN_TIMESTAMP, Timestamp
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.engine.data.clock import Clock
from luminosity.engine.data.expiry import expiry_micros
from luminosity.engine.data.watermarks import MIN, Holds

__all__ = ["TriggerPanes"]

_COMBINING = type(trigger.GeneralTriggerDriver.INDEX)  # the class of tags whose values are combined
_HOLD_TAG = "watermark"  # Beam's trigger machine names the state of its holds so


class TriggerPanes:
    """Keeps the state and the timers of Beam's trigger machine for all keys.

    Holds the watermark back for panes that are still to come, and forgets windows that have expired.
    """

    def __init__(self, windowing: Windowing, clock: Clock) -> None:
        self._windowing = windowing
        self._clock = clock
        self._machine = _TriggerMachine(windowing, _Seconds(clock))
        self._keys: dict[bytes, _KeyState] = {}
        self._timers: dict[str, list[_Timer]] = {TimeDomain.WATERMARK: [], TimeDomain.REAL_TIME: []}
        self._expiries: list[tuple[int, bytes]] = []  # a heap: when a window of a key expires
        self._order = itertools.count()
        self._holds = Holds()
        self._watermark = self.output_watermark = MIN

    @property
    def earliest(self) -> int:
        """The earliest timestamp that a pane may have, in microseconds."""
        return self._holds.minimum

    @property
    def is_empty(self) -> bool:
        """Whether no key has an open window."""
        return not self._keys

    def add(self, key: bytes, values: list[WindowedValue]) -> Iterator[tuple[bytes, WindowedValue]]:
        """Add values of a key, in windows that have not expired, and yield the panes that fire at once."""
        state = self._keys.get(key) or self._keys.setdefault(key, _KeyState(self, key))
        watermark, output_watermark = Timestamp(micros=self._watermark), Timestamp(micros=self.output_watermark)
        yield from self._fired(state, self._machine.process_elements(state, values, output_watermark, watermark))
        self._settle(state)

    def advance(self, watermark: int) -> Iterator[tuple[bytes, WindowedValue]]:
        """Move event time to ``watermark`` and processing time to the clock's, and yield the panes that fire."""
        self._watermark = watermark
        self._machine.watermark = Timestamp(micros=watermark)
        yield from self._fire(TimeDomain.WATERMARK, watermark)
        yield from self._fire(TimeDomain.REAL_TIME, self._clock.micros())
        while self._expiries and self._expiries[0][0] < watermark:
            _, key = heapq.heappop(self._expiries)
            if (state := self._keys.get(key)) is not None:
                yield from self._close_expired(state)
        self.output_watermark = max(self.output_watermark, min(watermark, self._holds.minimum))

    def next_fire(self) -> int | None:
        """Return when the next processing-time trigger fires, in microseconds since 1970, or None if none is set."""
        timers = self._timers[TimeDomain.REAL_TIME]
        while timers and not timers[0].is_set():
            heapq.heappop(timers)
        return timers[0].fire_micros if timers else None

    def schedule(self, timer: _Timer) -> None:
        """Note a timer that the trigger machine has set."""
        heapq.heappush(self._timers[timer.domain], timer)

    def next_order(self) -> int:
        """Return a number that is larger than all before."""
        return next(self._order)

    def _fire(self, domain: str, now: int) -> Iterator[tuple[bytes, WindowedValue]]:
        timers = self._timers[domain]
        while timers and timers[0].fire_micros <= now:
            timer = heapq.heappop(timers)
            if not timer.is_set():
                continue
            timer.clear()
            # The time of a processing-time timer says nothing about the window: only the watermark does.
            micros = timer.fire_micros if domain == TimeDomain.WATERMARK else self._watermark
            time, watermark = Timestamp(micros=micros), Timestamp(micros=self._watermark)
            state = timer.state
            panes = self._machine.process_timer(timer.window_id, timer.name, domain, time, state, watermark)
            yield from self._fired(state, panes)
            self._settle(state)

    def _fired(self, state: _KeyState, panes: Iterable[WindowedValue]) -> Iterator[tuple[bytes, WindowedValue]]:
        for pane in panes:
            for window in pane.windows:
                state.note_fired(window)
            yield state.key, pane

    def _settle(self, state: _KeyState) -> None:
        """Update the hold of a key, and note when its windows expire."""
        # The watermark can't be held for a pane that is late already.
        hold = state.earliest_hold(self._machine.timestamp_combiner_impl, self.output_watermark)
        if hold != state.hold:
            if state.hold is not None:
                self._holds.remove(state.hold)
            if hold is not None:
                self._holds.add(hold)
            state.hold = hold
        for window in state.windows():
            if window not in state.expiring:
                state.expiring.add(window)
                heapq.heappush(self._expiries, (expiry_micros(window, self._windowing), state.key))

    def _close_expired(self, state: _KeyState) -> Iterator[tuple[bytes, WindowedValue]]:
        """Yield what the triggers of expired windows have left over, and forget these windows."""
        expired = [w for w in state.windows() if expiry_micros(w, self._windowing) < self._watermark]
        for window in expired:
            if state.has_unfired(window):
                pane = self._machine.last_pane(window, state)
                yield from self._fired(state, [pane])
            state.forget(window)
        state.expiring.intersection_update(state.windows())
        self._settle(state)
        if not state.windows():
            del self._keys[state.key]


class _TriggerMachine(trigger.GeneralTriggerDriver):
    """Beam's trigger machine, which can also close a window, and knows early from late panes.

    Beam's own calls a pane early if the watermark of the output is before the end of the window. Other windows may hold
    that watermark back, even if this window has ended.
    """

    watermark: Timestamp = MIN_TIMESTAMP  # of the input

    def _output(self, window: Any, finished: Any, state: Any, output_watermark: Any, maybe_ontime: Any) -> Any:
        return super()._output(window, finished, state, self.watermark, maybe_ontime)

    def last_pane(self, window: BoundedWindow, state: _KeyState) -> WindowedValue:
        """Return a last pane with the elements that a window has left."""
        adapter: Any = trigger.MergeableStateAdapter(state)
        return self._output(window, True, adapter, self.watermark, True)


class _Seconds:
    """The clock as Beam's trigger machine wants it."""

    def __init__(self, clock: Clock) -> None:
        self._clock = clock

    def time(self) -> float:
        return self._clock.micros() / 1e6


class _Timer:
    """A timer of the trigger machine. It is valid as long as its state has it set for that time."""

    __slots__ = ("domain", "fire_micros", "name", "order", "state", "window_id")

    def __init__(self, state: _KeyState, window_id: Any, name: str, domain: str, fire_micros: int, order: int) -> None:
        self.state = state
        self.window_id = window_id
        self.name = name
        self.domain = domain
        self.fire_micros = fire_micros
        self.order = order

    def __lt__(self, other: _Timer) -> bool:
        return (self.fire_micros, self.order) < (other.fire_micros, other.order)

    def is_set(self) -> bool:
        return self.state.set_timers.get((self.window_id, self.name, self.domain)) is self

    def clear(self) -> None:
        del self.state.set_timers[self.window_id, self.name, self.domain]


class _KeyState(trigger.InMemoryUnmergedState):
    """What the trigger machine keeps for one key. Its timers are scheduled among those of all keys."""

    def __init__(self, panes: TriggerPanes, key: bytes) -> None:
        super().__init__()
        self._panes = panes
        self.key = key
        self.hold: int | None = None
        self.set_timers: dict[tuple[Any, str, str], _Timer] = {}
        self.expiring: set[BoundedWindow] = set()  # windows whose expiry is scheduled
        self._unfired: set[Any] = set()  # ids of windows with elements that were in no pane yet

    # Beam's own state keeps every value that was ever added, such as one for each pane, and combines all of them at
    # each read. One combined value is enough.

    def add_state(self, window: Any, tag: Any, value: Any) -> None:
        if isinstance(tag, _COMBINING):
            kept: Any = self.state[window]
            combined = kept.get(tag.tag)
            if combined is None:
                combined = tag.combine_fn.create_accumulator()
            kept[tag.tag] = tag.combine_fn.add_input(combined, value)
            return
        super().add_state(window, tag, value)
        if tag.tag == _HOLD_TAG:
            times = self.state[window][_HOLD_TAG]
            times[:] = [tag.timestamp_combiner_impl.combine_all(times)]
        if tag is trigger.GeneralTriggerDriver.ELEMENTS:
            self._unfired.add(window)

    def get_state(self, window: Any, tag: Any) -> Any:
        if not isinstance(tag, _COMBINING):
            return super().get_state(window, tag)
        combined = self.state[window].get(tag.tag) if window in self.state else None
        if combined is None:
            combined = tag.combine_fn.create_accumulator()
        return tag.combine_fn.extract_output(combined)

    def has_unfired(self, window: BoundedWindow) -> bool:
        """Return whether a window has elements that were in no pane yet."""
        return not self._unfired.isdisjoint(self._window_ids().get(window, ()))

    def note_fired(self, window: BoundedWindow) -> None:
        """Note that all elements of a window were in a pane."""
        self._unfired.difference_update(self._window_ids().get(window, ()))

    def set_timer(self, window: Any, name: str, time_domain: str, timestamp: Any, dynamic_timer_tag: str = "") -> None:
        micros = Timestamp.of(timestamp).micros
        set_timer = self.set_timers.get((window, name, time_domain))
        if set_timer is not None and set_timer.fire_micros == micros:
            return  # as for each element of a window
        timer = _Timer(self, window, name, time_domain, micros, self._panes.next_order())
        self.set_timers[window, name, time_domain] = timer
        self._panes.schedule(timer)

    def clear_timer(self, window: Any, name: str, time_domain: str, dynamic_timer_tag: str = "") -> None:
        self.set_timers.pop((window, name, time_domain), None)

    def windows(self) -> list[BoundedWindow]:
        """Return the windows that are open."""
        return list(self._window_ids())

    def _window_ids(self) -> dict[BoundedWindow, list[Any]]:
        ids: Any = self.get_global_state(trigger.MergeableStateAdapter.WINDOW_IDS, {})
        return ids

    def forget(self, window: BoundedWindow) -> None:
        """Drop all that is kept of a window."""
        for window_id in self._window_ids().pop(window):
            self.state.pop(window_id, None)
            self._unfired.discard(window_id)
            for timer in [timer for timer in self.set_timers if timer[0] == window_id]:
                del self.set_timers[timer]

    def earliest_hold(self, combiner: Any, watermark: int) -> int | None:
        """Return the earliest timestamp from ``watermark`` on of a pane that is still to come, after encoding."""
        holds: list[int] = []
        for window_ids in self._window_ids().values():
            times = [time for i in window_ids if i in self.state for time in self.state[i].get(_HOLD_TAG, ())]
            if times:
                holds.append(combiner.combine_all(times).micros // 1000 * 1000)
        return min((hold for hold in holds if hold >= watermark // 1000 * 1000), default=None)
