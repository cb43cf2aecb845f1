"""Unit tests of parts of the loop: bundle sizes, timers, holds."""

from __future__ import annotations

from luminosity.engine.data.timers import TimerStore
from luminosity.engine.data.watermarks import MAX
from luminosity.engine.loop.sizing import BundleSize
from luminosity.engine.plan.codecs import TimerRecord

_FAMILY = ("step", "timer")


def timer(key: bytes, fire: int, tag: bytes = b"", is_clear: bool = False) -> TimerRecord:
    return TimerRecord(key + tag, key, is_clear, fire, fire, b"%s at %d" % (key, fire))


def fired(store: TimerStore, now: int) -> list[bytes]:
    return [t.encoded for timers in store.take_due({_FAMILY: now}, limit=100).values() for t in timers]


def test_bundles_start_at_one_element_and_grow_to_a_second_of_work() -> None:
    size = BundleSize()
    now, sizes = 0.0, []
    for _ in range(200):
        elements = size.next(now, queued=10**9, slots=1)
        sizes.append(elements)
        seconds = elements * 0.001
        size.learn(elements, seconds)
        now += seconds
    assert sizes[0] == 1
    assert sizes == sorted(sizes)
    assert 900 <= sizes[-1] <= 1000


def test_a_slow_element_is_a_bundle() -> None:
    size = BundleSize()
    for now in range(10):
        assert size.next(now, queued=64, slots=1) == 1
        size.learn(1, 0.5)


def test_what_is_left_is_shared_among_free_workers() -> None:
    size = BundleSize()
    size.next(0.0, 100, 1)
    for _ in range(20):
        size.learn(64, 0.64)
    assert size.next(1000.0, queued=10, slots=2) == 5


def test_little_work_is_not_worth_sharing() -> None:
    size = BundleSize()
    size.next(0.0, 100, 1)
    for _ in range(20):
        size.learn(1000, 0.001)
    assert size.next(1000.0, queued=100, slots=4) >= 100


def test_a_lost_worker_makes_bundles_smaller() -> None:
    size = BundleSize()
    size.next(0.0, 100, 1)
    for _ in range(20):
        size.learn(64, 0.00064)
    before = size.next(1000.0, queued=10**6, slots=1)
    size.shrink()
    assert size.next(1000.0, queued=10**6, slots=1) < before


def test_a_sinks_first_bundle_is_all_there_is_unless_that_is_a_lot() -> None:
    assert BundleSize(is_sink=True).next(0.0, queued=8, slots=2, queued_size=1e6) == 8
    assert BundleSize(is_sink=True).next(0.0, queued=8, slots=2, queued_size=1e8) == 4


def test_a_timer_fires_when_its_time_has_come_and_once() -> None:
    store = TimerStore()
    store.apply(_FAMILY, [timer(b"a", 10), timer(b"b", 20)])
    assert fired(store, 9) == []
    assert fired(store, 10) == [b"a at 10"]
    assert fired(store, 30) == [b"b at 20"]
    assert len(store) == 0
    assert store.holds.minimum == MAX


def test_a_later_bundle_replaces_and_clears_timers() -> None:
    store = TimerStore()
    store.apply(_FAMILY, [timer(b"a", 10), timer(b"b", 10)])
    store.apply(_FAMILY, [timer(b"a", 50), timer(b"b", 0, is_clear=True)])
    assert fired(store, 40) == []
    assert store.holds.minimum == 50
    assert fired(store, 50) == [b"a at 50"]


def test_a_keys_later_timer_waits_for_what_its_earlier_one_does() -> None:
    store = TimerStore()
    store.apply(_FAMILY, [timer(b"a", 20, tag=b"2"), timer(b"a", 10, tag=b"1"), timer(b"b", 15)])
    assert fired(store, 100) == [b"a at 10", b"b at 15"]
    assert fired(store, 100) == [b"a at 20"]
