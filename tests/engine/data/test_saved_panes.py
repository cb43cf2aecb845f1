"""Groupings of unbounded input that go on from a checkpoint."""

from __future__ import annotations

import marshal
from collections.abc import Callable
from pathlib import Path
from types import SimpleNamespace
from typing import Any, cast
from unittest import mock

import apache_beam as beam
import pytest
from apache_beam.coders import coder_impl
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.test_stream import TestStream
from apache_beam.transforms import trigger
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.window import FixedWindows, Sessions, SlidingWindows, TimestampCombiner
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import WindowedValue
from hypothesis import given, settings
from hypothesis import strategies as st

from luminosity import LuminosityRunner
from luminosity.engine.data.blocks import Block, BlockStore
from luminosity.engine.data.event_time import MAX, MIN
from luminosity.engine.data.panes import pane_values
from luminosity.engine.data.panes.live_grouping import LiveGrouping
from luminosity.engine.data.saved_rows import Changes
from luminosity.engine.data.state import StateStore
from luminosity.engine.data.world import ManualClock
from luminosity.engine.loop.buffers import BufferRun
from luminosity.engine.loop.spill_policy import SpillPolicy
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.plan.codecs import Codecs
from luminosity.engine.plan.graph import BufferKind
from luminosity.engine.plan.planner import plan
from luminosity.engine.spill.quota import Ledger
from tests.engine.data.checkpoints import Checkpoint, interrupted
from tests.runners import IS_REFERENCE

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="it tests parts of the engine")

_S = 1_000_000  # microseconds
_DISCARDING: Any = trigger.AccumulationMode.DISCARDING
_ACCUMULATING: Any = trigger.AccumulationMode.ACCUMULATING
_AT_END: Any = TimestampCombiner.OUTPUT_AT_EOW


class _Plan:
    """A plan with one GroupByKey of strings by string, over unbounded input."""

    def __init__(self) -> None:
        pipeline = beam.Pipeline(options=PipelineOptions(["--streaming"]))
        _ = (
            pipeline
            | TestStream()
            | beam.Map(lambda element: element).with_output_types(tuple[str, str])
            | beam.WindowInto(FixedWindows(10))
            | beam.GroupByKey()
            | beam.Map(print)
        )
        environment = LuminosityRunner().default_environment(PipelineOptions([]))
        graph = plan(pipeline.to_runner_api(default_environment=environment))
        (buffer,) = [buffer for buffer in graph.buffers.values() if buffer.kind is BufferKind.GROUP]
        codecs = Codecs(graph)
        self.written, self.read = codecs.elements(buffer.coder_id), codecs.elements(buffer.output_coder_id)
        self.encode = codecs.impl(buffer.coder_id).encode_nested
        self.decode = codecs.impl(buffer.output_coder_id).decode_from_stream


_PLAN = _Plan()


