"""Tests of a stateful stage's shards: who runs them, which tokens workers get, and how few requests state takes."""

from __future__ import annotations

from collections import Counter
from collections.abc import Collection, Iterable
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam import coders
from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.transforms.userstate import BagStateSpec, CombiningValueStateSpec, TimeDomain, TimerSpec, on_timer

from luminosity.engine.data import wire
from luminosity.engine.data.shard import Shard
from luminosity.engine.data.state import StateStore
from luminosity.engine.loop import scheduler
from tests.marks import first_time
from tests.runners import IS_REFERENCE, collect, new_pipeline

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does"),
    pytest.mark.usefixtures("leaves_nothing"),
]


_LAST = TimerSpec("last", TimeDomain.WATERMARK)
_ALL_PARAM = beam.DoFn.StateParam(BagStateSpec("all", coders.VarIntCoder()))
_TOTAL_PARAM = beam.DoFn.StateParam(CombiningValueStateSpec("total", sum))
_LAST_PARAM = beam.DoFn.TimerParam(_LAST)


class FakeWorker:
    def __init__(self) -> None:
        self.has_exited = False


def token(shard: Shard, worker: FakeWorker, now: float = 0.0) -> bytes:
    return shard.state_token(worker, now)  # type: ignore[arg-type]


def test_a_worker_keeps_its_token_until_an_attempt_fails() -> None:
    shard, worker = Shard(["read"], is_exclusive=True), FakeWorker()
    first = token(shard, worker)
    assert token(shard, worker) == first
    shard.renew_state_token()
    assert token(shard, worker) != first


def test_a_shard_that_comes_back_has_a_new_token() -> None:
    shard, one, other = Shard(["read"], is_exclusive=True), FakeWorker(), FakeWorker()
    tokens = [token(shard, one), token(shard, other), token(shard, one)]
    assert len(set(tokens)) == 3


def test_two_shards_never_share_a_token() -> None:
    worker = FakeWorker()
    assert token(Shard([], is_exclusive=True), worker) != token(Shard([], is_exclusive=True), worker)


def test_a_shard_moves_at_most_once_a_second_unless_its_worker_is_gone() -> None:
    shard, one, other = Shard(["read"], is_exclusive=True), FakeWorker(), FakeWorker()
    assert shard.may_move(0.0)
    token(shard, one, 10.0)
    assert shard.may_move(10.0)  # its first worker may have got it only because no other had started
    token(shard, other, 10.0)
    assert not shard.may_move(10.5)
    assert shard.may_move(11.0)
    other.has_exited = True
    assert shard.may_move(10.5)


class Totals(beam.DoFn):
    """Emits the number, the sum and the order of each key's values at the end of time."""

    def process(
        self,
        element: tuple[int, int],
        everything: Any = _ALL_PARAM,
        total: Any = _TOTAL_PARAM,
        last: Any = _LAST_PARAM,
    ) -> None:
        everything.add(element[1])
        total.add(element[1])
        last.set(1000)

    @on_timer(_LAST)
    def emit(
        self,
        key: int = beam.DoFn.KeyParam,
        everything: Any = _ALL_PARAM,
        total: Any = _TOTAL_PARAM,
    ) -> Iterable[tuple[int, list[int], int]]:
        yield key, sorted(everything.read()), total.read()


def expected(count: int, keys: int) -> list[tuple[int, list[int], int]]:
    return [(key, list(range(key, count, keys)), sum(range(key, count, keys))) for key in range(keys)]


def keyed(pipeline: beam.Pipeline, count: int, keys: int) -> beam.PCollection:
    numbers = pipeline | beam.Create(range(0, count, 100)) | beam.FlatMap(lambda start: range(start, start + 100))
    return numbers | beam.Map(lambda number: (number % keys, number)).with_output_types(tuple[int, int])


