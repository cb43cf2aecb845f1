"""The state and the timers of Beam's triggers, for each key and window."""

from __future__ import annotations

import heapq
import marshal
from typing import Any

from apache_beam.internal import pickler
from apache_beam.transforms import trigger
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.window import BoundedWindow
from apache_beam.utils.timestamp import Timestamp

from luminosity.engine.data.panes.pane_values import PaneValues
from luminosity.engine.data.world import Clock

__all__ = ["EXPIRY", "Schedule", "WindowState"]

EXPIRY = "EXPIRY"  # the domain of the timers that forget windows
_COMBINING = type(trigger.GeneralTriggerDriver.INDEX)  # the class of tags whose values are combined
_CLEARED_AT_LEAST = 1000  # timers in a schedule, before the cleared ones are worth removing


class WindowState:
    """What is kept of a key in one window. Beam's triggers use it as their context.

    A window that came of merging has several numbers: it keeps the timers of all windows that it came of.
    """

    __slots__ = (
        "_schedule",
        "_tags",
        "_timers",
        "hold",
        "is_finished",
        "is_unfired",
        "key",
        "last",
        "nonspeculative_panes",
        "numbers",
        "panes",
        "time",
        "values",
        "window",
    )

    def __init__(self, key: bytes, window: BoundedWindow, number: int, schedule: Schedule) -> None:
        self.key = key
        self.window = window
        self.last: Timestamp = window.max_timestamp()
        self.values = PaneValues()
        self.time: Timestamp | None = None  # of the next pane
        self.hold: int | None = None
        self.panes = 0
        self.nonspeculative_panes = 0
        self.is_finished = False  # whether the trigger fires no more
        self.is_unfired = False  # whether it has elements that were in no pane yet
        self.numbers = [number]
        self._schedule = schedule
        self._tags: dict[str, tuple[Any, Any]] = {}  # the combining function, or None for a set, and what it has
        self._timers: dict[tuple[int, str, str], _Timer] = {}

    def saved(self, combines: dict[str, Any]) -> tuple[Any, ...]:
        """Return the triggers' state and timers, for ``marshal``. Adds their combining functions to ``combines``."""
        timers = [
            (*identity, timer.fire_micros, timer.order) for identity, timer in self._timers.items() if timer.is_set
        ]
        for name, (combine, _) in self._tags.items():
            if combine is not None:
                combines.setdefault(name, combine)
        kept: Any = {name: (combine is not None, kept) for name, (combine, kept) in self._tags.items()}
        try:
            marshal.dumps(kept)
        except ValueError:  # not of Python's own types
            kept = pickler.dumps(kept)
        return self.numbers, timers, kept

    def restore(self, saved: tuple[Any, ...], combines: dict[str, Any]) -> None:
        """Take over what :meth:`saved` has returned."""
        self.numbers, timers, tags = saved
        for number, name, domain, micros, order in timers:
            self._timers[number, name, domain] = self._schedule.restore(self, domain, micros, order)
        if isinstance(tags, bytes):
            tags = pickler.loads(tags)
        for name, (is_combined, kept) in tags.items():
            self._tags[name] = combines[name] if is_combined else None, kept

    def get_current_time(self) -> float:
        """Return the processing time in seconds, for triggers."""
        return self._schedule.clock.micros() / 1e6

    def add_state(self, tag: Any, value: Any) -> None:
        """Add a value to the state of a trigger."""
        if isinstance(tag, _COMBINING):
            combine, kept = self._tags.get(tag.tag) or (tag.combine_fn, tag.combine_fn.create_accumulator())
            self._tags[tag.tag] = combine, combine.add_input(kept, value)
        else:
            self._tags[tag.tag] = None, {*self.get_state(tag), value}

    def get_state(self, tag: Any) -> Any:
        """Return the state of a trigger."""
        combine, kept = self._tags.get(tag.tag) or (None, None)
        if not isinstance(tag, _COMBINING):
            return kept or ()
        if combine is None:
            return tag.combine_fn.extract_output(tag.combine_fn.create_accumulator())
        return combine.extract_output(kept)

    def clear_state(self, tag: Any) -> None:
        """Clear the state of a trigger."""
        self._tags.pop(tag.tag, None)

    def set_timer(self, name: str, time_domain: str, timestamp: Any) -> None:
        """Set a timer, for triggers."""
        micros = timestamp.micros if isinstance(timestamp, Timestamp) else Timestamp.of(timestamp).micros
        identity = self.numbers[0], name, time_domain
        timer = self._timers.get(identity)
        if timer is not None and timer.is_set:
            if timer.fire_micros == micros:
                return  # as for each element of a window
            self._schedule.clear(timer)
        self._timers[identity] = self._schedule.add(self, time_domain, micros)

    def clear_timer(self, name: str, time_domain: str) -> None:
        """Clear a timer, for triggers."""
        for number in self.numbers:
            timer = self._timers.pop((number, name, time_domain), None)
            if timer is not None and timer.is_set:
                self._schedule.clear(timer)

    def clear_timers(self) -> None:
        """Clear all timers."""
        for timer in self._timers.values():
            if timer.is_set:
                self._schedule.clear(timer)
        self._timers.clear()

    def absorb(self, other: WindowState) -> None:
        """Take over the values, the state and the timers of another window of the same key."""
        for timer in other._timers.values():
            timer.state = self
        self._timers.update(other._timers)
        self.numbers += other.numbers
        other._timers = {}
        for number in other.numbers:
            expiry = self._timers.pop((number, "", EXPIRY), None)
            if expiry is not None and expiry.is_set:
                self._schedule.clear(expiry)
        self.is_finished |= other.is_finished
        self.is_unfired |= other.is_unfired
        for name, (combine, kept) in other._tags.items():
            if name not in self._tags:
                self._tags[name] = combine, kept
            elif combine is None:
                self._tags[name] = None, self._tags[name][1] | kept
            else:
                self._tags[name] = combine, combine.merge_accumulators([self._tags[name][1], kept])
        self.values.extend(other.values)
        other.values = PaneValues()


