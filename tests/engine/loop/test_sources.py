"""Tests of unbounded sources: what they block, how they move time, and that no restriction is read twice at once."""

from __future__ import annotations

import os
import signal
import time
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.io.restriction_trackers import OffsetRange, OffsetRestrictionTracker
from apache_beam.io.watermark_estimators import (
    ManualWatermarkEstimator,
    MonotonicWatermarkEstimator,
    WalltimeWatermarkEstimator,
)
from apache_beam.pvalue import AsList
from apache_beam.transforms.core import RestrictionProvider, WatermarkEstimatorProvider
from apache_beam.transforms.periodicsequence import PeriodicImpulse
from apache_beam.transforms.userstate import TimeDomain, TimerSpec, on_timer
from apache_beam.transforms.window import FixedWindows, TimestampedValue
from apache_beam.utils.timestamp import Duration, Timestamp

from luminosity.engine.loop import scheduler
from luminosity.engine.loop.bundle import Bundle
from luminosity.engine.loop.sizing import BundleSize
from tests.marks import first_time, note, notes, wait_for_file
from tests.runners import IS_REFERENCE, run, start

pytestmark = [
    pytest.mark.alone,
    pytest.mark.skipif(IS_REFERENCE, reason="it runs one bundle at a time"),
    pytest.mark.usefixtures("leaves_nothing"),
]

_RECORDS = 20
_WAIT_S = 100.0  # far above what a loaded machine takes


class _Numbers(RestrictionProvider):
    def initial_restriction(self, element: Any) -> OffsetRange:
        return OffsetRange(0, _RECORDS)

    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        return OffsetRestrictionTracker(restriction)

    def restriction_size(self, element: Any, restriction: OffsetRange) -> int:
        return restriction.size()


_TRACKER: Any = beam.DoFn.RestrictionParam(_Numbers())


class _Blocking(beam.DoFn):
    """Waits inside ``process`` until the file is there; then emits its numbers."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @beam.DoFn.unbounded_per_element()
    def process(self, _: Any, tracker: Any = _TRACKER) -> Iterable[int]:
        (self._folder / "polling").touch()
        wait_for_file(self._folder / "let go", timeout_s=_WAIT_S)
        note(self._folder / "let go in time", (self._folder / "let go").exists())
        number = tracker.current_restriction().start
        while tracker.try_claim(number):
            yield number
            number += 1


def test_a_source_that_blocks_takes_no_slot_from_other_steps(tmp_path: Path) -> None:
    def let_go(_: Any, seeds: list[int]) -> None:
        wait_for_file(tmp_path / "polling", timeout_s=_WAIT_S)  # in the only slot of the only worker
        note(tmp_path / "polled in time", (tmp_path / "polling").exists())
        (tmp_path / "let go").touch()

    def build(pipeline: beam.Pipeline) -> None:
        seeds = pipeline | "Seed" >> beam.Create([0])
        seeds | beam.ParDo(_Blocking(tmp_path)) | beam.Map(lambda number: note(tmp_path / "numbers", number))
        # The seeds need the slot, too: the other step waits for them, not they for it.
        pipeline | "Other" >> beam.Create([0]) | beam.Reshuffle() | beam.Map(let_go, AsList(seeds))

    run(build, "--cpu_workers=1")
    assert set(notes(tmp_path / "polled in time")) == {"True"}
    assert set(notes(tmp_path / "let go in time")) == {"True"}
    assert sorted(map(int, notes(tmp_path / "numbers"))) == list(range(_RECORDS))


class _Watching(beam.DoFn):
    """Kills its worker once the other source polls, and lets that source go once it polls again."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @beam.DoFn.unbounded_per_element()
    def process(self, _: Any, tracker: Any = _TRACKER) -> Iterable[int]:
        polling = self._folder / "polling"
        if polling.exists() and first_time(self._folder / "killed"):
            polling.unlink()
            os.kill(os.getpid(), signal.SIGKILL)
        if not polling.exists():
            tracker.defer_remainder(Duration(0.05))
            return
        (self._folder / "let go").touch()
        number = tracker.current_restriction().start
        while tracker.try_claim(number):  # a split may leave some for later
            number += 1
        yield 0