class _Bench:
    """The buffer of a GroupByKey over unbounded input, which the test feeds itself."""

    def __init__(self, folder: Path, windowing: Windowing, *, is_saved: bool = True) -> None:
        self.windowing = windowing
        self.ledger = Ledger(None, 1 << 30, 0)
        self.blocks = BlockStore(str(folder), self.ledger)
        self.clock = ManualClock()
        state = StateStore(str(folder), self.ledger)
        self.live = LiveGrouping(_PLAN.written, _PLAN.read, windowing, state, self.blocks, self.clock, str(folder))
        self.buffer = BufferRun(None, 1 << 20, SpillPolicy(self.blocks, state, []), self.clock, self.live)
        self.live.may_refer_to_state = False  # all values are in the blocks
        self.buffer.set_source_watermark(MIN)
        reader = SimpleNamespace(is_ready=False, add=lambda read_id, block: self._fired.append(block))
        self.buffer.readers.append((cast(StageRun, reader), "read"))
        self._fired: list[Block] = []
        self._is_saved = is_saved
        if is_saved:
            self.buffer.track()

    def finish(self) -> list[Any]:
        self.buffer.finish_work()
        return self.seen()

    def save(self, changes: Changes) -> None:
        if self._is_saved:
            # The clock goes back, since the events since the checkpoint happen again.
            changes.put("test", b"", marshal.dumps((self.clock.micros(), self.buffer.source_watermark)))
            self.buffer.save(changes, "Group")

    def restore(self, checkpoint: Checkpoint) -> None:
        saved = checkpoint.saved(self.blocks)
        for _, value in saved.rows("test"):
            micros, watermark = marshal.loads(value)
            self.clock.advance(micros)
            self.buffer.set_source_watermark(watermark)
        self.buffer.restore(saved, "Group")

    def release(self) -> None:
        self.buffer.release()
        for block in self._fired:
            block.release()
        assert self.ledger.used == 0

    def block(self, elements: list[tuple[str, int]], value: str) -> Block:
        """Return a block with an element for each key and second."""
        encoded = b""
        window_fn = self.windowing.windowfn
        for number, (key, second) in enumerate(elements):
            windows = tuple(window_fn.assign(window_fn.AssignContext(Timestamp(second))))
            encoded += _PLAN.encode(WindowedValue((key, f"{value} {number}"), Timestamp(second), windows))
        return self.blocks.of_bytes(encoded, len(elements), min(second for _, second in elements) * _S)

    def add(self, elements: list[tuple[str, int]], value: str) -> list[Any]:
        self.buffer.deliver(self.block(elements, value))
        return self.seen()

    def begin(self) -> list[Any]:
        """Do a small part of what is to be done."""
        self.buffer.pump(0)
        return self.seen()

    def pump(self) -> list[Any]:
        while self.buffer.pump(0):
            pass
        return self.seen()

    def advance(self, seconds: float) -> list[Any]:
        self.buffer.set_source_watermark(max(self.buffer.source_watermark, min(MAX, int(seconds * _S))))
        return self.begin()

    def advance_clock(self, seconds: int) -> list[Any]:
        self.clock.advance(seconds * _S)
        return self.begin()

    def spill(self) -> list[Any]:
        self.live.spill(1 << 20)
        return self.seen()

    def seen(self) -> list[Any]:
        """Return all that can be seen from outside, and the panes since the last call."""
        panes: list[Any] = []
        for block in self._fired:
            stream = coder_impl.create_InputStream(block.data())
            while stream.size() > 0:
                pane = _PLAN.decode(stream, True)
                key, values = pane.value
                panes.append((key, sorted(values), pane.timestamp, repr(pane.windows), repr(pane.pane_info)))
            block.release()
        if self._fired:  # how the panes are divided into blocks depends on the time that they take
            panes.append(("hold", [], min(block.hold for block in self._fired)))
        self._fired.clear()
        live = self.live
        return [(sorted(panes), self.buffer.take_dropped(), self.buffer.watermark(), live.next_fire(), live.is_empty)]


_Step = Callable[[_Bench], list[Any]]
_ELEMENTS = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 60)), min_size=1, max_size=5)
_STEPS: st.SearchStrategy[list[Any]] = st.lists(
    st.one_of(
        st.tuples(st.just("add"), _ELEMENTS),
        st.tuples(st.sampled_from(["advance", "advance_clock"]), st.integers(0, 60)),
        st.tuples(st.sampled_from(["begin", "pump", "spill"]), st.none()),
    ),
    max_size=14,
)
_LEAVES = st.one_of(
    st.integers(1, 3).map(trigger.AfterCount),
    st.integers(1, 20).map(trigger.AfterProcessingTime),
    st.just(trigger.AfterWatermark()),
    st.just(trigger.DefaultTrigger()),
)
_TRIGGERS = st.one_of(
    st.just(trigger.DefaultTrigger()),
    _LEAVES,
    st.builds(trigger.AfterWatermark, st.none() | _LEAVES, st.none() | _LEAVES),
    st.builds(trigger.Repeatedly, _LEAVES),
    st.builds(trigger.AfterAll, _LEAVES, _LEAVES),
    st.builds(lambda *of: trigger.Repeatedly(trigger.AfterAny(*of)), _LEAVES, _LEAVES),
    st.builds(lambda *of: trigger.AfterEach(*map(trigger.Repeatedly, of)), _LEAVES, _LEAVES),
)
_INDICES = st.sets(st.integers(0, 18), max_size=8)