class _Timer:
    """A timer of a trigger, or the expiry of a window."""

    __slots__ = ("domain", "fire_micros", "is_set", "order", "state")

    def __init__(self, state: WindowState, domain: str, fire_micros: int, order: int) -> None:
        self.state = state
        self.domain = domain
        self.fire_micros = fire_micros
        self.order = order
        self.is_set = True

    def __lt__(self, other: _Timer) -> bool:
        return (self.fire_micros, self.order) < (other.fire_micros, other.order)


class Schedule:
    """The timers of all keys, each domain in a heap. Cleared ones are removed once they are the larger part."""

    def __init__(self, clock: Clock) -> None:
        self.clock = clock
        self._heaps: dict[str, list[_Timer]] = {TimeDomain.WATERMARK: [], TimeDomain.REAL_TIME: [], EXPIRY: []}
        self._cleared = dict.fromkeys(self._heaps, 0)
        self._last_order = 0

    def __len__(self) -> int:
        return sum(map(len, self._heaps.values()))

    def add(self, state: WindowState, domain: str, micros: int) -> _Timer:
        """Set a timer."""
        self._last_order += 1
        return self.restore(state, domain, micros, self._last_order)

    def restore(self, state: WindowState, domain: str, micros: int, order: int) -> _Timer:
        """Set a timer again that was set before a restart. Timers of one moment fire in the order of ``order``."""
        timer = _Timer(state, domain, micros, order)
        heapq.heappush(self._heaps[domain], timer)
        self._last_order = max(self._last_order, order)
        return timer

    def clear(self, timer: _Timer) -> None:
        """Clear a timer that is set."""
        timer.is_set = False
        self._cleared[timer.domain] += 1
        heap = self._heaps[timer.domain]
        if 2 * self._cleared[timer.domain] > len(heap) + _CLEARED_AT_LEAST:
            heap[:] = [timer for timer in heap if timer.is_set]
            heapq.heapify(heap)
            self._cleared[timer.domain] = 0

    def next_fire(self, domain: str) -> int | None:
        """Return when the next timer fires, in microseconds, or None if none is set."""
        heap = self._heaps[domain]
        while heap and not heap[0].is_set:
            heapq.heappop(heap)
            self._cleared[domain] -= 1
        return heap[0].fire_micros if heap else None

    def take_due(self, domain: str, now: int) -> _Timer | None:
        """Remove and return the first timer that is due, or None if there is none."""
        fire = self.next_fire(domain)
        if fire is None or fire > now:
            return None
        timer = heapq.heappop(self._heaps[domain])
        timer.is_set = False
        return timer
