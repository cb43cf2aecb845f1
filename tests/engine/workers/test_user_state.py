"""Tests of user state in workers: Beam's cache over the engine's handler and state store, without processes."""

from __future__ import annotations

import contextlib
import random
from collections import Counter
from collections.abc import Callable, Generator, Iterator
from pathlib import Path
from typing import Any

import pytest
from apache_beam.coders import coders
from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.runners.worker import bundle_processor, statecache
from apache_beam.transforms.combiners import ToListCombineFn
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.window import IntervalWindow
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import PANE_INFO_UNKNOWN, PaneInfo, PaneInfoTiming

from luminosity.engine.data import state, wire
from luminosity.engine.data.shard import Shard
from luminosity.engine.data.state import BundleShards, StateStore
from luminosity.engine.loop.bundle import new_instruction_id
from luminosity.engine.spill.quota import Ledger
from luminosity.engine.workers.sdk import user_state
from luminosity.engine.workers.sdk.cells import AddingState
from luminosity.engine.workers.sdk.channel import RepeatedTimer, TimerStream
from luminosity.engine.workers.sdk.stream_cache import StreamCache
from luminosity.engine.workers.sdk.user_state import BatchingStateHandler, CachingHandler, estimate_size

_Bag = bundle_processor.SynchronousBagRuntimeState


class Runner:
    """The runner's side: a store and one shard. Counts the requests of all workers by kind."""

    def __init__(self) -> None:
        self.store = StateStore(".", Ledger("quota", 10**9, writers=0))
        self.shard = Shard(["read"], is_exclusive=True)
        self.requests: Counter[str] = Counter()

    def State(self, requests: Iterator[beam_fn_api_pb2.StateRequest]) -> Iterator[beam_fn_api_pb2.StateResponse]:
        for request in requests:
            own = {wire.STATE_WRITES: "writes", wire.STATE_SNAPSHOT: "snapshot"}.get(
                request.state_key.runner.key.rstrip(b"0123456789")
            )
            self.requests[own or str(request.WhichOneof("request"))] += 1
            yield self.store.handle(request)


class FakeWorker:
    """A worker with one slot. ``loop/shard.py`` needs only its identity and whether it has exited."""

    has_exited = False

    def __init__(self, runner: Runner, cache_bytes: int = 1 << 20, handler: Any = None) -> None:
        self._runner = runner
        cache, self._connection = handler or (statecache.StateCache(cache_bytes), BatchingStateHandler(runner))
        self._handler = CachingHandler(cache, self._connection)

    @contextlib.contextmanager
    def bundle(self, *, fails: bool = False) -> Generator[Callable[[str], _Bag]]:
        """Within the context, return the bags of keys; then write them, and commit or discard what was written."""
        runner, bags = self._runner, dict[str, _Bag]()
        instruction_id = new_instruction_id("test")
        token: Any = runner.shard.state_token(self, 0.0)  # type: ignore[arg-type]
        tokens = beam_fn_api_pb2.ProcessBundleRequest()
        tokens.cache_tokens.add(token=wire.pack_tokens(1, {0: token})).user_state.SetInParent()
        runner.store.begin(instruction_id, BundleShards(1, {0: runner.shard}))

        def bag(key: str) -> _Bag:
            state_key = beam_fn_api_pb2.StateKey()
            state_key.bag_user_state.transform_id = "step"
            state_key.bag_user_state.key = key.encode()
            return bags.setdefault(key, _Bag(self._handler, state_key, coders.BytesCoder()))

        with self._handler.process_instruction_id(instruction_id, tokens.cache_tokens):
            yield bag
            for written in bags.values():
                written.commit()
        assert runner.store.error(instruction_id) is None
        if fails:
            runner.store.discard(instruction_id)
            runner.shard.renew_state_token()
        else:
            runner.store.commit(instruction_id)

    def close(self) -> None:
        self._connection.done()


@pytest.fixture
def runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> Runner:
    monkeypatch.chdir(tmp_path)
    monkeypatch.setattr(statecache, "get_deep_size", estimate_size)
    return Runner()


@contextlib.contextmanager
def workers(runner: Runner, count: int, cache_bytes: int = 1 << 20) -> Generator[list[FakeWorker]]:
    made = [FakeWorker(runner, cache_bytes) for _ in range(count)]
    try:
        yield made
    finally:
        for worker in made:
            worker.close()


def test_a_bundle_sends_one_batch_of_writes_and_later_ones_read_nothing(runner: Runner) -> None:
    with workers(runner, 1) as [worker]:
        for number in range(3):
            with worker.bundle() as bag:
                for key in map(str, range(100)):
                    assert len(list(bag(key).read())) == number
                    bag(key).add(b"x")
    assert runner.requests == {"snapshot": 1, "writes": 3}


