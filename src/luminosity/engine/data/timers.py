"""Timers that are set and have not fired."""

from __future__ import annotations

import heapq
import sys
from collections.abc import Collection, Iterable, Iterator, Mapping

from luminosity.engine.data.event_time import MAX, Holds
from luminosity.engine.plan.codecs import TimerRecord

__all__ = ["FamilyKey", "TimerStore"]

FamilyKey = tuple[str, str]

_LATER_AT_LEAST = 100  # timers that wait for an earlier one of their key, before a search ends because of them
_INVALID_AT_LEAST = 1000  # entries of a schedule, before the invalid ones are worth removing


class TimerStore:
    """The timers of one shard's keys. Only the loop's thread uses it.

    There is one timer for each family, key, tag and window; setting it again replaces it. Timers that are reset or
    cleared leave nothing behind but entries in a heap, which are removed once they are the larger part.
    """

    def __init__(self) -> None:
        self._families: dict[FamilyKey, _Family] = {}
        self._count = 0
        # The timers by the last timestamp of their window, and a heap of these timestamps.
        self._by_window: dict[int, dict[tuple[FamilyKey, bytes], None]] = {}
        self._windows: list[int] = []
        self.holds = Holds()
        # With checkpoints: what changed since the last one, and the timers that bundles have taken and not committed.
        self._changed: set[tuple[FamilyKey, bytes]] | None = None
        self._taken: dict[tuple[FamilyKey, bytes], TimerRecord] = {}

    def __len__(self) -> int:
        return self._count

    def track(self) -> None:
        """Note changes from now on, for :meth:`take_changed`."""
        self._changed = set()

    def settle(self, taken: Mapping[FamilyKey, Iterable[TimerRecord]]) -> None:
        """Note that a bundle with these timers is committed. Until then they count as set, if changes are noted."""
        if self._changed is not None:
            for family_key, records in taken.items():
                for record in records:
                    if self._taken.pop((family_key, record.identity), None) is not None:  # of this shard
                        self._changed.add((family_key, record.identity))

    def take_changed(self) -> Iterator[tuple[FamilyKey, bytes, TimerRecord | None]]:
        """Yield the timers that changed since the last call: family, identity, and the timer if it is set."""
        changed, self._changed = self._changed or set(), set()
        for family_key, identity in changed:
            family = self._families.get(family_key)
            record = family.timers.get(identity) if family is not None else None
            yield family_key, identity, record or self._taken.get((family_key, identity))

    @property
    def entries(self) -> int:
        """How many entries all of its collections have together, to see whether any of them grows."""
        heaps = sum(len(family.heap) + len(family.timers) for family in self._families.values())
        return heaps + len(self._windows) + sum(map(len, self._by_window.values()))

    def apply(self, family_key: FamilyKey, records: Iterable[TimerRecord]) -> None:
        """Set and clear timers, in the order in which a bundle did."""
        family = self._families.get(family_key)
        if family is None:
            family = self._families[family_key] = _Family()
        for record in records:
            if record.identity in family.timers:
                self._remove(family_key, record.identity)
            if not record.is_clear:
                family.set(record)
                self._count += 1
                self.holds.add(record.hold_micros)
            if self._changed is not None:
                self._changed.add((family_key, record.identity))
        family.compact()

    def restore(self, family_key: FamilyKey, records: Collection[TimerRecord]) -> None:
        """Put back timers that are set, as a checkpoint has them. No timer comes twice. Quicker than :meth:`apply`."""
        self._families.setdefault(family_key, _Family()).fill(records)
        self._count += len(records)
        self.holds.fill(record.hold_micros for record in records)

    def note_windows(self, family_key: FamilyKey, records: Iterable[TimerRecord]) -> None:
        """Note when the windows of timers end, so that :meth:`drop_expired` finds them. Call it after :meth:`apply`."""
        for record in records:
            if record.identity in self._families[family_key].timers and not record.is_clear:
                timers = self._by_window.get(record.window_micros)
                if timers is None:
                    timers = self._by_window[record.window_micros] = {}
                    heapq.heappush(self._windows, record.window_micros)
                timers[family_key, record.identity] = None

    @property
    def next_expiry(self) -> int:
        """The end of the first window that may have timers, in microseconds."""
        return self._windows[0] if self._windows else MAX

    def drop_expired(self, micros: int, limit: int = sys.maxsize) -> int:
        """Drop timers of windows that ended before ``micros``, up to ``limit``. Returns how many were dropped."""
        dropped = 0
        while self._windows and self._windows[0] < micros and dropped < limit:
            timers = self._by_window[self._windows[0]]
            while timers and dropped < limit:
                expired = next(reversed(timers))
                self._remove(*expired)
                dropped += 1
                if self._changed is not None:
                    self._changed.add(expired)
            if not timers:
                del self._by_window[heapq.heappop(self._windows)]
        if dropped:
            for family in self._families.values():
                family.compact()
        return dropped

    def _remove(self, family_key: FamilyKey, identity: bytes) -> TimerRecord:
        record = self._families[family_key].remove(identity)
        self._count -= 1
        self.holds.remove(record.hold_micros)
        if (timers := self._by_window.get(record.window_micros)) is not None:
            timers.pop((family_key, identity), None)
        return record

    def next_fire(self, family_key: FamilyKey) -> int | None:
        """Return when the family's next timer fires, in microseconds, or None if none is set."""
        family = self._families.get(family_key)
        return family.next_fire() if family is not None else None

    def has_due(self, now_by_family: dict[FamilyKey, int]) -> bool:
        """Return whether a timer of these families is due."""
        for family_key, now in now_by_family.items():
            fire = self.next_fire(family_key)
            if fire is not None and fire <= now:
                return True
        return False

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
        seen = 0
        # If most timers are later ones of the same few keys, looking at more of them finds nothing.
        while seen < limit and len(later) <= seen - len(later) + _LATER_AT_LEAST:
            if (family_key := self._first_due(now_by_family)) is None:
                break
            timer = self._remove(family_key, self._families[family_key].heap[0][1])
            seen += 1
            if earliest.setdefault(timer.key, timer.fire_micros) == timer.fire_micros:
                taken.setdefault(family_key, []).append(timer)
            else:
                later.append((family_key, timer))
        for family_key, timer in later:
            self.apply(family_key, [timer])
            if timer.window_micros in self._by_window:
                self.note_windows(family_key, [timer])
        if self._changed is not None:
            self._taken |= {(f, record.identity): record for f, records in taken.items() for record in records}
        return taken


