"""Timers that are set and have not fired."""

from __future__ import annotations

import heapq
from collections.abc import Iterable

from luminosity.engine.data.watermarks import Holds
from luminosity.engine.plan.codecs import TimerRecord

__all__ = ["FamilyKey", "TimerStore"]

FamilyKey = tuple[str, str]


class TimerStore:
    """The timers of one shard's keys. Only the loop's thread uses it.

    There is one timer for each family, key, tag and window; setting it again replaces it.
    """

    def __init__(self) -> None:
        self._timers: dict[tuple[FamilyKey, bytes], TimerRecord] = {}
        # By family: heaps of times and identities. An entry is valid only while the timer is set for that time.
        self._schedule: dict[FamilyKey, list[tuple[int, bytes]]] = {}
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
                heapq.heappush(self._schedule.setdefault(family, []), (record.fire_micros, record.identity))

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
        due: list[tuple[FamilyKey, TimerRecord]] = []
        seen: set[tuple[FamilyKey, bytes]] = set()  # a timer set, cleared and set again has two entries
        while len(due) < limit and (family := self._first_due(now_by_family)) is not None:
            fire, identity = heapq.heappop(self._schedule[family])
            if (family, identity) not in seen:
                seen.add((family, identity))
                timer = self._timers[family, identity]
                due.append((family, timer))
                earliest.setdefault(timer.key, fire)
        taken: dict[FamilyKey, list[TimerRecord]] = {}
        for family, timer in due:
            if timer.fire_micros == earliest[timer.key]:
                del self._timers[family, timer.identity]
                self.holds.remove(timer.hold_micros)
                taken.setdefault(family, []).append(timer)
            else:
                heapq.heappush(self._schedule[family], (timer.fire_micros, timer.identity))
        return taken
