"""Groupings that workers share: each result is exact, whatever the windows, the keys, the partitions and the deaths."""

from __future__ import annotations

import os
import random
import signal
from collections import Counter
from collections.abc import Callable, Iterable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.transforms import trigger, window
from apache_beam.transforms.userstate import CombiningValueStateSpec

from luminosity.engine.data import grouping
from luminosity.engine.loop import stage, transfers
from luminosity.engine.loop.bundle import Bundle
from luminosity.engine.loop.parts import RunParts
from luminosity.engine.loop.scheduler import Scheduler
from luminosity.engine.loop.workers import Worker
from luminosity.engine.plan import partitions
from tests.runners import IS_CLUSTER, IS_REFERENCE, collect_all, new_pipeline

pytestmark = [
    pytest.mark.skipif(IS_REFERENCE or IS_CLUSTER, reason="tests what only the engine does on one machine"),
    pytest.mark.usefixtures("leaves_nothing"),
]

_INPUTS, _PAIRS = 6, 300  # of which each input makes so many
_LARGE = 50_000  # bytes of a value, of which each input gives one to the large key
_Group = tuple[str, tuple[int, ...], int, str]  # key, values, timestamp, window
_Pair = tuple[Any, int, int]  # key, value, second


def _pairs(number: int) -> list[_Pair]:
    """Keys of all kinds, of which some can't be hashed, and two values of some can't be told by their hash."""
    chance = random.Random(number)
    keys = [(n, f"k{n}", (n, None), [n], {"n": n}, b"k" * n)[n % 6] for n in range(24)]
    return [(chance.choice(keys), chance.randrange(1000), chance.randrange(120)) for _ in range(_PAIRS)]


_ALL = [pair for number in range(_INPUTS) for pair in _pairs(number)]


def _timed(number: int) -> Iterator[window.TimestampedValue]:
    return (window.TimestampedValue((key, value), at) for key, value, at in _pairs(number))


def _shown(
    group: tuple[Any, Iterable[int]], at: Any = beam.DoFn.TimestampParam, into: Any = beam.DoFn.WindowParam
) -> _Group:
    key, values = group
    end = 0 if isinstance(into, window.GlobalWindow) else at.micros // 1000
    return repr(key), tuple(sorted(values)), end, repr(into)