class _Family:
    """The timers of one family, by identity, and a heap of their times.

    An entry of the heap is valid only while the timer is set for that time.
    """

    __slots__ = ("_invalid", "heap", "timers")

    def __init__(self) -> None:
        self.timers: dict[bytes, TimerRecord] = {}
        self.heap: list[tuple[int, bytes]] = []
        self._invalid = 0  # entries of the heap, at most

    def set(self, record: TimerRecord) -> None:
        self.timers[record.identity] = record
        heapq.heappush(self.heap, (record.fire_micros, record.identity))

    def fill(self, records: Iterable[TimerRecord]) -> None:
        self.timers.update((record.identity, record) for record in records)
        self._make_heap()

    def remove(self, identity: bytes) -> TimerRecord:
        self._invalid += 1
        return self.timers.pop(identity)

    def next_fire(self) -> int | None:
        heap, timers = self.heap, self.timers
        while heap:
            fire, identity = heap[0]
            timer = timers.get(identity)
            if timer is not None and timer.fire_micros == fire:
                return fire
            heapq.heappop(heap)
            self._invalid -= 1
        return None

    def compact(self) -> None:
        """Remove the invalid entries of the heap if they are the larger part."""
        if 2 * self._invalid > len(self.heap) + _INVALID_AT_LEAST:
            self._make_heap()

    def _make_heap(self) -> None:
        self.heap = [(record.fire_micros, identity) for identity, record in self.timers.items()]
        heapq.heapify(self.heap)
        self._invalid = 0