class Requests:
    """Counts the state requests of a run, the bundles of its stateful stages, and the tokens made."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch) -> None:
        self.counts: Counter[str] = Counter()
        self.bundles = self.tokens = 0
        self.shards: set[int] = set()  # ids of those that ran
        handle, commit, renew = StateStore.handle, scheduler.commit, Shard.renew_state_token

        def counting_handle(store: StateStore, request: beam_fn_api_pb2.StateRequest) -> beam_fn_api_pb2.StateResponse:
            kind = {wire.STATE_WRITES: "writes", wire.STATE_SNAPSHOT: "snapshot"}.get(
                request.state_key.runner.key.rstrip(b"0123456789")
            )
            if kind is not None or request.state_key.HasField("bag_user_state"):
                self.counts[kind or "single"] += 1
            return handle(store, request)

        def counting_commit(bundle: Any, *arguments: Any) -> None:
            self.bundles += bundle.stage.plan.is_stateful
            commit(bundle, *arguments)

        def counting_renew(shard: Shard) -> None:
            self.tokens += 1
            self.shards.add(id(shard))
            renew(shard)

        monkeypatch.setattr(StateStore, "handle", counting_handle)
        monkeypatch.setattr(scheduler, "commit", counting_commit)
        monkeypatch.setattr(Shard, "renew_state_token", counting_renew)


def test_one_worker_reads_a_snapshot_of_each_shard_and_writes_once_for_each_bundle(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    requests = Requests(monkeypatch)
    build = lambda p: keyed(p, 4000, 200) | beam.ParDo(Totals())  # noqa: E731
    assert sorted(collect(build, tmp_path, new_pipeline("--cpu_workers=1"))) == expected(4000, 200)
    assert requests.tokens == len(requests.shards)
    assert requests.counts["snapshot"] == len(requests.shards)
    assert requests.counts["single"] == 0
    assert requests.counts["writes"] <= requests.bundles


def test_state_is_exact_with_several_workers_and_slots(tmp_path: Path) -> None:
    build = lambda p: keyed(p, 6000, 50) | beam.ParDo(Totals())  # noqa: E731
    pipeline = new_pipeline("--cpu_workers=2", "--threads_per_worker=2")
    assert sorted(collect(build, tmp_path, pipeline)) == expected(6000, 50)


class FailingTotals(Totals):
    """Raises once at the end of each bundle with a marked value: Beam's worker has cached its state by then."""

    def __init__(self, folder: Path, marked: Collection[int]) -> None:
        self._folder = folder
        self._marked = marked

    def start_bundle(self) -> None:
        self._seen: list[int] = []

    def process(
        self,
        element: tuple[int, int],
        everything: Any = _ALL_PARAM,
        total: Any = _TOTAL_PARAM,
        last: Any = _LAST_PARAM,
    ) -> None:
        if element[1] in self._marked:
            self._seen.append(element[1])
        list(everything.read())
        super().process(element, everything, total, last)

    def finish_bundle(self) -> None:
        for value in self._seen:
            if first_time(self._folder / f"failed{value}"):
                raise ValueError("after state was read")


class FailingAfterState(beam.DoFn):
    """Raises in the first bundle and in the first with elements: the step before it has written its state by then."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    def start_bundle(self) -> None:
        self._flags = [self._folder / "failed at first"]

    def process(self, element: Any) -> Iterable[Any]:
        self._flags = [self._folder / "failed in a timer"]
        yield element

    def finish_bundle(self) -> None:
        if any(map(first_time, self._flags)):
            raise ValueError("after state was written")


def test_state_is_exact_and_tokens_are_new_when_attempts_fail(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(monkeypatch)

    def build(pipeline: beam.Pipeline) -> beam.PCollection:
        totals = keyed(pipeline, 4000, 20) | beam.ParDo(FailingTotals(tmp_path, {1999, 3999}))
        return totals | beam.ParDo(FailingAfterState(tmp_path))

    assert sorted(collect(build, tmp_path, new_pipeline("--cpu_workers=1"))) == expected(4000, 20)
    assert len(list(tmp_path.glob("failed*"))) == 4
    assert requests.tokens == len(requests.shards) + 4
    assert requests.counts["snapshot"] <= requests.tokens


def test_state_is_exact_while_workers_are_killed(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    requests = Requests(monkeypatch)
    commit, kills = scheduler.commit, 0

    def killing_commit(bundle: Any, attempt: Any, *arguments: Any) -> None:
        nonlocal kills
        commit(bundle, attempt, *arguments)
        if bundle.stage.plan.is_stateful and requests.bundles in (2, 5, 9):
            kills += 1
            attempt.worker.kill()

    monkeypatch.setattr(scheduler, "commit", killing_commit)
    build = lambda p: keyed(p, 6000, 20) | beam.ParDo(Totals())  # noqa: E731
    assert sorted(collect(build, tmp_path, new_pipeline("--cpu_workers=2"))) == expected(6000, 20)
    assert kills == 3
    assert requests.tokens > 3