def test_a_source_that_blocks_after_its_worker_was_lost_lets_others_run_soon(tmp_path: Path) -> None:
    """It runs alone at first, since it may be what kills workers. But it may wait for records for hours."""

    def build(pipeline: beam.Pipeline) -> None:
        pipeline | "Seed" >> beam.Create([0]) | beam.ParDo(_Blocking(tmp_path))
        pipeline | "Other" >> beam.Create([0]) | beam.ParDo(_Watching(tmp_path))

    run(build, "--cpu_workers=1")
    assert (tmp_path / "killed").exists()
    assert set(notes(tmp_path / "let go in time")) == {"True"}


class _Many(_Numbers):
    def initial_restriction(self, element: Any) -> OffsetRange:
        return OffsetRange(0, 1000)


_MANY_TRACKER: Any = beam.DoFn.RestrictionParam(_Many())


class _SlowPoll(beam.DoFn):
    """Polls for longer than a bundle should take before each record, and notes whether another one polls, too.

    It ends once there were enough bundles.
    """

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @beam.DoFn.unbounded_per_element()
    def process(self, _: Any, tracker: Any = _MANY_TRACKER) -> Iterable[tuple[int, int]]:
        if not first_time(self._folder / "polling"):
            note(self._folder / "twice")
        try:
            number = tracker.current_restriction().start
            while True:
                time.sleep(0.06)
                if not tracker.try_claim(number):
                    return
                if (self._folder / "enough").exists():
                    while tracker.try_claim(number := number + 1):
                        pass
                    return
                yield number, os.getpid()
                number += 1
        finally:
            (self._folder / "polling").unlink()