def test_cells_that_are_only_written_at_first_are_cached_as_well(runner: Runner) -> None:
    with workers(runner, 1) as [worker]:
        for _ in range(3):
            with worker.bundle() as bag:
                for key in map(str, range(100)):
                    bag(key).add(b"x")
        with worker.bundle() as bag:
            assert all(len(list(bag(key).read())) == 3 for key in map(str, range(100)))
    assert runner.requests == {"snapshot": 1, "writes": 3}


def test_another_worker_gets_all_small_cells_with_one_request(runner: Runner) -> None:
    with workers(runner, 2) as [first, second]:
        with first.bundle() as bag:
            for key in map(str, range(100)):
                bag(key).add(key.encode())
        with second.bundle() as bag:
            assert all(list(bag(key).read()) == [key.encode()] for key in map(str, range(100)))
            bag("1").add(b"second")
        with first.bundle() as bag:
            assert list(bag("1").read()) == [b"1", b"second"]
    assert runner.requests == {"snapshot": 3, "writes": 2}


def test_another_worker_gets_thousands_of_small_cells_with_one_request(runner: Runner) -> None:
    keys = [f"key {number}" for number in range(5000)]
    with workers(runner, 2, cache_bytes=100 << 20) as [first, second]:
        with first.bundle() as bag:
            for key in keys:
                bag(key).add(b"x")
        with second.bundle() as bag:
            assert all(list(bag(key).read()) == [b"x"] for key in keys)
    assert runner.requests == {"snapshot": 2, "writes": 1}


def test_new_keys_take_no_requests_however_many_there_were(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_state, "_OUTDATED_CELLS", 100)
    with workers(runner, 1) as [worker]:
        for number in range(20):
            with worker.bundle() as bag:
                for key in range(60):
                    assert list(bag(f"{number} {key}").read()) == []
                    bag(f"{number} {key}").add(b"x")
    # A snapshot serves the hundred first cells of two bundles. Then the runner is asked, up to the next bundle.
    assert runner.requests["snapshot"] == 10
    assert runner.requests["get"] < 10 * 20


def test_a_snapshot_that_lacks_many_cells_is_requested_again(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_state, "_MISSES", 10)
    monkeypatch.setattr(state, "_SNAPSHOT_BYTES", 1000)
    with workers(runner, 2) as [first, second]:
        with first.bundle() as bag:
            bag("large").add(b"x" * 2000)
        with second.bundle() as bag:
            assert all(list(bag(f"a{key}").read()) == [] for key in range(10))
            bag("large").clear()
        with second.bundle() as bag:
            assert all(list(bag(f"b{key}").read()) == [] for key in range(10))
    assert runner.requests == {"snapshot": 3, "get": 10, "writes": 2}


def test_a_stream_forgets_the_snapshots_of_shards_that_moved(runner: Runner) -> None:
    now = 0.0
    connection = BatchingStateHandler(runner, lambda: now)
    with contextlib.closing(FakeWorker(runner, handler=(StreamCache(1 << 20, lambda: now), connection))) as worker:
        for _ in range(10):
            runner.shard.renew_state_token()  # as if another worker had had it
            for _ in range(7):
                now += 10
                with worker.bundle() as bag:
                    bag("k").add(b"x")
            assert len(connection._snapshots) <= 2  # pyright: ignore[reportPrivateUsage]
        with worker.bundle() as bag:
            assert len(list(bag("k").read())) == 70
    assert runner.requests == {"snapshot": 10, "writes": 70}


def test_a_failed_bundle_leaves_nothing_in_the_cache(runner: Runner) -> None:
    with workers(runner, 1) as [worker]:
        with worker.bundle() as bag:
            bag("k").add(b"1")
        with worker.bundle(fails=True) as bag:
            bag("k").add(b"lost")
            bag("other").clear()
        with worker.bundle() as bag:
            assert list(bag("k").read()) == [b"1"]


def test_the_writes_of_a_bundle_that_raises_are_not_sent(runner: Runner) -> None:
    with workers(runner, 1) as [worker]:
        with contextlib.suppress(ZeroDivisionError), worker.bundle() as bag:
            bag("k").add(b"1")
            raise ZeroDivisionError
        runner.shard.renew_state_token()
        with worker.bundle() as bag:
            assert list(bag("k").read()) == []
    assert runner.requests == {"snapshot": 1}


