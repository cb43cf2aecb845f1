"""Unbounded side inputs, and elements that wait for them, that go on from a checkpoint."""

from __future__ import annotations

import marshal
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import apache_beam as beam
import pytest
from apache_beam.coders import coder_impl
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.pvalue import AsList
from apache_beam.testing.test_stream import TestStream
from apache_beam.transforms import trigger
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.sideinputs import default_window_mapping_fn
from apache_beam.transforms.window import FixedWindows, GlobalWindows, SlidingWindows, TimestampCombiner, WindowFn
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import PANE_INFO_UNKNOWN, PaneInfo, PaneInfoTiming, WindowedValue
from hypothesis import given, settings
from hypothesis import strategies as st

from luminosity import LuminosityRunner
from luminosity.engine.data.blocks import Block, BlockStore
from luminosity.engine.data.live_side_input import LiveSideInput
from luminosity.engine.data.panes import pane_values
from luminosity.engine.data.saved_rows import Changes
from luminosity.engine.data.side_gate import Side, SideGate
from luminosity.engine.data.state import StateStore
from luminosity.engine.data.world import ManualClock
from luminosity.engine.loop.buffers import BufferRun
from luminosity.engine.loop.spill_policy import SpillPolicy
from luminosity.engine.plan.codecs import Codecs
from luminosity.engine.plan.planner import plan
from luminosity.engine.spill.quota import Ledger
from tests.engine.data.checkpoints import Checkpoint, interrupted
from tests.runners import IS_REFERENCE

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="it tests parts of the engine")

_S = 1_000_000  # microseconds
_DISCARDING: Any = trigger.AccumulationMode.DISCARDING
_ACCUMULATING: Any = trigger.AccumulationMode.ACCUMULATING
_AT_END: Any = TimestampCombiner.OUTPUT_AT_EOW
_EACH = trigger.Repeatedly(trigger.AfterCount(1))
_PAIRS = trigger.Repeatedly(trigger.AfterCount(2))
_LATER = trigger.Repeatedly(trigger.AfterProcessingTime(5))


class _Plan:
    """A plan with a step that reads an unbounded side input of pairs."""

    def __init__(self, side: beam.WindowInto) -> None:
        pipeline = beam.Pipeline(options=PipelineOptions(["--streaming", "--allow_unsafe_triggers"]))
        values = pipeline | "Side" >> TestStream() | beam.Map(print).with_output_types(tuple[str, int]) | side
        elements = pipeline | "Main" >> TestStream() | "Named" >> beam.Map(print).with_output_types(str)
        _ = elements | "MainWindow" >> beam.WindowInto(FixedWindows(10)) | "Read" >> beam.Map(print, AsList(values))
        environment = LuminosityRunner().default_environment(PipelineOptions([]))
        graph = plan(pipeline.to_runner_api(default_environment=environment))
        (stage,) = [stage for stage in graph.stages if stage.side_inputs]
        (read,), (side_input,) = stage.reads, stage.side_inputs
        codecs, buffer = Codecs(graph), graph.buffers[side_input.buffer_id]
        self.read_id = read.transform_id
        self.side, self.main = codecs.elements(buffer.coder_id), codecs.elements(read.coder_id)
        self.side_coder, self.main_coder = codecs.impl(buffer.coder_id), codecs.impl(read.coder_id)
        self.value = codecs.impl(graph.components.coders[buffer.coder_id].component_coder_ids[0])


_FIXED = _Plan(beam.WindowInto(FixedWindows(10)))
_GLOBAL = _Plan(beam.WindowInto(GlobalWindows(), trigger=_EACH, accumulation_mode=_DISCARDING))