def test_a_restriction_is_not_read_again_before_its_bundle_has_ended(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    source_bundles = 0
    commit = scheduler.commit

    def counting(bundle: Bundle, *arguments: Any) -> None:
        nonlocal source_bundles
        source_bundles += bundle.stage.is_source
        if source_bundles > 8:  # it was split
            (tmp_path / "enough").touch()
        commit(bundle, *arguments)

    monkeypatch.setattr(scheduler, "commit", counting)

    def build(pipeline: beam.Pipeline) -> None:
        numbers = pipeline | beam.Create([0]) | beam.ParDo(_SlowPoll(tmp_path)) | beam.Reshuffle()
        numbers | beam.MapTuple(lambda number, pid: note(tmp_path / "numbers", f"{number} {pid}"))

    run(build, "--cpu_workers=2")
    found = [line.split() for line in notes(tmp_path / "numbers")]
    assert sorted(int(number) for number, _ in found) == list(range(len(found)))
    assert (tmp_path / "enough").exists()
    assert len(found) > 2
    assert not notes(tmp_path / "twice")
    assert len({pid for _, pid in found}) == 1  # the rest returns to the worker that has the reader


class _RefusingTracker(OffsetRestrictionTracker):
    """Takes a request to split for a request to stop; the reader gives back the rest itself."""

    def __init__(self, restriction: OffsetRange) -> None:
        super().__init__(restriction)
        self._is_asked = self._is_ending = False

    def try_claim(self, position: Any) -> bool:
        if position == "goes on":
            return not self._is_asked
        if position == "ends":
            self._is_ending = True
            return True
        return super().try_claim(position)

    def try_split(self, fraction_of_remainder: float) -> Any:
        self._is_asked = True
        return super().try_split(fraction_of_remainder) if self._is_ending else None


class _Refused(_Numbers):
    def initial_restriction(self, element: Any) -> OffsetRange:
        return OffsetRange(0, 4)

    def create_tracker(self, restriction: OffsetRange) -> OffsetRestrictionTracker:
        return _RefusingTracker(restriction)


_REFUSING_TRACKER: Any = beam.DoFn.RestrictionParam(_Refused())


class _EndsIfAsked(beam.DoFn):
    @beam.DoFn.unbounded_per_element()
    def process(self, _: Any, tracker: Any = _REFUSING_TRACKER) -> Iterable[int]:
        deadline = time.monotonic() + _WAIT_S
        while tracker.try_claim("goes on") and time.monotonic() < deadline:
            time.sleep(0.001)
        restriction = tracker.current_restriction()
        tracker.try_claim(restriction.start)
        if restriction.size() > 1:
            tracker.try_claim("ends")
            tracker.defer_remainder()
        return []


def test_a_source_that_refuses_splits_gets_more_time_as_well(monkeypatch: pytest.MonkeyPatch) -> None:
    """Otherwise an idle one is asked twenty times a second."""
    found: list[bool] = []
    monkeypatch.setattr(BundleSize, "was_split", lambda size, *, has_output: found.append(has_output))
    run(lambda pipeline: pipeline | beam.Create([0]) | beam.ParDo(_EndsIfAsked()), "--cpu_workers=1")
    assert found == [False] * 4


def _until_seen(
    folder: Path, estimator: Any, emit: Callable[[Any], Iterable[TimestampedValue]], name: str = "source"
) -> beam.DoFn:
    """Return a source that emits some records, and ends once a step behind it has seen their window, or much later."""
    began_at, seen = time.time(), folder / "seen"
    estimator_param: Any = beam.DoFn.WatermarkEstimatorParam(estimator)

    class Source(beam.DoFn):
        @beam.DoFn.unbounded_per_element()
        def process(self, _: Any, tracker: Any = _TRACKER, watermark: Any = estimator_param) -> Iterable[Any]:
            number = tracker.current_restriction().start
            now = watermark.current_watermark()
            if number == 0 or now is None or now < _END:  # a split may have come before the records
                if not tracker.try_claim(number):
                    return
                yield from emit(watermark)
                number += 1
            if not seen.exists() and time.time() < began_at + _WAIT_S:
                tracker.defer_remainder(Duration(0.05))
                return
            note(folder / "was seen while it ran", f"{name}: {seen.exists()}")
            while tracker.try_claim(number):
                number += 1

    return Source()


_END = Timestamp(10)  # of the first window


def _by_hand(watermark: Any) -> Iterable[TimestampedValue]:
    yield TimestampedValue(("key", 1), 1)
    watermark.set_watermark(_END)


def _rising(_: Any) -> Iterable[TimestampedValue]:
    yield TimestampedValue(("key", 1), 1)
    yield TimestampedValue(("key", 2), 15)


def _now(_: Any) -> Iterable[TimestampedValue]:
    yield TimestampedValue(("key", 1), Timestamp.now())


class _Monotonic(WatermarkEstimatorProvider):
    """Beam's own provider begins with None, which Beam's estimator can't compare with the first timestamp."""

    def initial_estimator_state(self, element: Any, restriction: Any) -> Timestamp:
        return Timestamp(0)

    def create_watermark_estimator(self, estimator_state: Timestamp) -> MonotonicWatermarkEstimator:
        return MonotonicWatermarkEstimator(estimator_state)


_ESTIMATORS = {
    "manual": (ManualWatermarkEstimator.default_provider(), _by_hand, 10),
    "monotonic": (_Monotonic(), _rising, 10),
    "wall time": (WalltimeWatermarkEstimator.default_provider(), _now, 1),
}


@pytest.mark.parametrize("name", _ESTIMATORS)
def test_a_window_ends_while_its_source_is_idle(name: str, tmp_path: Path) -> None:
    estimator, emit, window_s = _ESTIMATORS[name]

    def build(pipeline: beam.Pipeline) -> None:
        records = pipeline | beam.Create([0]) | beam.ParDo(_until_seen(tmp_path, estimator, emit))
        groups = records | beam.WindowInto(FixedWindows(window_s)) | beam.GroupByKey()
        groups | beam.Map(lambda _: (tmp_path / "seen").touch())

    run(build, "--cpu_workers=1")
    assert set(notes(tmp_path / "was seen while it ran")) == {"source: True"}


def _nothing(watermark: Any) -> Iterable[TimestampedValue]:
    watermark.set_watermark(Timestamp(20))
    return ()


class _Empty(_Numbers):
    def initial_restriction(self, element: Any) -> OffsetRange:
        return OffsetRange(0, 0)


_EMPTY_TRACKER: Any = beam.DoFn.RestrictionParam(_Empty())


class _EmptySource(beam.DoFn):
    @beam.DoFn.unbounded_per_element()
    def process(self, _: Any, tracker: Any = _EMPTY_TRACKER) -> Iterable[Any]:
        if tracker.try_claim(0):
            yield TimestampedValue(("key", 0), 0)


def test_empty_sources_beside_a_full_one_do_not_hold_time_back(tmp_path: Path) -> None:
    manual = ManualWatermarkEstimator.default_provider()

    def build(pipeline: beam.Pipeline) -> None:
        a, b = (_until_seen(tmp_path, manual, *how) for how in ((_by_hand, "full"), (_nothing, "idle")))
        full = pipeline | "A" >> beam.Create([0]) | "Full" >> beam.ParDo(a)
        idle = pipeline | "B" >> beam.Create([0]) | "Idle" >> beam.ParDo(b)
        empty = pipeline | "C" >> beam.Create([0]) | "Empty" >> beam.ParDo(_EmptySource())
        none = pipeline | "D" >> beam.Create([]) | "None" >> beam.ParDo(_EmptySource())
        groups = (full, idle, empty, none) | beam.Flatten() | beam.WindowInto(FixedWindows(10)) | beam.GroupByKey()
        groups | beam.Map(lambda _: (tmp_path / "seen").touch())

    run(build, "--cpu_workers=1")
    assert set(notes(tmp_path / "was seen while it ran")) == {"full: True", "idle: True"}


class _TwoRecords(beam.DoFn):
    """Emits the second record once a timer of the first has fired."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder

    @beam.DoFn.unbounded_per_element()
    def process(self, _: Any, tracker: Any = _TRACKER) -> Iterable[tuple[str, int]]:
        number = tracker.current_restriction().start
        if number == 0 and tracker.try_claim(0):
            yield "key", 0
        elif (self._folder / "fired").exists():
            while tracker.try_claim(number):
                number += 1
            yield "key", 1
            return
        tracker.defer_remainder(Duration(0.05))


_AGAIN = TimerSpec("again", TimeDomain.REAL_TIME)
_AGAIN_PARAM: Any = beam.DoFn.TimerParam(_AGAIN)


class _Restless(beam.DoFn):
    """Sets its timer to now again and again, until the second record comes, or for long."""

    def __init__(self, folder: Path) -> None:
        self._folder = folder
        self._until = time.time() + _WAIT_S

    def process(self, element: tuple[str, int], again: Any = _AGAIN_PARAM) -> None:
        if element[1] == 0:
            again.set(Timestamp.now())
        else:
            note(self._folder / "in time", time.time() < self._until)
            (self._folder / "second").touch()

    @on_timer(_AGAIN)
    def at_once(self, again: Any = _AGAIN_PARAM) -> None:
        (self._folder / "fired").touch()
        if not (self._folder / "second").exists() and time.time() < self._until:
            again.set(Timestamp.now())


def test_timers_that_are_always_due_leave_room_for_input(tmp_path: Path) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        records = pipeline | beam.Create([0]) | beam.ParDo(_TwoRecords(tmp_path)).with_output_types(tuple[str, int])
        records | beam.ParDo(_Restless(tmp_path))

    run(build, "--cpu_workers=1")
    assert set(notes(tmp_path / "in time")) == {"True"}


def test_an_endless_impulse_passes_a_reshuffle(tmp_path: Path) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        ticks = pipeline | PeriodicImpulse(fire_interval=0.05) | beam.Reshuffle()
        ticks | beam.Map(lambda tick: note(tmp_path / "ticks", tick))

    result = start(build, "--cpu_workers=1")
    deadline = time.monotonic() + _WAIT_S
    while len(notes(tmp_path / "ticks")) < 10 and time.monotonic() < deadline:
        time.sleep(0.02)
    result.cancel()
    result.wait_until_finish()
    assert len(notes(tmp_path / "ticks")) >= 10
