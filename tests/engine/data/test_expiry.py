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
from apache_beam.transforms import trigger
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.timeutil import TimeDomain
from apache_beam.transforms.userstate import BagStateSpec, TimerSpec, on_timer
from apache_beam.transforms.window import (
    BoundedWindow,
    FixedWindows,
    IntervalWindow,
    NonMergingWindowFn,
    Sessions,
    SlidingWindows,
    TimestampedValue,
)

from luminosity.engine.data.event_time import MAX, CellExpiry, WindowExpiry
from luminosity.engine.data.panes.trigger_panes import TriggerPanes
from luminosity.engine.data.shard import Shard
from luminosity.engine.data.state import StateStore
from luminosity.engine.data.timers import TimerStore
from luminosity.engine.loop.metrics import DROPPED_LATE
from luminosity.engine.loop.scheduler import Scheduler
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


_TICK = TimerSpec("tick", TimeDomain.REAL_TIME)
_RETURN = TimerSpec("return", TimeDomain.REAL_TIME)
_CLOSE = TimerSpec("close", TimeDomain.WATERMARK)
_TICK_PARAM = beam.DoFn.TimerParam(_TICK)
_RETURN_PARAM, _CLOSE_PARAM = beam.DoFn.TimerParam(_RETURN), beam.DoFn.TimerParam(_CLOSE)


class _Tick(beam.DoFn):
    """Has a processing-time timer that sets itself again."""

    def __init__(self, path: Path) -> None:
        self._path = path

    def process(self, element: tuple[str, int], loop: Any = _TICK_PARAM) -> None:
        loop.set(10)

    @on_timer(_TICK)
    def tick(self, time: Any = beam.DoFn.TimestampParam, loop: Any = _TICK_PARAM) -> None:
        with self._path.open("a") as file:
            file.write("tick\n")
        loop.set(time + 10)


def test_a_looping_timer_in_the_global_window_ends_with_the_stream(
    tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    path = tmp_path / "seen"
    events = TestStream().add_elements([("key", 1)]).advance_processing_time(25)

    def build(pipeline: beam.Pipeline) -> None:
        _ = pipeline | events | "Tick" >> beam.ParDo(_Tick(path))

    run(build, "--streaming", "--debug")
    # At 10 s and 20 s, and once more after the end, for a step that has something left to emit.
    assert len(path.read_text().splitlines()) in (2, 3)
    assert "'Tick' sets the timer 'ts-tick' after the end of the stream" in caplog.text


class _Everything(beam.DoFn):
    """Uses state and timers of all kinds, and leaves all of it to the end of the window."""

    def process(
        self,
        element: tuple[str, int],
        window: Any = beam.DoFn.WindowParam,
        bag: Any = _BAG,
        loop: Any = _RETURN_PARAM,
        end: Any = _CLOSE_PARAM,
    ) -> Iterable[tuple[str, int]]:
        bag.add(element[1])
        loop.set(1_000_000)
        loop.set(2_000_000, dynamic_timer_tag=f"tag {element[1]}")
        loop.set(5, dynamic_timer_tag="cleared")
        loop.clear(dynamic_timer_tag="cleared")
        end.set(window.end - 1)
        yield element

    @on_timer(_RETURN)
    def again(self, loop: Any = _RETURN_PARAM) -> None:
        loop.set(1_000_000)

    @on_timer(_CLOSE)
    def at_the_end(self, end: Any = _CLOSE_PARAM) -> None:
        pass


def test_many_windows_and_keys_leave_nothing_behind(monkeypatch: pytest.MonkeyPatch) -> None:
    found: dict[str, int] = {}
    end_workers = Scheduler._end_workers  # pyright: ignore[reportPrivateUsage]

    def note_and_end(scheduler: Scheduler, *, gracefully: bool) -> None:
        parts = scheduler._parts  # pyright: ignore[reportPrivateUsage]
        shards = [shard for stage in parts.stages for shard in stage.shards]
        groupings = [buffer.live for buffer in parts.buffers.values() if buffer.live is not None]
        found["shards"], found["groupings"] = len(shards), len(groupings)
        found["cells"] = len(list(_cells(parts.state)))
        found["cells with an expiry"] = sum(len(shard.cell_expiry) for shard in shards)
        found["timers"] = sum(len(shard.timers) for shard in shards)
        found["entries of timers"] = sum(shard.timers.entries for shard in shards)
        found["holds"] = sum(shard.holds.minimum < MAX or shard.timers.holds.minimum < MAX for shard in shards)
        found["queued"] = sum(shard.count for shard in shards)
        found["open windows"] = sum(not live.is_empty for live in groupings)
        found["bytes of open windows"] = sum(live.memory_bytes for live in groupings)
        found["holds of groupings"] = sum(live.earliest < MAX for live in groupings)
        found["timers of groupings"] = sum(
            len(live._panes._schedule)  # pyright: ignore
            for live in groupings
            if isinstance(live._panes, TriggerPanes)  # pyright: ignore[reportPrivateUsage]
        )
        end_workers(scheduler, gracefully=gracefully)

    monkeypatch.setattr(Scheduler, "_end_workers", note_and_end)
    events = TestStream()
    for second in range(0, 300, 5):
        events.advance_watermark_to(second)
        events.add_elements([TimestampedValue((f"key {second + n}", n), second + n) for n in range(5)])
        events.advance_processing_time(1)

    def build(pipeline: beam.Pipeline) -> None:
        everything = beam.ParDo(_Everything()).with_output_types(tuple[str, int])
        kept = pipeline | events | beam.WindowInto(FixedWindows(10)) | everything
        _ = kept | "Group" >> beam.GroupByKey() | beam.Map(len)
        early = trigger.AfterWatermark(early=trigger.AfterProcessingTime(3), late=trigger.AfterCount(1))
        modes = trigger.AccumulationMode
        for name, window in (("early", FixedWindows(20)), ("sessions", Sessions(7))):
            windows = beam.WindowInto(window, trigger=early, accumulation_mode=modes.ACCUMULATING, allowed_lateness=5)
            groups = kept | f"Windows {name}" >> windows | f"Group {name}" >> beam.GroupByKey()
            _ = groups | f"Count {name}" >> beam.Map(len)

    run(build, "--streaming", "--debug")
    assert (found.pop("shards") >= 8, found.pop("groupings")) == (True, 3)
    # Entries of timers that were cleared wait in heaps until they are due, or are the larger part.
    assert found.pop("entries of timers") <= 8 * 1000
    assert set(found.values()) == {0}, found


def test_batches_wait_at_most_for_their_buffering_duration(tmp_path: Path) -> None:
    path = tmp_path / "seen"
    events = TestStream()
    for number in range(3):
        events.add_elements([("key", number)])
        events.advance_processing_time(6)

    def note(element: tuple[str, Iterable[int]]) -> None:
        with path.open("a") as file:
            file.write(f"{sorted(element[1])}\n")

    def build(pipeline: beam.Pipeline) -> None:
        pairs = pipeline | events | beam.Map(lambda element: element).with_output_types(tuple[str, int])
        _ = pairs | beam.GroupIntoBatches(10, max_buffering_duration_secs=10, clock=lambda: 0) | beam.Map(note)

    run(build, "--streaming", "--debug")
    assert path.read_text().splitlines() == ["[0, 1]", "[2]"]
