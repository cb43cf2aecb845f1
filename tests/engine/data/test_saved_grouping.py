"""Groupings and side inputs of bounded input that go on from a checkpoint."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any
from unittest import mock

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms import trigger
from apache_beam.transforms.window import FixedWindows, GlobalWindows, Sessions, SlidingWindows, TimestampCombiner
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import WindowedValue
from hypothesis import given, settings
from hypothesis import strategies as st

from luminosity import LuminosityRunner
from luminosity.engine.data import grouping as grouping_module
from luminosity.engine.data.blocks import Block, BlockStore
from luminosity.engine.data.complete_side_input import SideInputData
from luminosity.engine.data.event_time import MAX
from luminosity.engine.data.grouping import Grouping
from luminosity.engine.data.saved_rows import Changes
from luminosity.engine.data.state import StateStore
from luminosity.engine.data.world import WallClock
from luminosity.engine.loop.buffers import BufferRun
from luminosity.engine.loop.spill_policy import SpillPolicy
from luminosity.engine.plan.codecs import Codecs
from luminosity.engine.plan.graph import BufferKind
from luminosity.engine.plan.planner import plan
from luminosity.engine.spill.files import Chunk
from luminosity.engine.spill.quota import Ledger
from tests.engine.data.checkpoints import Checkpoint, interrupted
from tests.runners import IS_REFERENCE

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="it tests parts of the engine")

_DISCARDING: Any = trigger.AccumulationMode.DISCARDING


class _State(StateStore):
    """Notes the token of the latest large group."""

    token = b""

    def add_group(self, chunks: list[Chunk]) -> bytes:
        self.token = super().add_group(chunks)
        return self.token


class _Plan:
    """A plan with one GroupByKey of strings by string."""

    def __init__(self, window: Any, **windowing: Any) -> None:
        pipeline = beam.Pipeline(options=PipelineOptions(["--allow_unsafe_triggers"]))
        _ = (
            pipeline
            | beam.Create([1])
            | beam.Map(lambda element: (str(element), "")).with_output_types(tuple[str, str])
            | beam.WindowInto(window, **windowing)
            | beam.GroupByKey()
            | beam.Map(print)
        )
        environment = LuminosityRunner().default_environment(PipelineOptions([]))
        graph = plan(pipeline.to_runner_api(default_environment=environment))
        (self.buffer,) = [buffer for buffer in graph.buffers.values() if buffer.kind is BufferKind.GROUP]
        self.codecs = Codecs(graph)
        self.written = self.codecs.elements(self.buffer.coder_id)
        self.read = self.codecs.elements(self.buffer.output_coder_id)
        self.windowing = self.codecs.windowing(self.buffer.pcollection_id)


class _Bench:
    """The buffer of a GroupByKey, which the test feeds itself."""

    def __init__(self, of: _Plan, folder: Path, *, is_saved: bool = True, limit: int = 1 << 30) -> None:
        self._plan = of
        self.ledger = Ledger(None, limit, 0)
        self.blocks = BlockStore(str(folder), self.ledger)
        self._state = _State(str(folder), self.ledger)
        self.grouping = Grouping(of.written, of.read, of.windowing, self._state, self.blocks, str(folder))
        self.buffer = BufferRun(self.grouping, 1 << 20, SpillPolicy(self.blocks, self._state, []), WallClock())
        self._is_saved = is_saved
        if is_saved:
            self.buffer.track()

    def finish(self) -> list[Any]:
        return []

    def save(self, changes: Changes) -> None:
        self.buffer.save(changes, "Group")

    def restore(self, checkpoint: Checkpoint) -> None:
        self.buffer.restore(checkpoint.saved(self.blocks), "Group")

    def release(self) -> None:
        self.buffer.release()
        self._state.release()

    def block(self, elements: list[tuple[str, int]]) -> Block:
        """Return a block with an element of this key and size at this second."""
        encode = self._plan.codecs.impl(self._plan.buffer.coder_id).encode_nested
        assign = self._plan.windowing.windowfn
        encoded = [
            encode(
                WindowedValue(
                    (key, str(size) * size), Timestamp(size), tuple(assign.assign(assign.AssignContext(size)))
                )
            )
            for key, size in elements
        ]
        return self.blocks.of_bytes(b"".join(encoded), len(encoded), min(size for _, size in elements) * 1_000_000)

    def add(self, elements: list[tuple[str, int]]) -> list[Any]:
        self.buffer.deliver(self.block(elements))
        return []

    def absorb(self) -> list[Any]:
        if self.grouping.pending:
            self.grouping.absorb()
        return []

    def spill(self) -> list[Any]:
        self.blocks.spill(self.grouping.absorbed or (), 1 << 20)
        self.grouping.table.spill(300)
        return []

    def next_groups(self) -> list[Any]:
        """Return the groups of the next block, each as its encoding."""
        while self.grouping.pending:
            self.grouping.absorb()
        block = self.grouping.next_block()
        if block is None:
            assert self.buffer.watermark() == MAX
            return []
        data, read = block.data(), self._plan.read
        groups = [(read.encode_header(header), value) for header, value in read.elements(data)]
        if block.has_references:
            ((header, value),) = groups
            groups = [
                (
                    header,
                    value[: value.index(b"\xff\xff\xff\xff")] + b"".join(self._state.group_data(self._state.token)),
                )
            ]
        block.release()
        return groups


_Step = Callable[[_Bench], list[Any]]
_EARLY = trigger.AfterWatermark(early=trigger.AfterCount(2))
_DELAYED = trigger.AfterWatermark(early=trigger.AfterProcessingTime(5))
_PLANS = [
    _Plan(GlobalWindows()),
    _Plan(FixedWindows(10)),
    _Plan(SlidingWindows(20, 10), timestamp_combiner=TimestampCombiner.OUTPUT_AT_LATEST),
    _Plan(Sessions(5)),
    _Plan(FixedWindows(10), trigger=_EARLY, accumulation_mode=_DISCARDING),
    _Plan(FixedWindows(10), trigger=_DELAYED, accumulation_mode=_DISCARDING),
]
_STEPS = st.lists(
    st.one_of(
        st.lists(
            st.tuples(st.sampled_from(["a", "b", "cc", "d", "e"]), st.integers(0, 40)), min_size=1, max_size=6
        ).map(lambda elements: lambda bench: bench.add(elements)),
        st.just(_Bench.absorb),
        st.just(_Bench.spill),
    ),
    min_size=1,
    max_size=12,
)
_INDICES = st.sets(st.integers(0, 30), max_size=8)


@settings(deadline=None)
@given(
    steps=_STEPS, of=st.sampled_from(_PLANS), saves=_INDICES, crashes=_INDICES, spills=_INDICES, refers=st.booleans()
)
def test_each_group_leaves_once_wherever_a_run_is_interrupted(
    tmp_path_factory: pytest.TempPathFactory,
    steps: list[_Step],
    of: _Plan,
    saves: set[int],
    crashes: set[int],
    spills: set[int],
    refers: bool,
) -> None:
    folder, made = tmp_path_factory.mktemp("grouping"), list[_Bench]()

    def make(*, is_saved: bool = True) -> _Bench:
        made.append(_Bench(of, folder, is_saved=is_saved))
        made[-1].grouping.may_refer_to_state = refers
        return made[-1]

    steps = list(steps)
    for index in range(40):
        if index in spills:
            steps.append(_Bench.spill)
        steps.append(_Bench.next_groups)
    # Small limits, so that there are many blocks, and groups of which workers fetch the values.
    with mock.patch.object(grouping_module, "BLOCK_BYTES", 60), mock.patch.object(grouping_module, "LARGE_BYTES", 50):
        whole = interrupted(lambda: make(is_saved=False), steps, set(), set())
        assert made[-1].ledger.used == 0
        assert sorted(interrupted(make, steps, saves, crashes)) == sorted(whole)
    assert made[-1].ledger.used == 0
    assert not list(folder.iterdir())


def test_a_checkpoint_of_a_grouping_writes_only_new_blocks(tmp_path: Path) -> None:
    bench, checkpoint = _Bench(_PLANS[0], tmp_path), Checkpoint()
    for number in range(2500):
        bench.add([(str(number), 1)])
    checkpoint.save(bench.save)
    assert checkpoint.written == 4  # rows of 1,000 blocks, and how much has left
    bench.absorb()
    checkpoint.save(bench.save)
    assert checkpoint.written == 0
    bench.add([("more", 1)])
    checkpoint.save(bench.save)
    assert checkpoint.written == 1
    restored = _Bench(_PLANS[0], tmp_path)
    restored.restore(checkpoint)
    assert len(restored.grouping.pending) == 2501
    restored.add([("late", 1)])
    checkpoint.save(restored.save)
    assert checkpoint.written == 1
    assert len(restored.next_groups()) == 2502
    checkpoint.save(restored.save)
    assert len(checkpoint.keys("grouping/Group")) == 6
    assert restored.next_groups() == []
    checkpoint.save(restored.save)
    assert len(checkpoint.keys("grouping/Group")) == 1  # that it is exhausted
    assert restored.ledger.used == 0
    again = _Bench(_PLANS[0], tmp_path)
    again.restore(checkpoint)
    assert again.buffer.watermark() == MAX
    assert not again.buffer.pump(0)
    bench.release()


def test_input_of_a_run_that_is_not_saved_is_not_kept(tmp_path: Path) -> None:
    bench = _Bench(_PLANS[0], tmp_path, is_saved=False)
    bench.add([("a", 1)])
    bench.absorb()
    assert bench.ledger.used == bench.grouping.table.memory_bytes


def test_input_that_is_kept_for_a_restart_is_spilled_first(tmp_path: Path) -> None:
    bench = _Bench(_PLANS[0], tmp_path, limit=1 << 20)
    policy = SpillPolicy(bench.blocks, StateStore(str(tmp_path), bench.ledger), [])
    policy.groupings.append(bench.grouping)
    block = bench.blocks.of_bytes(bench.block([("a", 9)]).data() * 20_000, 20_000, 0)
    bench.buffer.deliver(block)
    with mock.patch.object(bench.grouping.table, "add_all"):
        bench.absorb()
    table = bench.grouping.table
    table.add_all([(b"a", bytes(600_000))])
    policy.check()
    assert block.content.file is not None
    assert table.memory_bytes > 600_000


def test_a_side_input_goes_on_from_a_checkpoint(tmp_path: Path) -> None:
    of, checkpoint = _PLANS[0], Checkpoint()
    bench = _Bench(of, tmp_path)
    bench.buffer.grouping = None
    bench.buffer.side_input = SideInputData(of.written, str(tmp_path), bench.ledger)
    for number in range(3):
        bench.add([(str(number), number)])
        checkpoint.save(bench.save)
        assert checkpoint.written == 1
    restored = _Bench(of, tmp_path)
    restored.buffer.grouping = None
    restored.buffer.side_input = SideInputData(of.written, str(tmp_path), restored.ledger)
    restored.restore(checkpoint)
    assert list(restored.buffer.side_input_data()) == list(bench.buffer.side_input_data())
    restored.add([("more", 1)])
    checkpoint.save(restored.save)
    assert len(checkpoint.keys("side/Group")) == 4
    restored.release()
    bench.release()