def _step(number: int, kind: str, data: Any) -> _Step:
    if kind == "add":
        return lambda bench: bench.add(data, f"value {number}")
    return lambda bench: getattr(bench, kind)() if data is None else getattr(bench, kind)(data)


@settings(deadline=None, max_examples=60)
@given(
    events=_STEPS,
    window=st.sampled_from([FixedWindows(10), SlidingWindows(20, 10), Sessions(5), Sessions(20)]),
    trigger_fn=_TRIGGERS,
    lateness=st.sampled_from([0, 5, 15]),
    mode=st.sampled_from([_DISCARDING, _ACCUMULATING]),
    combiner=st.sampled_from(["OUTPUT_AT_EOW", "OUTPUT_AT_EARLIEST", "OUTPUT_AT_LATEST"]),
    saves=_INDICES,
    crashes=_INDICES,
)
def test_each_pane_fires_once_wherever_a_run_is_interrupted(
    tmp_path_factory: pytest.TempPathFactory,
    events: list[Any],
    window: Any,
    trigger_fn: Any,
    lateness: int,
    mode: Any,
    combiner: str,
    saves: set[int],
    crashes: set[int],
) -> None:
    folder = tmp_path_factory.mktemp("panes")
    windowing = Windowing(window, trigger_fn, mode, getattr(TimestampCombiner, combiner), lateness)
    steps = [_step(number, *event) for number, event in enumerate(events)]
    steps += [_Bench.pump, lambda bench: bench.advance(200), _Bench.pump, lambda bench: bench.advance(MAX), _Bench.pump]
    with mock.patch.object(pane_values, "_LEAST_SPILLED", 1):
        whole = interrupted(lambda: _Bench(folder, windowing, is_saved=False), steps, saves, set())
        assert interrupted(lambda: _Bench(folder, windowing), steps, saves, crashes) == whole
    assert not list(folder.iterdir())


_WINDOWINGS = {
    "quick": Windowing(FixedWindows(100), trigger.DefaultTrigger(), _DISCARDING, _AT_END, 0),
    "triggers": Windowing(FixedWindows(100), trigger.AfterWatermark(), _DISCARDING, _AT_END, 0),
    "sessions": Windowing(Sessions(50), trigger.DefaultTrigger(), _DISCARDING, _AT_END, 0),
}


@pytest.mark.parametrize("name", _WINDOWINGS)
def test_a_checkpoint_of_open_windows_writes_only_what_has_changed(tmp_path: Path, name: str) -> None:
    bench, checkpoint = _Bench(tmp_path, _WINDOWINGS[name]), Checkpoint()
    bench.add([("large", 60)] * 3_000 + [(str(key), 60) for key in range(100)], "first")
    bench.pump()
    checkpoint.save(bench.save)
    assert checkpoint.written_bytes > 30_000
    for second in (60, 61):  # another timestamp makes a session longer
        bench.add([("large", second)], "later")
        bench.pump()
        checkpoint.save(bench.save)
        assert checkpoint.written_bytes < 500
        assert checkpoint.written <= 4  # the values, the fields, what is pending, and the clock of the test
    restored = _Bench(tmp_path, _WINDOWINGS[name])
    restored.restore(checkpoint)
    checkpoint.save(restored.save)
    assert checkpoint.written == 1  # the clock of the test
    restored.add([("large", 60)], "last")
    restored.pump()
    checkpoint.save(restored.save)
    assert checkpoint.written_bytes < 500
    fired = [pane for step in (restored.advance(MAX), restored.pump()) for pane in step[0][0] if pane[0] != "hold"]
    assert sum(len(values) for _, values, *_ in fired) == 3_103
    checkpoint.save(restored.save)
    assert len(checkpoint.keys("grouping/Group")) == 2  # watermarks, and that nothing is pending
    restored.release()
    bench.release()


