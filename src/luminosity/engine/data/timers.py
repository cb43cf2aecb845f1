"""Timers that are set and have not fired."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from luminosity.engine.data.watermarks import Holds
from luminosity.engine.plan.codecs import TimerRecord

__all__ = ["FamilyKey", "TimerStore"]

FamilyKey = tuple[str, str]

_LATER_AT_LEAST = 100  # timers that wait for an earlier one of their key, before a search ends because of them
_INVALID_AT_LEAST = 1000  # entries of a schedule, before the invalid ones are worth removing


class TimerStore:
    """The timers of one shard's keys. Only the loop's thread uses it.

    There is one timer for each family, key, tag and window; setting it again replaces it.
    """

    def __init__(self) -> None:
        self._timers: dict[tuple[FamilyKey, bytes], TimerRecord] = {}
        # By family: heaps of times and identities. An entry is valid only while the timer is set for that time.
        self._schedule: dict[FamilyKey, list[tuple[int, bytes]]] = {}
        # Heap of the timers' windows: last timestamp, family and identity. A timer may be gone when its window expires.
        self._windows: list[tuple[int, FamilyKey, bytes]] = []
        self._in_windows: set[tuple[FamilyKey, bytes]] = set()
        self.holds = Holds()

    def __len__(self) -> int:
        return len(self._timers)

    def apply(self, family: FamilyKey, records: Iterable[TimerRecord]) -> None:
        """Set and clear timers, in the order in which a bundle did."""
        for record in records:
            previous = self._timers.pop((family, record.identity), None)
            if previous is not None:
                self.holds.remove(previous.hold_micros)
            if not record.is_clear:
                self._timers[family, record.identity] = record
                self.holds.add(record.hold_micros)
                if previous is None or previous.fire_micros != record.fire_micros:
                    self._schedule_timer(family, record)

    def note_windows(self, family: FamilyKey, records: Iterable[TimerRecord]) -> None:
        """Note when the windows of timers end, so that :meth:`drop_expired` finds them."""
        for record in records:
            timer = family, record.identity
            if not record.is_clear and timer not in self._in_windows:
                self._in_windows.add(timer)
                heapq.heappush(self._windows, (record.window_micros, *timer))

    def drop_expired(self, micros: int) -> bool:
        """Drop the timers of windows that ended before ``micros``. Returns whether there were any."""
        has_dropped = False
        while self._windows and self._windows[0][0] < micros:
            _, family, identity = heapq.heappop(self._windows)
            self._in_windows.discard((family, identity))
            if (record := self._timers.pop((family, identity), None)) is not None:
                self.holds.remove(record.hold_micros)
                has_dropped = True
        return has_dropped

    def _schedule_timer(self, family: FamilyKey, record: TimerRecord) -> None:
        schedule = self._schedule.setdefault(family, [])
        heapq.heappush(schedule, (record.fire_micros, record.identity))
        if len(schedule) > 2 * len(self._timers) + _INVALID_AT_LEAST:
            # A set removes timers that were set, cleared and set again, too.
            schedule[:] = {entry for entry in schedule if self._is_set(family, *entry)}
            heapq.heapify(schedule)

    def next_fire(self, family: FamilyKey) -> int | None:
        """Return when the family's next timer fires, in microseconds, or None if none is set."""
        schedule = self._schedule.get(family, [])
        while schedule and not self._is_set(family, *schedule[0]):
            heapq.heappop(schedule)
        return schedule[0][0] if schedule else None

    def _is_set(self, family: FamilyKey, fire_micros: int, identity: bytes) -> bool:
        timer = self._timers.get((family, identity))
        return timer is not None and timer.fire_micros == fire_micros

    def _first_due(self, now_by_family: dict[FamilyKey, int]) -> FamilyKey | None:
        fires = [
            (fire, f) for f, now in now_by_family.items() if (fire := self.next_fire(f)) is not None and fire <= now
        ]
        return min(fires)[1] if fires else None

    def take_due(self, now_by_family: dict[FamilyKey, int], limit: int) -> dict[FamilyKey, list[TimerRecord]]:
        """Remove and return due timers. Of each key only the earliest are due, since they may change its later ones."""
        earliest: dict[bytes, int] = {}
        taken: dict[FamilyKey, list[TimerRecord]] = {}
        later: list[tuple[FamilyKey, TimerRecord]] = []
        seen: set[tuple[FamilyKey, bytes]] = set()  # a timer set, cleared and set again has two entries
        # If most timers are later ones of the same few keys, looking at more of them finds nothing.
        while len(seen) < limit and len(later) <= len(seen) - len(later) + _LATER_AT_LEAST:
            if (family := self._first_due(now_by_family)) is None:
                break
            fire, identity = heapq.heappop(self._schedule[family])
            if (family, identity) in seen:
                continue
            seen.add((family, identity))
            timer = self._timers[family, identity]
            if earliest.setdefault(timer.key, fire) == fire:
                taken.setdefault(family, []).append(timer)
            else:
                later.append((family, timer))
        for family, timers in taken.items():
            for timer in timers:
                del self._timers[family, timer.identity]
                self.holds.remove(timer.hold_micros)
        for family, timer in later:
            heapq.heappush(self._schedule[family], (timer.fire_micros, timer.identity))
        return taken