class _Bench:
    """A side input, and a gate for elements that read it, which the test feeds itself."""

    def __init__(self, folder: Path, windowing: Windowing, main: Any, *, is_saved: bool = True) -> None:
        self._plan = _GLOBAL if isinstance(windowing.windowfn, GlobalWindows) else _FIXED
        self._side_window, self._main_window = windowing.windowfn, main
        self.ledger = Ledger(None, 1 << 30, 0)
        self.blocks = BlockStore(str(folder), self.ledger)
        self.clock = ManualClock()
        self.live = LiveSideInput(self._plan.side, windowing, str(folder), self.blocks, self.clock)
        self.map = default_window_mapping_fn(windowing.windowfn)
        sides = [Side(self.live, self._plan.side, self.map)]
        self.gate = SideGate(sides, {self._plan.read_id: self._plan.main}, self.blocks)
        self.buffer = BufferRun(None, 1, SpillPolicy(self.blocks, StateStore(str(folder), self.ledger), []), self.clock)
        self.buffer.live_side_input = self.live
        self.watermark = -100 * _S  # of the main input
        self._owners = {self._plan.read_id: "gate/Read"}
        self._is_saved = is_saved
        if is_saved:
            self.buffer.track()

    def finish(self) -> list[Any]:
        return []

    def save(self, changes: Changes) -> None:
        if self._is_saved:
            changes.put("test", b"", marshal.dumps((self.clock.micros(), self.watermark)))
            self.buffer.save(changes, "Side")
            self.gate.save(changes, self._owners)

    def restore(self, checkpoint: Checkpoint) -> None:
        saved = checkpoint.saved(self.blocks)
        for _, value in saved.rows("test"):
            micros, self.watermark = marshal.loads(value)
            self.clock.advance(micros)
        self.buffer.restore(saved, "Side")
        self.gate.restore(saved, self._owners)

    def release(self) -> None:
        self.buffer.release()
        self.gate.release()
        assert self.ledger.used == 0

    def put(self, values: list[tuple[str, int]], at: int, index: int | None) -> list[Any]:
        """Let values of the side input arrive. An index makes them a pane of a grouping."""
        pane = PANE_INFO_UNKNOWN
        if index is not None:
            pane = PaneInfo(index == 0, False, PaneInfoTiming.EARLY, index, -1)
        self.live.add(self._block(self._plan.side_coder, self._side_window, values, at, pane))
        return self.seen()

    def send(self, at: int) -> list[Any]:
        """Let elements of the main input arrive."""
        elements = [f"{at} {number}" for number in range(2)]
        block = self._block(self._plan.main_coder, self._main_window, elements, at, PANE_INFO_UNKNOWN)
        return self.seen(self.gate.admit(self._plan.read_id, block, self.watermark))

    def advance(self, second: int) -> list[Any]:
        """Move the watermark of the side input."""
        self.live.advance(max(self.live.watermark, second * _S))
        return self.seen()

    def advance_main(self, second: int) -> list[Any]:
        """Move the watermark of the main input, and forget what it can't read any more."""
        self.watermark = max(self.watermark, min(second * _S, self.gate.holds.minimum))
        self.live.forget(self.watermark)
        return self.seen()

    def advance_clock(self, seconds: int) -> list[Any]:
        self.clock.advance(seconds * _S)
        return self.advance(0)

    def take_ready(self) -> list[Any]:
        return self.seen(block for _, block in self.gate.take_ready())

    def spill(self) -> list[Any]:
        self.live.spill(self.blocks, 1 << 20)
        return self.seen()

    def read(self) -> list[Any]:
        """Return what elements find in the side input, by window."""
        version = self.live.open()
        found: list[Any] = []
        for second in range(0, 60, 10):
            key = beam_fn_api_pb2.StateKey()
            windows = self._side_window.assign(WindowFn.AssignContext(Timestamp(second)))
            for window in windows:
                key.iterable_side_input.window = self._plan.side.encode_window(window)
                for only_last in (False, True):
                    data = b"".join(chunk.read() for chunk in self.live.read(version, key, only_last=only_last))
                    found.append((second, only_last, self._values(data)))
        self.live.close(version)
        return [found]

    def seen(self, blocks: Iterable[Block] = ()) -> list[Any]:
        """Return all that can be seen from outside, and the elements that can run."""
        elements: list[Any] = []
        for block in blocks:
            for header, value in self._plan.main.elements(block.data()):
                elements.append((value, header.timestamp, repr(header.windows)))
            elements.append((b"hold", block.hold))
            block.release()
        dropped, self.gate.dropped = self.gate.dropped, 0
        gate = self.gate.count, self.gate.holds.minimum, dropped
        return [(sorted(elements), gate, self.live.watermark, self.live.windows, self.live.next_fire())]

    def _values(self, data: bytes) -> list[Any]:
        stream = coder_impl.create_InputStream(data)
        found: list[Any] = []
        while stream.size() > 0:
            found.append(self._plan.value.decode_from_stream(stream, True))
        return found

    def _block(self, coder: Any, windows: Any, values: Iterable[Any], at: float, pane: PaneInfo) -> Block:
        assigned = tuple(windows.assign(WindowFn.AssignContext(Timestamp(at))))
        encoded = [coder.encode_nested(WindowedValue(value, Timestamp(at), assigned, pane)) for value in values]
        return self.blocks.of_bytes(b"".join(encoded), len(encoded), int(at * _S))


