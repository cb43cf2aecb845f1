"""Stateful steps over unbounded input: late elements are dropped, and expired windows leave nothing behind."""

from __future__ import annotations

import itertools
from collections.abc import Iterable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast

import apache_beam as beam
import pytest
from apache_beam.coders.coders import IntervalWindowCoder
from apache_beam.metrics import MetricsFilter
from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.testing.test_stream import TestStream
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import BagStateSpec, TimerSpec, on_timer
from apache_beam.transforms.window import (
    BoundedWindow,
    FixedWindows,
    IntervalWindow,
    NonMergingWindowFn,
    SlidingWindows,
    TimestampedValue,
)

from luminosity.engine.data.expiry import CellExpiry, WindowExpiry
from luminosity.engine.data.state import StateStore
from luminosity.engine.data.timers import TimerStore
from luminosity.engine.loop.metrics import DROPPED_LATE
from luminosity.engine.loop.shard import Shard
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.plan.codecs import TimerRecord
from tests.runners import IS_REFERENCE, run

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="it has no streams")

_BAG = beam.DoFn.StateParam(BagStateSpec("bag", beam.coders.VarIntCoder()))
_LOOP = TimerSpec("loop", TimeDomain.REAL_TIME)
_END = TimerSpec("end", TimeDomain.WATERMARK)
_AGAIN = TimerSpec("again", TimeDomain.WATERMARK)
_AGAIN_PARAM = beam.DoFn.TimerParam(_AGAIN)
_LOOP_PARAM, _END_PARAM = beam.DoFn.TimerParam(_LOOP), beam.DoFn.TimerParam(_END)


class _Keep(beam.DoFn):
    """Keeps what it gets, has a timer that sets itself again for ever, and writes the bag at the end of the window."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def process(
        self,
        element: tuple[str, int],
        window: Any = beam.DoFn.WindowParam,
        bag: Any = _BAG,
        loop: Any = _LOOP_PARAM,
        end: Any = _END_PARAM,
    ) -> None:
        bag.add(element[1])
        loop.set(10)
        end.set(window.end)

    @on_timer(_LOOP)
    def again(self, loop: Any = _LOOP_PARAM) -> None:
        loop.set(1_000_000)  # never, on the clock of the test

    @on_timer(_END)
    def at_the_end(self, window: Any = beam.DoFn.WindowParam, bag: Any = _BAG) -> None:
        with self._path.open("a") as file:
            file.write(f"{int(window.start)} {sorted(bag.read())}\n")


def _cells(store: StateStore) -> Iterable[bytes]:
    return [key for key, _ in store._cells.items()]  # pyright: ignore[reportPrivateUsage]


@pytest.fixture
def left(monkeypatch: pytest.MonkeyPatch) -> list[bytes]:
    """The cells of state that are left when a run ends."""
    found: list[bytes] = []
    release = StateStore.release

    def note_and_release(store: StateStore) -> None:
        found.extend(_cells(store))
        release(store)

    monkeypatch.setattr(StateStore, "release", note_and_release)
    return found


def test_a_window_that_has_expired_leaves_no_state_and_no_timer(tmp_path: Path, left: list[bytes]) -> None:
    path = tmp_path / "seen"
    events = TestStream()
    for second in range(0, 100, 5):
        events.advance_watermark_to(second + 1)
        events.add_elements([TimestampedValue(("key", second), second + 2)])
        events.advance_processing_time(5)
    events.add_elements([TimestampedValue(("key", 1), 3)])

    def build(pipeline: beam.Pipeline) -> None:
        _ = pipeline | events | beam.WindowInto(FixedWindows(10)) | "Keep" >> beam.ParDo(_Keep(path))

    result = run(build, "--streaming", "--debug")  # ends, though the timers would go on
    assert path.read_text().splitlines() == [f"{start} {[start, start + 5]}" for start in range(0, 100, 10)]
    assert left == []
    (dropped,) = result.metrics().query(MetricsFilter().with_name(DROPPED_LATE))["counters"]
    assert (dropped.key.step, dropped.committed) == ("Keep", 1)


def test_an_element_keeps_those_of_its_windows_that_have_not_expired(tmp_path: Path) -> None:
    path = tmp_path / "seen"
    events = TestStream().advance_watermark_to(12).add_elements([TimestampedValue(("key", 7), 7)])

    def build(pipeline: beam.Pipeline) -> None:
        _ = pipeline | events | beam.WindowInto(SlidingWindows(10, 5)) | "Keep" >> beam.ParDo(_Keep(path))

    result = run(build, "--streaming", "--debug")
    assert path.read_text().splitlines() == ["5 [7]"]
    (dropped,) = result.metrics().query(MetricsFilter().with_name(DROPPED_LATE))["counters"]
    assert dropped.committed == 1


@pytest.mark.parametrize("watermark", [9, 10, 11])
def test_the_end_of_a_window_is_not_too_late_for_its_timer(tmp_path: Path, watermark: int) -> None:
    """Beam's GroupIntoBatches sets its timer to the end of the window."""
    path = tmp_path / "seen"
    events = TestStream().add_elements([TimestampedValue(("key", 1), 1)])
    events.advance_watermark_to(watermark).advance_watermark_to(20)

    def build(pipeline: beam.Pipeline) -> None:
        _ = pipeline | events | beam.WindowInto(FixedWindows(10)) | "Keep" >> beam.ParDo(_Keep(path))

    run(build, "--streaming", "--debug")
    assert path.read_text().splitlines() == ["0 [1]"]


