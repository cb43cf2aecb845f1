"""Tests of the cache in workers of a stream, with a clock of its own."""

from __future__ import annotations

from itertools import pairwise
from typing import Any

import pytest
from apache_beam.coders import coders
from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.runners.worker import statecache
from apache_beam.transforms.window import IntervalWindow

from luminosity.engine.workers.sdk import stream_cache
from luminosity.engine.workers.sdk.stream_cache import StreamCache
from luminosity.engine.workers.sdk.user_state import estimate_size

_SIDE = ("step", "side")


def cell(key: int, end: int | None = None) -> bytes:
    state_key = beam_fn_api_pb2.StateKey()
    state_key.bag_user_state.transform_id = "step"
    state_key.bag_user_state.key = b"%d" % key
    if end is not None:
        state_key.bag_user_state.window = coders.IntervalWindowCoder().encode(IntervalWindow(end - 60, end))
    return state_key.SerializeToString()


def side(window: bytes = b"") -> bytes:
    state_key = beam_fn_api_pb2.StateKey()
    state_key.iterable_side_input.transform_id, state_key.iterable_side_input.side_input_id = _SIDE
    state_key.iterable_side_input.window = window
    return state_key.SerializeToString()


class Cache:
    """A cache, the time, and a bundle each second."""

    def __init__(self, max_bytes: int = 100 << 20) -> None:
        self.now = 1000.0
        self.cache: Any = StreamCache(max_bytes, lambda: self.now)  # Any: tests look at private parts
        self.token = b"1"
        self.side_token = b"1"
        self.expired_s: int | None = None

    def put(self, state_key: bytes, token: Any = None) -> None:
        self.cache.put((state_key, token or self.token), [1])

    def has(self, state_key: bytes, token: Any = None) -> bool:
        return (state_key, token or self.token) in self.cache._cache  # not peek(), which counts as a use

    def run(self, seconds: int) -> None:
        for _ in range(seconds):
            self.now += 1
            expired_ms = None if self.expired_s is None else 1000 * self.expired_s
            self.cache.begin_bundle(f"bundle {self.now}", [self.token], {_SIDE: self.side_token}, expired_ms)

    def weigh(self) -> int:
        return sum(value.weight() for value in self.cache._cache.values())


@pytest.fixture(autouse=True)
def measure(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(statecache, "get_deep_size", estimate_size)


def test_cells_of_expired_windows_leave_and_others_stay() -> None:
    cache = Cache()
    for key in range(100):
        cache.put(cell(key, end=60))
        cache.put(cell(key, end=120))
    cache.expired_s = 59
    cache.run(120)
    assert all(cache.has(cell(key, end=60)) for key in range(100))
    cache.expired_s = 60
    cache.run(65)
    assert not any(cache.has(cell(key, end=60)) for key in range(100))
    assert all(cache.has(cell(key, end=120)) for key in range(100))
    assert cache.cache._current_weight == cache.weigh()


def test_the_cache_of_an_endless_stream_of_windows_stays_as_large_as_two_of_them() -> None:
    cache, largest = Cache(), list[int]()
    for number in range(20):  # a new window each minute
        for key in range(200):
            cache.put(cell(key, end=60 * (number + 1)))
        cache.run(60)
        cache.expired_s = 60 * (number + 1)
        largest.append(cache.cache.size())
    assert max(largest) <= 2 * 200  # with the marks of ten minutes
    assert cache.cache._current_weight == cache.weigh()


def test_state_in_the_global_window_stays_for_ten_minutes_after_its_last_use() -> None:
    cache = Cache()
    cache.put(cell(1))
    cache.put(cell(2))
    for _ in range(20):
        cache.run(60)
        cache.cache.peek((cell(2), cache.token))
    assert not cache.has(cell(1))
    assert cache.has(cell(2))
    cache.put(cell(3))
    cache.run(500)
    assert cache.has(cell(3))
    cache.run(200)
    assert not cache.has(cell(3))
    assert cache.cache.size() < 40  # marks of the last ten minutes
    assert cache.cache._current_weight == cache.weigh()


def test_entries_of_finished_bundles_and_of_shards_that_moved_leave() -> None:
    cache = Cache()
    cache.run(1)
    cache.put(cell(1), f"bundle {cache.now}")
    cache.put(cell(2))
    cache.token = b"2"
    cache.put(cell(2))
    cache.run(130)
    assert not cache.has(cell(1), "bundle 1001.0")
    assert not cache.has(cell(2), b"1")
    assert cache.has(cell(2), b"2")
    assert len(cache.cache._used_at) < 130


def test_old_versions_of_a_side_input_leave_and_the_last_one_stays_while_its_step_is_idle() -> None:
    cache = Cache()
    for version in range(1, 11):
        cache.side_token = b"%d" % version
        cache.run(10)
        cache.put(side(), cache.side_token)
        cache.put(cell(version), cache.token)  # whose token may have the same bytes
    for _ in range(180):
        cache.now += 1
        cache.cache.begin_bundle("other", [b"7"], {}, None)
    assert [version for version in range(1, 11) if cache.has(side(), b"%d" % version)] == [10]


def test_a_bundle_looks_at_a_part_of_many_entries(monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(stream_cache, "_LEAST_LOOKS", 10)
    cache = Cache()
    for key in range(1000):
        cache.put(cell(key, end=60))
    cache.run(1)
    cache.expired_s = 60
    cache.now += 30
    cache.run(1)
    sizes = [cache.cache.size()]
    for _ in range(50):
        cache.cache.begin_bundle("another", [cache.token], {}, 60_000)
        sizes.append(cache.cache.size())
    assert max(before - after for before, after in pairwise(sizes)) <= 21
    assert sizes[-1] < 10


def test_the_size_limit_holds_and_may_evict_the_marks() -> None:
    cache = Cache(max_bytes=50_000)
    for number in range(100):
        cache.run(31)
        for key in range(100):
            cache.put(cell(1000 * number + key))
        assert cache.cache._current_weight == cache.weigh() <= 50_000
    cache.cache.invalidate_all()
    cache.run(1000)
    assert cache.cache._current_weight == cache.weigh() < 100