_Step = Callable[[_Bench], list[Any]]
_SECONDS = st.integers(0, 60)
_VALUES = st.lists(st.tuples(st.sampled_from(["a", "b"]), st.integers(0, 100)), min_size=1, max_size=3)
_PUT = st.tuples(_VALUES, _SECONDS, st.none() | st.integers(0, 2)).map(lambda put: lambda bench: bench.put(*put))
_OTHER = st.tuples(st.sampled_from(["send", "send", "advance", "advance_main", "advance_clock"]), _SECONDS).map(
    lambda event: lambda bench: getattr(bench, event[0])(event[1])
)
_STEPS = st.lists(_PUT | _OTHER | st.sampled_from([_Bench.take_ready, _Bench.spill, _Bench.read]), max_size=20)
_INDICES = st.sets(st.integers(0, 24), max_size=8)


@settings(deadline=None, max_examples=40)
@given(
    steps=_STEPS,
    side=st.sampled_from(
        [
            (FixedWindows(10), trigger.DefaultTrigger()),
            (SlidingWindows(20, 10), trigger.DefaultTrigger()),
            (FixedWindows(10), _PAIRS),
            (GlobalWindows(), _EACH),
            (GlobalWindows(), _PAIRS),
            (GlobalWindows(), _LATER),
        ]
    ),
    main=st.sampled_from([FixedWindows(10), SlidingWindows(20, 10)]),
    mode=st.sampled_from([_DISCARDING, _ACCUMULATING]),
    lateness=st.sampled_from([0, 15]),
    saves=_INDICES,
    crashes=_INDICES,
)
def test_elements_read_the_same_wherever_a_run_is_interrupted(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[_Step],
    side: tuple[Any, Any],
    main: Any,
    mode: Any,
    lateness: int,
    saves: set[int],
    crashes: set[int],
) -> None:
    folder = tmp_path_factory.mktemp("sides")
    windowing = Windowing(*side, mode, _AT_END, lateness)
    steps = [*steps, _Bench.read, lambda bench: bench.advance(300), _Bench.take_ready, _Bench.read]
    with mock.patch.object(pane_values, "_LEAST_SPILLED", 1):
        whole = interrupted(lambda: _Bench(folder, windowing, main, is_saved=False), steps, saves, set())
        assert interrupted(lambda: _Bench(folder, windowing, main), steps, saves, crashes) == whole
    assert not list(folder.iterdir())


def test_a_checkpoint_of_a_side_input_writes_only_what_has_changed(tmp_path: Path) -> None:
    windowing = Windowing(FixedWindows(10), trigger.DefaultTrigger(), _DISCARDING, _AT_END, 0)
    bench, checkpoint = _Bench(tmp_path, windowing, FixedWindows(10)), Checkpoint()

    def written() -> int:
        checkpoint.save(bench.save)
        return checkpoint.written - 1  # the clock of the test

    for second in range(0, 50, 10):
        bench.put([("a", second)] * 3, second, None)
        bench.advance(0)
        bench.send(second)
    assert written() == 2 + 2 * 5 + 5  # pending and times; windows and their blocks; what waits for them
    assert written() == 0
    bench.put([("b", 0)], 0, None)
    bench.advance(0)
    assert written() == 2  # the new block, and the last element
    bench.send(30)
    assert written() == 1
    bench.advance(20)
    assert len(bench.take_ready()[0][0]) == 2 * 3  # two blocks of two elements and their holds
    assert written() == 1
    assert len(checkpoint.keys("gate/Read")) == 4
    bench.advance_main(20)
    assert written() == 1
    assert len(checkpoint.keys("side/Side")) == 2 + 2 * 3
    bench.release()


def test_panes_that_replace_each_other_leave_no_rows(tmp_path: Path) -> None:
    windowing = Windowing(GlobalWindows(), _EACH, _DISCARDING, _AT_END, 0)
    bench, checkpoint = _Bench(tmp_path, windowing, FixedWindows(10)), Checkpoint()
    sizes: set[int] = set()
    for number in range(10):
        bench.put([("a", number)], number, None)
        bench.advance(0)
        checkpoint.save(bench.save)
        sizes.add(len(checkpoint.keys("side/Side")))
    assert len(sizes) == 1
    restored = _Bench(tmp_path, windowing, FixedWindows(10))
    restored.restore(checkpoint)
    assert restored.read() == bench.read()
    restored.release()
    bench.release()
