"""Tests of stateful steps in a stream: one bundle takes from all shards, and keys stay exact however it ends."""

from __future__ import annotations

import time
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.testing.test_stream import TestStream
from apache_beam.transforms.userstate import BagStateSpec, TimeDomain, TimerSpec, on_timer

from luminosity.engine.data import wire
from luminosity.engine.data.shard import Shard
from luminosity.engine.data.state import StateStore
from luminosity.engine.loop import scheduler, sizing, splits
from luminosity.engine.loop.bundle import Attempt, Bundle
from tests.marks import first_time, wait_for_file
from tests.runners import IS_REFERENCE, collect, new_pipeline

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(IS_REFERENCE, reason="tests what only the engine does"),
    pytest.mark.usefixtures("leaves_nothing"),
]

_ALL = beam.DoFn.StateParam(BagStateSpec("all", beam.coders.VarIntCoder()))
_END = TimerSpec("end", TimeDomain.WATERMARK)
_END_PARAM = beam.DoFn.TimerParam(_END)
_KEYS = 50
_FLAGS = ("--cpu_workers=1", "--allow_unsafe_triggers")  # results come in one group at the end


class _Gather(beam.DoFn):
    """Emits all values of a key at the end. ``after`` is called with each element once it is in the bag."""

    def process(self, element: tuple[Any, int], everything: Any = _ALL, end: Any = _END_PARAM) -> None:
        everything.add(element[1])
        end.set(1000)
        self.after(element)

    def after(self, element: tuple[Any, int]) -> None: ...

    @on_timer(_END)
    def at_the_end(self, key: Any = beam.DoFn.KeyParam, everything: Any = _ALL) -> Iterable[tuple[Any, list[int]]]:
        yield key, sorted(everything.read())


class _FailOnce(_Gather):
    def __init__(self, path: str) -> None:
        self._path = path

    def after(self, element: tuple[Any, int]) -> None:
        if element[1] == _KEYS + 30 and first_time(self._path):
            raise ValueError("once")


class _Slow(_Gather):
    """Is slow, and holds the first bundle until a split has taken some of it."""

    def __init__(self, path: str) -> None:
        self._path = path

    def after(self, element: tuple[Any, int]) -> None:
        wait_for_file(self._path)
        time.sleep(0.01)


class _Bundles:
    """The committed bundles of a run's stateful stage, and the state tokens made by the shards that ran."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, bundle_s: float = 100.0) -> None:
        monkeypatch.setattr(sizing, "_ENDLESS_S", bundle_s)  # 100: no bundle ends early on a slow machine
        self.inputs: list[int] = []  # elements of each bundle of elements
        self.timers: list[int] = []  # timers of each bundle of timers
        self.shards: list[int] = []  # how many each bundle of elements has
        self.snapshots = 0
        commit, handle = scheduler.commit, StateStore.handle

        def noting(bundle: Bundle, *arguments: Any) -> None:
            if bundle.stage.plan.is_stateful and bundle.inputs:
                self.inputs.append(bundle.count - (bundle.attempt.given_back if bundle.attempt else 0))
                self.shards.append(len(bundle.shards))
            elif bundle.stage.plan.is_stateful:
                self.timers.append(bundle.pieces)
            commit(bundle, *arguments)

        def counting(store: StateStore, request: Any) -> Any:
            self.snapshots += request.state_key.runner.key.startswith(wire.STATE_SNAPSHOT)
            return handle(store, request)

        monkeypatch.setattr(scheduler, "commit", noting)
        monkeypatch.setattr(StateStore, "handle", counting)


def _stream(rounds: int, key: Any = lambda number: number % _KEYS) -> TestStream:
    """Return a stream that has a value of each key in every round."""
    stream = TestStream(coder=beam.coders.FastPrimitivesCoder())
    for start in range(0, rounds * _KEYS, _KEYS):
        stream = stream.add_elements([(key(number), number) for number in range(start, start + _KEYS)])
    return stream.advance_watermark_to_infinity()


def _expected(rounds: int) -> list[tuple[int, list[int]]]:
    return [(key, list(range(key, rounds * _KEYS, _KEYS))) for key in range(_KEYS)]


def _typed(pipeline: beam.Pipeline, rounds: int, step: beam.DoFn) -> beam.PCollection:
    pairs = pipeline | _stream(rounds) | beam.Map(lambda pair: pair).with_output_types(tuple[int, int])
    return pairs | beam.ParDo(step)


def test_a_bundle_of_a_stream_takes_from_all_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundles = _Bundles(monkeypatch)
    found = collect(lambda p: _typed(p, 3, _Gather()), tmp_path, new_pipeline(*_FLAGS))
    assert sorted(found) == _expected(3)
    assert bundles.inputs == [_KEYS] * 3
    assert bundles.timers == [_KEYS]
    # All rounds ran in the worker that had the state, under the same tokens: one snapshot for each shard.
    assert bundles.snapshots == bundles.shards[0] == 8


def test_keys_of_any_type_find_the_shard_of_their_timers(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundles = _Bundles(monkeypatch)
    # Without type hints, timers and elements encode their keys differently.
    build = lambda p: p | _stream(2, lambda number: ("key", number % _KEYS)) | beam.ParDo(_Gather())  # noqa: E731
    found = collect(build, tmp_path, new_pipeline(*_FLAGS))
    assert sorted(found) == [(("key", key), values) for key, values in _expected(2)]
    assert bundles.inputs == [_KEYS] * 2


def test_state_is_exact_if_a_bundle_of_several_shards_fails(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundles = _Bundles(monkeypatch)
    step = _FailOnce(str(tmp_path / "failed"))
    found = collect(lambda p: _typed(p, 3, step), tmp_path, new_pipeline(*_FLAGS))
    assert sorted(found) == _expected(3)
    assert bundles.inputs == [_KEYS] * 3
    assert bundles.snapshots == 2 * 8  # all shards of the failed attempt got new tokens


def test_what_a_split_gives_back_returns_to_its_shards(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundles = _Bundles(monkeypatch, bundle_s=0.05)
    apply, can_split, split = splits.apply, splits.can_split, tmp_path / "split"
    # The first stateful bundle has all keys, however slow the step before it is.
    monkeypatch.setattr(splits, "can_split", lambda bundle: bundle.stage.plan.is_stateful and can_split(bundle))

    def noting(bundle: Bundle, attempt: Attempt, *arguments: Any) -> None:
        apply(bundle, attempt, *arguments)
        if bundle.stage.plan.is_stateful and attempt.given_back:
            split.touch()

    monkeypatch.setattr(splits, "apply", noting)
    found = collect(lambda p: _typed(p, 2, _Slow(str(split))), tmp_path, new_pipeline(*_FLAGS))
    assert sorted(found) == _expected(2)
    assert sum(bundles.inputs) == 2 * _KEYS
    assert len(bundles.inputs) > 2  # at least two in the first round


def test_a_bundle_of_batch_has_one_shard(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    bundles = _Bundles(monkeypatch)

    def build(pipeline: beam.Pipeline) -> beam.PCollection:
        pairs = pipeline | beam.Create([(number % _KEYS, number) for number in range(_KEYS)])
        return pairs | beam.Map(lambda pair: pair).with_output_types(tuple[int, int]) | beam.ParDo(_Gather())

    assert sorted(collect(build, tmp_path, new_pipeline(*_FLAGS))) == _expected(1)
    assert set(bundles.shards) == {1}


def test_a_shard_of_a_waiting_retry_is_not_free() -> None:
    shard = Shard(["read"], is_exclusive=True)
    assert shard.is_free()
    shard.retries = 1
    assert not shard.is_free()