class _Tens(NonMergingWindowFn):
    """Windows of ten seconds, of a class of their own."""

    def assign(self, assign_context: Any) -> list[Any]:
        return [_Ten(int(assign_context.timestamp) // 10)]

    def get_window_coder(self) -> Any:
        return _TenCoder()


class _Ten(BoundedWindow):
    def __init__(self, number: int) -> None:
        super().__init__(10 * number + 10)
        self.number = number

    @property
    def start(self) -> Any:
        return 10 * self.number

    def __hash__(self) -> int:
        return hash(self.number)

    def __eq__(self, other: object) -> bool:
        return isinstance(other, _Ten) and other.number == self.number


class _TenCoder(beam.coders.Coder):
    def encode(self, value: Any) -> bytes:
        return b"%d" % value.number

    def decode(self, encoded: bytes) -> Any:
        return _Ten(int(encoded))

    def is_deterministic(self) -> bool:
        return True


def test_windows_of_your_own_class_expire(tmp_path: Path, left: list[bytes]) -> None:
    path = tmp_path / "seen"
    events = TestStream().add_elements([TimestampedValue(("key", n), n) for n in (1, 2, 11)])

    def build(pipeline: beam.Pipeline) -> None:
        _ = pipeline | events | beam.WindowInto(_Tens()) | "Keep" >> beam.ParDo(_Keep(path))

    run(build, "--streaming", "--debug")
    assert sorted(path.read_text().splitlines()) == ["0 [1, 2]", "10 [11]"]
    assert left == []


class _Forever(beam.DoFn):
    """Sets its timer to the next second, again and again."""

    def process(self, element: Any, time: Any = beam.DoFn.TimestampParam, end: Any = _AGAIN_PARAM) -> None:
        end.set(time + 1)

    @on_timer(_AGAIN)
    def once_more(self, time: Any = beam.DoFn.TimestampParam, end: Any = _AGAIN_PARAM) -> None:
        end.set(time + 1)


def test_a_timer_that_sets_itself_again_ends_with_its_window(caplog: pytest.LogCaptureFixture) -> None:
    events = TestStream().add_elements([TimestampedValue(("key", 1), 1)])  # and straight to the end of time

    def build(pipeline: beam.Pipeline) -> None:
        _ = pipeline | events | beam.WindowInto(FixedWindows(10)) | "Again" >> beam.ParDo(_Forever())

    run(build, "--streaming", "--debug")
    assert "'Again' sets the timer 'ts-again' beyond the end of its window" in caplog.text


def test_timers_of_windows_that_have_ended_are_dropped_with_their_holds() -> None:
    store = TimerStore()
    records = [TimerRecord(b"%d" % end, b"key", False, 10**9, 5, b"", end) for end in (10, 20)]
    store.apply(("step", "timer"), records)
    store.note_windows(("step", "timer"), records)
    assert not store.drop_expired(10)
    assert store.drop_expired(11) == 1
    assert len(store) == 1
    assert store.drop_expired(21)
    assert not store
    assert store.next_fire(("step", "timer")) is None


def test_cells_that_a_step_clears_are_forgotten_at_once() -> None:
    def cell_key(key: bytes, window: bytes) -> bytes:
        bag = beam_fn_api_pb2.StateKey.BagUserState(transform_id="step", key=key, window=window)
        return beam_fn_api_pb2.StateKey(bag_user_state=bag).SerializeToString()

    coder = IntervalWindowCoder()
    expiry = WindowExpiry(Windowing(FixedWindows(10)), cast(Any, None), coder)
    window = coder.encode(IntervalWindow(0, 10))
    cells = CellExpiry()
    keys = [cell_key(b"%d" % number, window) for number in range(100)]
    cells.note(dict.fromkeys(keys, b"value"), expiry)
    cells.note(dict.fromkeys(keys[:60], b""), expiry)
    assert len(cells) == 40
    assert cells.take(9_999_999) == []  # the last microsecond of the window
    taken = [cells.take(10_000_000, limit=30) for _ in range(3)]
    assert [len(some) for some in taken] == [30, 10, 0]
    assert sorted(itertools.chain(*taken)) == sorted(keys[60:])
    assert len(cells) == len(cells._cells) == len(cells._times) == 0  # pyright: ignore[reportPrivateUsage]


def _timer(identity: bytes, fire: int, window: int) -> TimerRecord:
    return TimerRecord(identity, identity, False, fire, 0, b"", window)


@pytest.mark.parametrize("is_event_time", [False, True])
def test_looping_timers_that_are_always_due_do_not_keep_expired_windows(is_event_time: bool) -> None:
    """Of many timers of processing time, some are due at any moment. Those of event time must fire first."""
    wall, event = ("step", "wall"), ("step", "event")
    shard = Shard(["read"], is_exclusive=True)
    shard.timers.apply(wall, timers := [_timer(b"a", fire=50, window=99), _timer(b"b", fire=50, window=9_999)])
    shard.timers.note_windows(wall, timers)
    if is_event_time:
        shard.timers.apply(event, timers := [_timer(b"a", fire=99, window=99)])
        shard.timers.note_windows(event, timers)
    families = (
        SimpleNamespace(key=wall, is_processing_time=True),
        SimpleNamespace(key=event, is_processing_time=False),
    )
    stage = SimpleNamespace(
        expiry=SimpleNamespace(lateness=0),
        plan=SimpleNamespace(timers=families),
        shards=[shard],
        input_watermark=1000,
        _passed_micros=lambda: 999,
    )
    expired = list(StageRun.take_expired(cast(StageRun, stage)))
    assert len(expired) == (0 if is_event_time else 1)
    assert len(shard.timers) == (3 if is_event_time else 1)
