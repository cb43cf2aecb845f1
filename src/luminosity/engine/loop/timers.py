"""Timers that are set and have not fired, of the keys of one lane."""

from __future__ import annotations

from collections.abc import Iterable

from luminosity.engine.loop.watermarks import Holds
from luminosity.engine.plan.codecs import TimerRecord

FamilyKey = tuple[str, str]


class TimerStore:
    """One timer per family, key, tag and window: a later one replaces it, whichever bundle set it."""

    def __init__(self) -> None:
        self._timers: dict[tuple[FamilyKey, bytes], TimerRecord] = {}
        self.holds = Holds()

    def __len__(self) -> int:
        return len(self._timers)

    def apply(self, family: FamilyKey, records: Iterable[TimerRecord]) -> None:
        """Set and clear, in the order that the bundle did."""
        for record in records:
            previous = self._timers.pop((family, record.identity), None)
            if previous is not None:
                self.holds.remove(previous.hold_micros)
            if not record.is_clear:
                self._timers[family, record.identity] = record
                self.holds.add(record.hold_micros)

    def next_fire(self, families: Iterable[FamilyKey]) -> int | None:
        wanted = set(families)
        return min((t.fire_micros for (f, _), t in self._timers.items() if f in wanted), default=None)

    def take_due(self, now_by_family: dict[FamilyKey, int]) -> dict[FamilyKey, list[TimerRecord]]:
        """Remove and return what is due; of each key only its earliest, since that may change its later ones."""
        earliest: dict[bytes, int] = {}
        due: list[tuple[FamilyKey, TimerRecord]] = []
        for (family, _), timer in self._timers.items():
            if timer.fire_micros <= now_by_family[family]:
                due.append((family, timer))
                earliest[timer.key] = min(timer.fire_micros, earliest.get(timer.key, timer.fire_micros))
        taken: dict[FamilyKey, list[TimerRecord]] = {}
        for family, timer in sorted(due, key=lambda item: item[1].fire_micros):
            if timer.fire_micros == earliest[timer.key]:
                del self._timers[family, timer.identity]
                self.holds.remove(timer.hold_micros)
                taken.setdefault(family, []).append(timer)
        return taken