def test_a_large_bag_is_read_in_pages_by_later_bundles_too(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(state, "_RESPONSE_BYTES", 1000)
    monkeypatch.setattr(state, "_COMPACT_BYTES", 3000)
    monkeypatch.setattr(state, "_COMPACT_CHUNKS", 8)
    monkeypatch.setattr(state, "_SNAPSHOT_BYTES", 100)
    expected: list[bytes] = []
    with workers(runner, 2) as [first, second]:
        for number in range(60):
            with (first if number < 20 else second).bundle() as bag:
                if number % 3 == 0:
                    assert list(bag("k").read()) == expected
                bag("k").add(b"%d" % number * 100)
            expected.append(b"%d" % number * 100)
    # The second worker keeps the first page and reads the others again, which grow and are joined meanwhile.
    assert 13 < runner.requests["get"] < 13 * 12


def test_writes_beyond_a_batch_are_sent_before_the_end(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(user_state, "_BATCH_BYTES", 1000)
    with workers(runner, 1) as [worker]:
        with worker.bundle() as bag:
            for key in map(str, range(10)):
                bag(key).add(b"x" * 500)
        with worker.bundle() as bag:
            assert all(list(bag(key).read()) == [b"x" * 500] for key in map(str, range(10)))
    # Five full batches, and an empty one whose response says that the others have arrived.
    assert runner.requests["writes"] == 6


@pytest.mark.parametrize("seed", range(100))
def test_any_course_of_events_gives_the_state_of_committed_bundles(
    runner: Runner, monkeypatch: pytest.MonkeyPatch, seed: int
) -> None:
    """Two workers take turns on a shard, some attempts fail, and caches, snapshots, batches and pages are tiny."""
    chance = random.Random(seed)
    monkeypatch.setattr(state, "_RESPONSE_BYTES", chance.choice([30, 1 << 20]))
    monkeypatch.setattr(state, "_SNAPSHOT_BYTES", chance.choice([0, 100, 1 << 20]))
    monkeypatch.setattr(state, "_COMPACT_CHUNKS", 3)
    monkeypatch.setattr(state, "_COMPACT_BYTES", chance.choice([50, 1 << 20]))
    monkeypatch.setattr(user_state, "_BATCH_BYTES", chance.choice([20, 1 << 20]))
    monkeypatch.setattr(user_state, "_OUTDATED_CELLS", chance.choice([3, 1000]))
    monkeypatch.setattr(user_state, "_SNAPSHOTS", 1)
    monkeypatch.setattr(user_state, "_MISSES", chance.choice([1, 4, 1000]))
    keys = [f"key{n}" for n in range(6)]
    committed: dict[str, list[bytes]] = {key: [] for key in keys}
    with workers(runner, 2, cache_bytes=chance.choice([1200, 1 << 20])) as both:
        worker = both[0]
        for number in range(60):
            worker = chance.choice([worker, worker, worker, *both])
            fails = chance.random() < 0.15
            content = {key: list(values) for key, values in committed.items()}
            with worker.bundle(fails=fails) as bag:
                for _ in range(chance.randrange(12)):
                    key = chance.choice(keys)
                    event = chance.random()
                    if event < 0.4:
                        assert list(bag(key).read()) == content[key], (number, key)
                    elif event < 0.9:
                        bag(key).add(b"%d" % number)
                        content[key].append(b"%d" % number)
                    else:
                        bag(key).clear()
                        content[key] = []
            if not fails:
                committed = content
            if chance.random() < 0.1:
                runner.store.spill(chance.randrange(2000))


class Point:
    def __init__(self) -> None:
        self.values = [0.5] * 100


@pytest.mark.parametrize(
    ("value", "least"),
    [
        ([b"x" * 1000] * 50, 50_000),
        ([dict.fromkeys(range(100), "y" * 500)], 50_000),
        ([Point() for _ in range(100)], 100 * 100 * 8),
        ([], 1),
    ],
)
def test_the_size_of_a_cached_cell_is_estimated_from_a_sample(value: Any, least: int) -> None:
    assert least <= estimate_size(value) <= 6 * max(least, 400)


def test_tokens_of_a_bundle_are_read_once(runner: Runner, monkeypatch: pytest.MonkeyPatch) -> None:
    worker = FakeWorker(runner, handler=(StreamCache(1 << 20), BatchingStateHandler(runner)))
    read: list[bytes] = []
    unpack = wire.unpack_tokens
    monkeypatch.setattr(wire, "unpack_tokens", lambda packed: read.append(packed) or unpack(packed))
    with worker.bundle() as bag:
        bag("a").add(b"1")
    assert len(read) == 1


class PlainBag:
    """A bag in this process. ``stored``: what earlier bundles have written."""

    def __init__(self) -> None:
        self.stored: list[Any] = []
        self.values: list[Any] = []

    def read(self) -> list[Any]:
        return [*self.stored, *self.values]

    def add(self, value: Any) -> None:
        self.values.append(value)

    def clear(self) -> None:
        self.stored, self.values = [], []

    def commit(self) -> None:
        self.stored, self.values = self.read(), []


class CountedLists(ToListCombineFn):
    """Counts the accumulators that are made or merged. What is read is the accumulator itself."""

    made = 0

    def create_accumulator(self, *_: Any, **__: Any) -> list[Any]:
        self.made += 1
        return []

    def merge_accumulators(self, accumulators: Any, *_: Any, **__: Any) -> list[Any]:
        self.made += 1
        return [each for accumulator in accumulators for each in accumulator]

    def extract_output(self, accumulator: list[Any], *_: Any, **__: Any) -> list[Any]:
        return accumulator


def test_a_combining_value_is_what_was_added_since_it_was_cleared() -> None:
    chance = random.Random(7)
    bag: Any = PlainBag()
    combine, expected = CountedLists(), list[int]()
    value = AddingState(bag, combine)
    for number in range(5000):
        action = chance.random()
        if action < 0.6:
            value.add(number)
            expected.append(number)
        elif action < 0.8:
            found: Any = value.read()
            assert sorted(found) == expected
            value.add(number)
            assert sorted(found) == expected  # what was read stays as it is
            expected.append(number)
        elif action < 0.9:
            value.clear()
            expected.clear()
        else:  # a bundle ends
            value.commit()
            value = AddingState(bag, combine)
        expected.sort()
    assert sorted(value.read()) == expected  # type: ignore[arg-type]  # it is a list


def test_values_that_are_added_in_turn_share_an_accumulator() -> None:
    bag: Any = PlainBag()
    combine = CountedLists()
    for _ in range(100):
        value = AddingState(bag, combine)
        for number in range(100):
            value.add(number)
        value.commit()
    assert combine.made == 100  # one for each bundle
    assert len(bag.stored) < 50  # some bundles have merged it with those before


_PANE = PaneInfo(is_first=True, is_last=False, timing=PaneInfoTiming.ON_TIME, index=3, nonspeculative_index=3)
_KEYS = (1, True, 1.0, "1", b"1", (1,), (True,))
_TIMES = (5, 5.0, Timestamp(5), Timestamp(5, 7), 6)


def _timers(kind: Any, domain: str, choices: list[Any]) -> tuple[list[bytes], int]:
    """Return what is sent if timers are set, and how many of them were encoded."""
    sent: list[bytes] = []
    stream = TimerStream(sent.append, lambda: sent.append(b"end"))
    coder = coders._TimerCoder(coders.FastPrimitivesCoder(), coders.IntervalWindowCoder()).get_impl()  # type: ignore[attr-defined]
    encoded = 0

    class Counted:
        def encode_to_stream(self, *arguments: Any) -> None:
            nonlocal encoded
            encoded += 1
            coder.encode_to_stream(*arguments)

    for key, time, end, tag, pane, is_clear in choices:
        window = IntervalWindow(0, end)
        timer = kind(key, window, Timestamp(4), pane, domain, "family", Counted(), stream)
        timer.clear(tag) if is_clear else timer.set(time, tag)
    stream.close()
    return sent, encoded


@pytest.mark.parametrize("domain", [TimeDomain.WATERMARK, TimeDomain.REAL_TIME])
def test_timers_are_sent_as_beam_encodes_them(domain: str) -> None:
    chance = random.Random(3)
    choices = [
        (
            chance.choice(_KEYS),
            chance.choice(_TIMES),
            chance.choice((10, 20)),
            chance.choice(("", "tag")),
            chance.choice((PANE_INFO_UNKNOWN, _PANE)),
            chance.random() < 0.1,
        )
        for _ in range(3000)
    ]
    ours, _ = _timers(RepeatedTimer, domain, choices)
    assert ours == _timers(bundle_processor.OutputTimer, domain, choices)[0]


def test_a_timer_that_is_set_to_the_same_time_is_encoded_once(monkeypatch: pytest.MonkeyPatch) -> None:
    choices = [(f"key{number % 5}", 5, 10, "", PANE_INFO_UNKNOWN, False) for number in range(1000)]
    assert _timers(RepeatedTimer, TimeDomain.WATERMARK, choices)[1] == 5
    monkeypatch.setattr("luminosity.engine.workers.sdk.channel._MOST_KNOWN", 2)
    assert _timers(RepeatedTimer, TimeDomain.WATERMARK, choices) == (
        _timers(bundle_processor.OutputTimer, TimeDomain.WATERMARK, choices)[0],
        1000,
    )