def test_half_of_a_windows_panes_are_in_no_checkpoint(tmp_path: Path) -> None:
    bench, checkpoint = _Bench(tmp_path, _WINDOWINGS["quick"]), Checkpoint()
    bench.add([(str(key), 1) for key in range(10)], "value")
    bench.pump()
    ((panes, *_),) = bench.advance(200)
    assert bench.buffer.has_work
    with pytest.raises(AssertionError, match="unfinished work"):
        checkpoint.save(bench.save)
    ((more, *_),) = bench.finish()
    assert not bench.buffer.has_work
    assert len({pane[0] for pane in (*panes, *more)} - {"hold"}) == 10
    checkpoint.save(bench.save)
    bench.release()


def test_windows_that_do_not_fit_into_memory_move_to_disk_when_they_are_restored(tmp_path: Path) -> None:
    bench, checkpoint = _Bench(tmp_path, _WINDOWINGS["quick"]), Checkpoint()
    for key in range(30):
        bench.add([(str(key), 1)], "v" * 100_000)
    bench.pump()
    checkpoint.save(bench.save)
    assert bench.ledger.spilled == 0
    restored = _Bench(tmp_path, _WINDOWINGS["quick"])
    restored.ledger = Ledger(None, 1 << 20, 0)
    restored.blocks.ledger = restored.ledger
    policy = SpillPolicy(restored.blocks, StateStore(str(tmp_path), restored.ledger), [])
    policy.live_groupings.append(restored.live)
    restored.live.restore(checkpoint.saved(restored.blocks), "grouping/Group", policy.check)
    assert restored.ledger.peak < 2.2e6
    assert restored.ledger.used < 1e6
    fired = [pane for step in (restored.advance(MAX), restored.pump()) for pane in step[0][0] if pane[0] != "hold"]
    assert {(key, len(value)) for key, (value,), *_ in fired} == {(str(key), 100_002) for key in range(30)}
    bench.release()
    restored.release()


def test_the_state_of_unknown_triggers_is_pickled(tmp_path: Path) -> None:
    bench, checkpoint = _Bench(tmp_path, _WINDOWINGS["triggers"]), Checkpoint()
    bench.add([("a", 1)], "value")
    bench.pump()
    (state,) = bench.live._panes._keys[b"\x01a"].values()  # type: ignore[attr-defined]
    tag = SimpleNamespace(tag="of a trigger of yours")
    state.add_state(tag, Timestamp(5))
    checkpoint.save(bench.save)
    restored = _Bench(tmp_path, _WINDOWINGS["triggers"])
    restored.restore(checkpoint)
    (state,) = restored.live._panes._keys[b"\x01a"].values()  # type: ignore[attr-defined]
    assert state.get_state(tag) == {Timestamp(5)}
    bench.release()
    restored.release()


def test_sessions_grow_together_after_a_restart_wherever_their_values_are(tmp_path: Path) -> None:
    bench, checkpoint = _Bench(tmp_path, _WINDOWINGS["sessions"]), Checkpoint()
    bench.add([("a", 0), ("a", 100)], "on disk")
    bench.pump()
    with mock.patch.object(pane_values, "_LEAST_SPILLED", 1):
        bench.spill()
    bench.add([("a", 1), ("a", 101)], "in memory")
    bench.pump()
    checkpoint.save(bench.save)
    bench.add([("a", 40), ("a", 60)], "between")
    bench.pump()
    checkpoint.save(bench.save)
    restored = _Bench(tmp_path, _WINDOWINGS["sessions"])
    restored.restore(checkpoint)
    restored.add([("a", 200), ("a", 155)], "later")
    restored.add([("a", 148)], "last")
    restored.pump()
    fired = [pane for step in (restored.advance(MAX), restored.pump()) for pane in step[0][0] if pane[0] != "hold"]
    kinds = ["between", "in memory", "later", "on disk"]
    assert [(key, values) for key, values, *_ in fired] == [
        ("a", sorted(["last 0", *(f"{kind} {number}" for kind in kinds for number in range(2))]))
    ]
    assert restored.live.is_empty
    bench.release()
    restored.release()
