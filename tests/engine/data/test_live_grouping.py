"""GroupByKey over unbounded input, event by event."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.coders import coder_impl, coders
from apache_beam.metrics import MetricsFilter
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.test_stream import TestStream
from apache_beam.transforms import trigger
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.window import (
    FixedWindows,
    IntervalWindow,
    Sessions,
    SlidingWindows,
    TimestampCombiner,
    TimestampedValue,
    WindowFn,
)
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import PaneInfoTiming, WindowedValue
from hypothesis import given, settings
from hypothesis import strategies as st

from luminosity import LuminosityRunner
from luminosity.engine.data.blocks import Block, BlockStore
from luminosity.engine.data.event_time import MAX, expiry_micros
from luminosity.engine.data.panes.live_grouping import LiveGrouping, panes_of
from luminosity.engine.data.panes.trigger_panes import TriggerPanes
from luminosity.engine.data.panes.window_panes import WindowPanes
from luminosity.engine.data.state import StateStore
from luminosity.engine.data.world import ManualClock
from luminosity.engine.loop.metrics import DROPPED_LATE
from luminosity.engine.loop.spill_policy import SpillPolicy
from luminosity.engine.plan.codecs import Codecs
from luminosity.engine.plan.graph import BufferKind
from luminosity.engine.plan.planner import plan
from luminosity.engine.spill.quota import Ledger
from luminosity.errors import ResourcesExceeded
from tests.engine.data.beam_panes import BeamPanes
from tests.runners import IS_REFERENCE, run

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="it has no streams")

_S = 1_000_000  # microseconds
_DISCARDING: Any = trigger.AccumulationMode.DISCARDING
_EARLY, _ON_TIME, _LATE = PaneInfoTiming.EARLY, PaneInfoTiming.ON_TIME, PaneInfoTiming.LATE


class _Group:
    """A live grouping of integers, which the test feeds itself."""

    def __init__(self, folder: Path, window: Any, **windowing: Any) -> None:
        pipeline = beam.Pipeline(options=PipelineOptions(["--streaming", "--allow_unsafe_triggers"]))
        _ = (
            pipeline
            | TestStream()
            | beam.Map(lambda element: element).with_output_types(tuple[str, int])
            | beam.WindowInto(window, **windowing)
            | beam.GroupByKey()
            | beam.Map(print)
        )
        environment = LuminosityRunner().default_environment(PipelineOptions([]))
        graph = plan(pipeline.to_runner_api(default_environment=environment))
        (buffer,) = [buffer for buffer in graph.buffers.values() if buffer.kind is BufferKind.GROUP]
        assert buffer.is_unbounded
        self._codecs = Codecs(graph)
        self.ledger = Ledger(str(folder / "quota"), 1 << 20, 1)
        self.blocks = BlockStore(str(folder), self.ledger)
        self._written, self._read = buffer.coder_id, buffer.output_coder_id
        self.clock = ManualClock()
        self.state = StateStore(str(folder), self.ledger)
        self.windowing = self._codecs.windowing(buffer.pcollection_id)
        self.grouping = LiveGrouping(
            self._codecs.elements(self._written),
            self._codecs.elements(self._read),
            self.windowing,
            self.state,
            self.blocks,
            self.clock,
            str(folder),
        )

    def add(self, key: str, *seconds: float) -> list[Any]:
        """Add an element for each timestamp, and return the panes that this brings."""
        self.grouping.add(self.encoded(key, *seconds))
        self.grouping.pump(self.grouping.watermark)
        return self.panes()

    def encoded(self, key: str, *seconds: float) -> Block:
        """Return a block with an element for each timestamp."""
        encode = self._codecs.impl(self._written).encode_nested
        encoded = b""
        for second in seconds:
            context = self.windowing.windowfn.AssignContext(second)
            windows = tuple(self.windowing.windowfn.assign(context))
            encoded += encode(WindowedValue((key, int(second)), second, windows))
        return self.blocks.of_bytes(encoded, len(seconds), int(min(seconds) * _S))

    def advance(self, seconds: float) -> list[Any]:
        """Move the watermark, and return the panes that this brings."""
        self.grouping.pump(min(MAX, int(seconds * _S)))
        return self.panes()

    def advance_clock(self, seconds: float) -> list[Any]:
        """Move the processing time, and return the panes that this brings."""
        self.clock.advance(int(seconds * _S))
        self.grouping.pump(self.grouping.watermark)
        return self.panes()

    def panes(self) -> list[Any]:
        panes: list[Any] = []
        while (block := self.grouping.next_block()) is not None:
            decoder = self._codecs.impl(self._read)
            stream = coder_impl.create_InputStream(block.data())
            panes += [decoder.decode_from_stream(stream, True) for _ in range(block.count)]
            block.release()
        return panes


def _values(panes: Iterable[Any]) -> list[tuple[str, list[int]]]:
    return sorted((pane.value[0], sorted(pane.value[1])) for pane in panes)


def test_a_window_comes_out_when_the_watermark_passes_its_end(tmp_path: Path) -> None:
    group = _Group(tmp_path, FixedWindows(10))
    assert group.add("a", 1, 12) == group.add("b", 2) == group.advance(9.9) == []
    assert group.grouping.earliest == 9_999_000  # the end of the window, which nothing may overtake
    panes = group.advance(10)
    assert _values(panes) == [("a", [1]), ("b", [2])]
    assert {(pane.pane_info.timing, pane.pane_info.index) for pane in panes} == {(_ON_TIME, 0)}
    assert group.grouping.earliest == 19_999_000
    assert _values(group.advance(MAX / _S)) == [("a", [12])]


def test_nothing_is_left_of_windows_that_have_expired(tmp_path: Path) -> None:
    group = _Group(tmp_path, FixedWindows(10), allowed_lateness=5)
    for second in range(0, 1000, 10):
        group.add(f"key {second % 30}", second)
        group.advance(second)
    group.advance(2000)
    assert group.grouping.is_empty
    assert group.grouping.earliest == MAX
    assert group.grouping.next_fire() is None


def _fired(panes: Iterable[tuple[bytes, Any] | None]) -> list[Any]:
    """Return all that can be seen of panes, by key and window: windows of one moment and values have no order."""
    seen = [
        (key, sorted(getattr(pane.value, "values", pane.value)), pane.timestamp, pane.pane_info, pane.windows)
        for key, pane in filter(None, panes)
    ]
    return sorted(seen, key=lambda pane: (pane[0], repr(pane[4]), pane[3].index))


_ELEMENTS = st.lists(st.tuples(st.sampled_from([b"a", b"b"]), st.integers(0, 60)), min_size=1, max_size=5)
_EVENTS: st.SearchStrategy[list[Any]] = st.lists(
    st.one_of(
        st.tuples(st.sampled_from(["watermark", "clock"]), st.integers(0, 60)), st.tuples(st.just("add"), _ELEMENTS)
    ),
    max_size=12,
)
_LEAVES = st.one_of(
    st.integers(1, 3).map(trigger.AfterCount),
    st.integers(1, 20).map(trigger.AfterProcessingTime),
    st.just(trigger.AfterWatermark()),
    st.just(trigger.DefaultTrigger()),
)
_TRIGGERS = st.one_of(
    _LEAVES,
    st.builds(trigger.AfterWatermark, st.none() | _LEAVES, st.none() | _LEAVES),
    st.builds(trigger.Repeatedly, _LEAVES),
    st.builds(trigger.AfterAny, _LEAVES, _LEAVES),
    st.builds(trigger.AfterAll, _LEAVES, _LEAVES),
    st.builds(trigger.AfterEach, _LEAVES, _LEAVES),
    st.builds(lambda *of: trigger.Repeatedly(trigger.AfterAny(*of)), _LEAVES, _LEAVES),
    st.builds(lambda *of: trigger.AfterEach(*map(trigger.Repeatedly, of)), _LEAVES, _LEAVES),
)
_MODES = st.sampled_from([trigger.AccumulationMode.DISCARDING, trigger.AccumulationMode.ACCUMULATING])
_COMBINERS = st.sampled_from(["OUTPUT_AT_EOW", "OUTPUT_AT_EARLIEST", "OUTPUT_AT_LATEST"])
_UNMERGED: list[Any] = [FixedWindows(10), FixedWindows(7, offset=3), SlidingWindows(20, 10)]


def _compare(windowing: Windowing, one: Any, other: Any, clock: ManualClock, events: list[Any]) -> None:
    """Check that two ways fire the same panes and hold the watermark at the same times."""
    watermark = 0
    steps: list[tuple[str, Any]] = [*events, ("watermark", 1000)]
    for number, (kind, data) in enumerate(steps):
        if kind == "clock":
            clock.advance(data * _S)
        if kind != "add":
            watermark = max(watermark, data * _S) if kind == "watermark" else watermark
            assert _fired(one.advance(watermark)) == _fired(other.advance(watermark))
            assert (one.is_empty, one.earliest) == (other.is_empty, other.earliest)
            continue
        by_key: dict[bytes, list[WindowedValue]] = {}
        for key, second in data:
            windows = windowing.windowfn.assign(windowing.windowfn.AssignContext(Timestamp(second)))
            open_ones = tuple(w for w in windows if expiry_micros(w, windowing) >= watermark)
            if open_ones:
                by_key.setdefault(key, []).append(WindowedValue(b"%d" % number, Timestamp(second), open_ones))
        for key, values in by_key.items():
            assert _fired(one.add(key, values)) == _fired(other.add(key, values))
        one.settle()
        other.settle()
        assert one.earliest == other.earliest


@given(
    events=_EVENTS,
    window=st.sampled_from(_UNMERGED),
    lateness=st.sampled_from([0, 5, 15]),
    mode=_MODES,
    combiner=_COMBINERS,
)
def test_the_quick_way_fires_what_triggers_fire(
    events: list[Any], window: Any, lateness: int, mode: Any, combiner: str
) -> None:
    combiner_value: Any = getattr(TimestampCombiner, combiner)
    windowing = Windowing(window, trigger.DefaultTrigger(), mode, combiner_value, lateness)
    assert type(panes_of(windowing, ManualClock())) is WindowPanes
    clock = ManualClock()
    _compare(windowing, WindowPanes(windowing), TriggerPanes(windowing, clock), clock, events)


@settings(deadline=None)
@given(
    events=_EVENTS,
    window=st.sampled_from([*_UNMERGED, Sessions(5), Sessions(20)]),
    trigger_fn=_TRIGGERS,
    lateness=st.sampled_from([0, 5, 15]),
    mode=_MODES,
    combiner=_COMBINERS,
)
def test_triggers_fire_what_beams_trigger_machine_fires(
    events: list[Any], window: Any, trigger_fn: Any, lateness: int, mode: Any, combiner: str
) -> None:
    combiner_value: Any = getattr(TimestampCombiner, combiner)
    windowing = Windowing(window, trigger_fn, mode, combiner_value, lateness)
    clock = ManualClock()
    _compare(windowing, TriggerPanes(windowing, clock), BeamPanes(windowing, clock), clock, events)


def test_late_elements_are_dropped_and_counted_once_their_window_has_expired(tmp_path: Path) -> None:
    group = _Group(tmp_path, FixedWindows(10), allowed_lateness=5)
    group.add("a", 1)
    assert _values(group.advance(12)) == [("a", [1])]
    (late,) = group.add("a", 3)
    assert (sorted(late.value[1]), late.pane_info.timing, late.pane_info.index) == ([3], _LATE, 1)
    group.advance(15)
    assert group.add("a", 4) == []
    assert group.grouping.dropped == 1


def test_a_late_pane_does_not_hold_the_watermark_back(tmp_path: Path) -> None:
    group = _Group(
        tmp_path,
        FixedWindows(10),
        trigger=trigger.AfterWatermark(late=trigger.AfterCount(2)),
        accumulation_mode=trigger.AccumulationMode.DISCARDING,
        allowed_lateness=100,
    )
    group.add("a", 1)
    assert len(group.advance(50)) == 1
    assert group.add("a", 2) == []
    assert group.grouping.earliest == MAX
    assert _values(group.add("a", 3)) == [("a", [2, 3])]


def test_a_timer_of_a_late_element_fires_at_once_and_not_with_later_elements(tmp_path: Path) -> None:
    group = _Group(
        tmp_path,
        FixedWindows(10),
        trigger=trigger.AfterWatermark(
            early=trigger.AfterWatermark(), late=trigger.AfterEach(trigger.AfterCount(1), trigger.AfterWatermark())
        ),
        accumulation_mode=trigger.AccumulationMode.ACCUMULATING,
        allowed_lateness=100,
    )
    group.advance(20)
    assert _values(group.add("a", 1)) == [("a", [1])]
    assert _values(group.add("a", 2)) == [("a", [1, 2])]
    assert group.advance(28) == []  # the timer that the first element set for the end of the window is gone


def test_sessions_grow_together(tmp_path: Path) -> None:
    group = _Group(tmp_path, Sessions(10))
    group.add("a", 1, 19)
    group.add("a", 10)
    (pane,) = group.advance(30)
    assert sorted(pane.value[1]) == [1, 10, 19]
    (window,) = pane.windows
    assert (window.start, window.end) == (1, 29)


def test_processing_time_fires_early_panes(tmp_path: Path) -> None:
    group = _Group(
        tmp_path,
        FixedWindows(100),
        trigger=trigger.AfterWatermark(early=trigger.Repeatedly(trigger.AfterProcessingTime(60))),
        accumulation_mode=trigger.AccumulationMode.ACCUMULATING,
    )
    group.add("a", 1)
    assert group.grouping.next_fire() == 60 * _S
    assert group.advance_clock(59) == []
    (early,) = group.advance_clock(1)
    assert (sorted(early.value[1]), early.pane_info.timing) == ([1], _EARLY)
    group.add("a", 2)
    (second,) = group.advance_clock(60)
    assert (sorted(second.value[1]), second.pane_info.timing, second.pane_info.index) == ([1, 2], _EARLY, 1)
    (last,) = group.advance(100)
    assert (sorted(last.value[1]), last.pane_info.timing, last.pane_info.index) == ([1, 2], _ON_TIME, 2)


@pytest.mark.parametrize("mode", [trigger.AccumulationMode.DISCARDING, trigger.AccumulationMode.ACCUMULATING])
def test_what_a_trigger_leaves_over_comes_when_the_window_expires(tmp_path: Path, mode: int) -> None:
    group = _Group(
        tmp_path, FixedWindows(10), trigger=trigger.Repeatedly(trigger.AfterCount(2)), accumulation_mode=mode
    )
    assert _values(group.add("a", 1, 2)) == [("a", [1, 2])]
    assert group.add("a", 3) == group.add("b", 4) == []
    assert group.add("b", 5) != []
    left = [3] if mode == trigger.AccumulationMode.DISCARDING else [1, 2, 3]
    (pane,) = group.advance(11)  # of "a": all that "b" had has come already
    assert (sorted(pane.value[1]), pane.pane_info.is_last) == (left, True)


def test_a_pipeline_with_a_test_stream_emits_windows_and_counts_what_is_late() -> None:
    events = (
        TestStream()
        .add_elements([TimestampedValue(("a", n), n) for n in (1, 2, 11)])
        .advance_watermark_to(10)
        .add_elements([TimestampedValue(("a", 3), 3), TimestampedValue(("a", 12), 12)])
    )

    def check(element: tuple[str, Iterable[int]], window: Any = beam.DoFn.WindowParam) -> None:
        expected = {0: [1, 2], 10: [11, 12]}[int(window.start)]
        if sorted(element[1]) != expected:
            raise AssertionError(f"found {element}, expected {expected}")

    def build(pipeline: beam.Pipeline) -> None:
        _ = pipeline | events | beam.WindowInto(FixedWindows(10)) | beam.GroupByKey() | beam.Map(check)

    result = run(build, "--streaming", "--debug")
    (dropped,) = result.metrics().query(MetricsFilter().with_name(DROPPED_LATE))["counters"]
    assert (dropped.key.step, dropped.committed) == ("GroupByKey", 1)


def test_a_test_stream_alone_before_a_grouping_and_its_last_event_before_its_end(tmp_path: Path) -> None:
    path = tmp_path / "seen"
    events = TestStream().add_elements([("a", 1)]).advance_processing_time(10)

    def note(element: tuple[str, Iterable[int]], pane: Any = beam.DoFn.PaneInfoParam) -> None:
        with path.open("a") as file:
            file.write(f"{list(element[1])} {PaneInfoTiming.to_string(pane.timing)}\n")

    def build(pipeline: beam.Pipeline) -> None:
        _ = pipeline | events | "Group" >> beam.GroupByKey() | beam.Map(note)
        windows = beam.WindowInto(
            FixedWindows(10),
            trigger=trigger.AfterWatermark(early=trigger.AfterProcessingTime(5)),
            accumulation_mode=trigger.AccumulationMode.DISCARDING,
        )
        other = TestStream().add_elements([TimestampedValue(("b", 2), 2)]).advance_processing_time(10)
        _ = pipeline | "Other" >> other | windows | "Early" >> beam.GroupByKey() | "Note" >> beam.Map(note)

    run(build, "--streaming", "--debug", "--allow_unsafe_triggers")
    assert sorted(path.read_text().splitlines()) == ["[1] ON_TIME", "[2] EARLY", "[] ON_TIME"]


def test_a_late_pane_does_not_hold_the_step_behind_it(tmp_path: Path) -> None:
    group = _Group(tmp_path, FixedWindows(10), allowed_lateness=100)
    group.add("a", 1)
    group.advance(50)
    encoded = group.encoded("a", 2)
    group.grouping.add(encoded)
    group.grouping.pump(group.grouping.watermark)
    block = group.grouping.next_block()
    assert block is not None
    assert block.hold == 50 * _S


@pytest.mark.parametrize("panes", [1, 50])
def test_the_state_of_a_window_does_not_grow_with_its_panes(tmp_path: Path, panes: int) -> None:
    windowing = Windowing(FixedWindows(1000), trigger.AfterWatermark(early=trigger.AfterCount(1)), _DISCARDING)
    machine = TriggerPanes(windowing, ManualClock())
    window = FixedWindows(1000).assign(FixedWindows.AssignContext(Timestamp(1)))
    for _ in range(panes):
        assert len(list(machine.add(b"a", [WindowedValue(b"1", Timestamp(1), tuple(window))]))) == 1
    ((state,),) = [windows.values() for windows in machine._keys.values()]  # pyright: ignore[reportPrivateUsage]
    assert len(state.values) == 0
    assert len(state._tags) <= 1  # pyright: ignore[reportPrivateUsage]
    assert len(machine._schedule) == 2  # the end of the window and its expiry # pyright: ignore[reportPrivateUsage]


def test_events_of_several_test_streams_take_turns(tmp_path: Path) -> None:
    path = tmp_path / "seen"

    def note(element: str) -> None:
        with path.open("a") as file:
            file.write(element)

    def build(pipeline: beam.Pipeline) -> None:
        for name in "ab":
            stream = TestStream()
            for number in "123":
                stream.add_elements([name + number])
            _ = pipeline | f"Stream {name}" >> stream | f"Note {name}" >> beam.Map(note)

    run(build, "--streaming", "--debug")
    seen = path.read_text()
    assert [seen[i + 1] for i in range(0, 12, 2)] == list("112233")


_EARLY_AND_ON_TIME: dict[str, Any] = {
    "trigger": trigger.AfterWatermark(early=trigger.AfterCount(1000)),
    "accumulation_mode": trigger.AccumulationMode.DISCARDING,
}


@pytest.mark.parametrize("windowing", [{}, {"trigger": trigger.AfterWatermark(early=trigger.AfterProcessingTime(5))}])
def test_windows_come_out_while_input_waits(tmp_path: Path, windowing: dict[str, Any]) -> None:
    """A stream that is faster than the grouping never leaves it without input."""
    if windowing:
        windowing = {**windowing, "accumulation_mode": _DISCARDING}
    group = _Group(tmp_path, FixedWindows(10), **windowing)
    panes: list[Any] = []
    ended: set[str] = set()
    for second in range(100):
        group.grouping.add(group.encoded("a", second))
        group.grouping.add(group.encoded("b", second))
        group.grouping.pump(second * _S, deadline=0)  # less than one block
        if second == 50:
            group.clock.advance(10 * _S)
        panes += group.panes()
        assert group.grouping.pending
        ended = {pane.value[0] for pane in panes if pane.pane_info.timing == _ON_TIME}
    assert ended
    assert not windowing or any(pane.pane_info.timing == _EARLY for pane in panes)
    group.grouping.pump(MAX)
    panes += group.panes()
    assert group.grouping.watermark == MAX
    assert sorted(number for pane in panes for number in pane.value[1]) == sorted([*range(100), *range(100)])
    assert not group.grouping.dropped  # none of them was late


@pytest.mark.parametrize("windowing", [{}, _EARLY_AND_ON_TIME])
def test_time_moves_step_by_step_if_many_windows_end_at_once(tmp_path: Path, windowing: dict[str, Any]) -> None:
    group = _Group(tmp_path, FixedWindows(10), **windowing)
    for key in "abc":
        group.add(key, 1, 11)
    fired: list[Any] = []
    rounds = 0
    while group.grouping.pump(100 * _S, deadline=0):  # has always passed
        panes = group.panes()
        assert len(panes) <= 1
        # Time has not passed before the last pane is out. What is pending comes after that.
        assert len(fired) == 6 or group.grouping.watermark < 10 * _S
        fired += panes
        rounds += 1
        if rounds == 2:
            group.grouping.add(group.encoded("a", 200))
    assert rounds > 6
    assert _values(fired) == sorted((key, [second]) for key in "abc" for second in (1, 11))
    assert group.grouping.watermark == 100 * _S
    assert _values(group.advance(300)) == [("a", [200])]


class _Calls:
    """Counts how often a window is hashed or compared: what grows with the windows that are looked at."""

    count = 0


class _CountingWindow(IntervalWindow):
    def __hash__(self) -> int:
        _Calls.count += 1
        return super().__hash__()

    def __eq__(self, other: object) -> bool:
        return super().__eq__(other)


@pytest.mark.parametrize("count", [20, 400])
def test_the_cost_of_a_window_does_not_grow_with_the_open_windows_of_its_key(count: int) -> None:
    windowing = Windowing(FixedWindows(1), trigger.AfterWatermark(early=trigger.AfterCount(1000)), _DISCARDING)
    machine = TriggerPanes(windowing, ManualClock())
    _Calls.count = 0
    for second in range(count):
        window = _CountingWindow(second, second + 1)
        assert not list(machine.add(b"key", [WindowedValue(b"1", Timestamp(second), (window,))]))
    assert len(_fired(machine.advance(10_000 * _S))) == count
    assert _Calls.count <= 10 * count


@pytest.mark.parametrize("mode", [trigger.AccumulationMode.DISCARDING, trigger.AccumulationMode.ACCUMULATING])
@pytest.mark.parametrize("is_simple", [True, False])
def test_values_of_open_windows_count_as_memory_and_move_to_disk(tmp_path: Path, is_simple: bool, mode: Any) -> None:
    early = {} if is_simple else {"trigger": trigger.AfterWatermark(late=trigger.AfterCount(1))}
    group = _Group(tmp_path, FixedWindows(100), accumulation_mode=mode, allowed_lateness=50, **early)
    seconds = [float(n % 100) for n in range(500)]
    for key in "abc":
        group.add(key, *seconds)
    group.add("a", 150)
    before = group.ledger.used
    assert before == group.grouping.memory_bytes > 3 * 500 * 50
    assert group.grouping.spill(1) > 500 * 50  # one of the three: what came later is too little
    group.grouping.spill(before)
    assert group.ledger.used == group.grouping.memory_bytes < 3000
    group.add("b", 7)
    expected = {key: sorted(map(int, seconds)) for key in "abc"}
    expected["b"] = sorted([*expected["b"], 7])
    assert dict(_values(group.advance(100))) == expected
    late = dict(_values(group.add("a", 7)))
    assert late == {"a": sorted([*expected["a"], 7]) if mode == trigger.AccumulationMode.ACCUMULATING else [7]}
    group.advance(1000)
    assert (group.ledger.used, group.grouping.is_empty) == (0, True)
    assert list(tmp_path.glob("spill*")) == []


@pytest.mark.thorough
def test_workers_fetch_the_values_of_a_large_pane_piece_by_piece(tmp_path: Path) -> None:
    group = _Group(tmp_path, FixedWindows(100))
    group.add("a", *([1.0] * 40_000), *([2.0] * 40_000))
    group.grouping.spill(1 << 30)
    group.grouping.pump(100 * _S)
    block = group.grouping.next_block()
    assert block is not None
    assert (block.has_references, block.size < 100, block.weight > 80_000) == (True, True, True)
    token = next(iter(group.state._groups))  # pyright: ignore[reportPrivateUsage]
    assert b"".join(group.state.group_data(token)) == b"\x01" * 40_000 + b"\x02" * 40_000
    block.release()
    group.advance(1000)
    assert group.ledger.used == 0
    assert list(tmp_path.glob("spill*")) == []


def test_too_many_keys_in_open_windows_end_the_run_with_an_error(tmp_path: Path) -> None:
    group = _Group(tmp_path, FixedWindows(100))
    policy = SpillPolicy(group.blocks, group.state, [])
    policy.live_groupings.append(group.grouping)
    for number in range(5000):
        group.grouping.add(group.encoded(f"key {number}", 1))
    with pytest.raises(ResourcesExceeded, match="keys in open windows"):  # noqa: PT012
        while group.grouping.pump(0, deadline=0):
            policy.check()


class _Pairs(WindowFn):
    """Windows of a second that merge with their neighbour once a window at 100 s comes, which merges with none."""

    def assign(self, assign_context: Any) -> list[Any]:
        return [IntervalWindow(assign_context.timestamp, assign_context.timestamp + 1)]

    def merge(self, merge_context: Any) -> None:
        windows = sorted(merge_context.windows, key=lambda window: window.start)
        if windows[-1].start == 100 and len(windows) == 3:
            merge_context.merge(windows[:2], IntervalWindow(windows[0].start, 50))

    def get_window_coder(self) -> Any:
        return coders.IntervalWindowCoder()


@pytest.mark.parametrize(
    ("combiner", "time"),
    [
        (TimestampCombiner.OUTPUT_AT_EOW, 49.999999),
        (TimestampCombiner.OUTPUT_AT_EARLIEST, 1),
        (TimestampCombiner.OUTPUT_AT_LATEST, 10),
    ],
)
def test_windows_that_merge_without_a_new_element_fire(combiner: Any, time: float) -> None:
    windowing = Windowing(_Pairs(), trigger.DefaultTrigger(), _DISCARDING, combiner)
    machine = TriggerPanes(windowing, ManualClock())

    def element(second: int) -> WindowedValue:
        return WindowedValue(b"%d" % second, Timestamp(second), (IntervalWindow(second, second + 1),))

    for second in (1, 10, 100):
        assert not list(machine.add(b"key", [element(second)]))
    assert machine.earliest == int(time * _S) // 1000 * 1000
    ((_, values, timestamp, _, (window,)),) = _fired(machine.advance(60 * _S))
    assert (values, timestamp, window) == ([b"1", b"10"], Timestamp.of(time), IntervalWindow(1, 50))
    assert len(_fired(machine.advance(200 * _S))) == 1
    assert (machine.is_empty, machine.earliest, machine.memory_bytes) == (True, MAX, 0)
    assert len(machine._schedule) == 0  # pyright: ignore[reportPrivateUsage]


def test_sessions_that_grow_leave_no_timers_behind() -> None:
    windowing = Windowing(Sessions(10), trigger.AfterWatermark(), _DISCARDING, allowed_lateness=10**6)
    machine = TriggerPanes(windowing, ManualClock())
    for second in range(5000):
        window = IntervalWindow(second, second + 10)
        assert not list(machine.add(b"key", [WindowedValue(b"1", Timestamp(second), (window,))]))
    assert len(machine._schedule) <= 2100  # pyright: ignore[reportPrivateUsage]
    ((_, values, _, _, _),) = _fired(machine.advance(10_000 * _S))
    assert len(values) == 5000