def _fixed(size: int, at: Callable[[list[int], int], int] = lambda _, end: end * 1000 - 1) -> Counter[_Group]:
    """What a plain computation gives in windows of this size. ``at`` gives the timestamp of a group."""
    groups: dict[tuple[str, int], list[tuple[int, int]]] = {}
    for key, value, second in _ALL:
        groups.setdefault((repr(key), second // size * size), []).append((second, value))
    return Counter(_group(key, start, start + size, found, at) for (key, start), found in groups.items())


def _group(key: str, start: int, end: int, found: list[tuple[int, int]], at: Callable[[list[int], int], int]) -> _Group:
    values = tuple(sorted(value for _, value in found))
    return key, values, at([second for second, _ in found], end), repr(window.IntervalWindow(start, end))


def _sessions(gap: int) -> Counter[_Group]:
    by_key: dict[str, list[tuple[int, int]]] = {}
    for key, value, second in _ALL:
        by_key.setdefault(repr(key), []).append((second, value))
    found: Counter[_Group] = Counter()
    for key, timed in by_key.items():
        session: list[tuple[int, int]] = []
        for second, value in [*sorted(timed), (10_000, 0)]:
            if session and second >= session[-1][0] + gap:
                end = session[-1][0] + gap
                found[_group(key, session[0][0], end, session, lambda _, end: end * 1000 - 1)] += 1
                session = []
            session.append((second, value))
    return found


class _Position(beam.DoFn):
    """Numbers the groups of a key by state."""

    SEEN = CombiningValueStateSpec("seen", combine_fn=sum)

    def process(
        self,
        element: tuple[int, Any],
        seen: Any = beam.DoFn.StateParam(SEEN),  # noqa: B008
    ) -> Iterator[tuple[int, int]]:
        seen.add(1)
        yield element[0], seen.read()


def _build(pipeline: beam.Pipeline) -> dict[str, beam.PCollection]:
    numbers = pipeline | beam.Create(range(_INPUTS)) | beam.Reshuffle()
    timed = numbers | beam.FlatMap(_timed)
    windows = {
        "fixed": beam.WindowInto(window.FixedWindows(30)),
        "latest": beam.WindowInto(
            window.FixedWindows(30), timestamp_combiner=window.TimestampCombiner.OUTPUT_AT_LATEST
        ),
        "sessions": beam.WindowInto(window.Sessions(3)),
        "panes": beam.WindowInto(
            window.FixedWindows(60),
            trigger=trigger.AfterWatermark(early=trigger.AfterCount(10_000)),
            accumulation_mode=trigger.AccumulationMode.DISCARDING,
        ),
    }
    found = {
        name: timed
        | f"{name}/Window" >> into
        | f"{name}/Group" >> beam.GroupByKey()
        | f"{name}/Shown" >> beam.Map(_shown)
        for name, into in windows.items()
    }
    pairs = timed | "Untimed" >> beam.WindowInto(window.GlobalWindows())
    found["sums"] = (
        pairs
        | beam.MapTuple(lambda key, value: (repr(key), value))
        | beam.CombinePerKey(sum)
        | "Again" >> beam.Reshuffle()
        | "Parity" >> beam.MapTuple(lambda key, value: (value % 2, key))
        | beam.ParDo(_Position())
    )
    found["large"] = (
        numbers
        | beam.FlatMap(lambda number: [("large", bytes([number + n]) * _LARGE) for n in range(4)] + [("small", b"1")])
        | "Large" >> beam.GroupByKey()
        | "Twice"
        >> beam.MapTuple(lambda key, values: (key, sorted(map(hash, values)) == sorted(map(hash, values)), values))
        | "Bytes" >> beam.MapTuple(lambda key, same, values: (key, same, Counter(v[:1] for v in values)))
    )
    found["none"] = pairs | beam.Filter(lambda _: False) | "None" >> beam.GroupByKey() | "Never" >> beam.Map(_shown)
    total = found["sums"] | beam.Values() | beam.CombineGlobally(max).without_defaults()
    found["side"] = pipeline | "One" >> beam.Create([0]) | beam.Map(max, beam.pvalue.AsSingleton(total))
    return found


def _check(found: dict[str, list[Any]]) -> None:
    assert Counter(found["fixed"]) == _fixed(30)
    assert Counter(found["latest"]) == _fixed(30, lambda seconds, _: max(seconds) * 1000)
    assert Counter(found["sessions"]) == _sessions(3)
    assert Counter(found["panes"]) == _fixed(60)
    sums: Counter[str] = Counter()
    for key, value, _ in _ALL:
        sums[repr(key)] += value
    parities = Counter(value % 2 for value in sums.values())
    assert Counter(found["sums"]) == Counter((p, n + 1) for p, count in parities.items() for n in range(count))
    firsts = Counter(bytes([number + n]) for number in range(_INPUTS) for n in range(4))
    assert sorted(found["large"], key=repr) == [("large", True, firsts), ("small", True, Counter({b"1": _INPUTS}))]
    assert found["none"] == []
    assert found["side"] == [max(parities.values())]


class _Watch:
    """Knows how many bundles the groupers had, and kills the workers of the first ones."""

    def __init__(self, monkeypatch: pytest.MonkeyPatch, kills: int) -> None:
        self.bundles: dict[str, int] = {}
        self.lost = 0
        self._kills = kills
        self._run, self._start = Scheduler.run, transfers.start
        monkeypatch.setattr(Scheduler, "run", lambda scheduler, **options: self._watched(scheduler, options))
        monkeypatch.setattr(transfers, "start", self._started)

    def _watched(self, scheduler: Scheduler, options: Any) -> Any:
        parts: RunParts = scheduler._parts  # pyright: ignore[reportPrivateUsage]
        try:
            return self._run(scheduler, **options)
        finally:
            for each in parts.groupers.values():
                self.bundles[each.plan.label] = each.bundles_done
                self.lost += each.usage.failed

    def _started(self, bundle: Bundle, worker: Worker, parts: RunParts, now: float) -> None:
        self._start(bundle, worker, parts, now)
        if bundle.stage.plan.partitions and self._kills and worker.process is not None:
            self._kills -= 1
            os.kill(worker.process.pid, signal.SIGKILL)


@pytest.mark.parametrize(("number", "kills", "budget"), [(1, 0, "1GB"), (7, 3, "2MB")])
def test_results_are_exact_if_workers_group(
    number: int, kills: int, budget: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    monkeypatch.setattr(grouping, "_SMALL_BYTES", 0)
    monkeypatch.setattr(stage, "_JOINED_BYTES", 0)
    monkeypatch.setattr(partitions, "_LEAST_PARTITIONS", number)
    monkeypatch.setattr(partitions, "_PER_SLOT", 0)
    watch = _Watch(monkeypatch, kills)
    found, _ = collect_all(_build, tmp_path, new_pipeline(f"--memory_budget={budget}"))
    _check(found)
    assert watch.bundles["fixed/Group"] == watch.bundles["sessions/Group"] == number
    assert watch.bundles["None"] == 0
    assert watch.lost >= kills


def test_small_groupings_stay_in_the_runner(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    watch = _Watch(monkeypatch, 0)
    found, _ = collect_all(_build, tmp_path, new_pipeline())
    _check(found)
    assert set(watch.bundles.values()) == {0}
