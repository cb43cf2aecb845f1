"""The groups of partitions in workers are those that the runner makes of the same elements."""

from __future__ import annotations

import tempfile
from collections import Counter
from collections.abc import Callable, Iterable
from pathlib import Path
from typing import Any
from unittest import mock

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners import pipeline_context
from apache_beam.transforms import trigger
from apache_beam.transforms.window import FixedWindows, GlobalWindows, Sessions, SlidingWindows, TimestampCombiner
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import WindowedValue
from hypothesis import given, settings
from hypothesis import strategies as st

from luminosity import LuminosityRunner
from luminosity.engine.data import wire
from luminosity.engine.data.group_rules import VALUES_LENGTH, rule_of, values_in_state
from luminosity.engine.plan.codecs import Codecs
from luminosity.engine.plan.graph import BufferKind
from luminosity.engine.plan.planner import plan
from luminosity.engine.spill import group_files
from luminosity.engine.spill.files import SpillFile
from luminosity.engine.spill.table import GroupTable
from luminosity.engine.workers.sdk import partitions
from luminosity.engine.workers.sdk.channel import BlockStream
from luminosity.engine.workers.sdk.partitions import PartitionTable, SplitOutput
from tests.runners import IS_REFERENCE

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="it tests parts of the engine")

_WINDOWS: tuple[tuple[Any, dict[str, Any]], ...] = (
    (GlobalWindows(), {}),
    (FixedWindows(10), {}),
    (FixedWindows(10), {"timestamp_combiner": TimestampCombiner.OUTPUT_AT_LATEST}),
    (SlidingWindows(20, 10), {"timestamp_combiner": TimestampCombiner.OUTPUT_AT_EARLIEST}),
    (Sessions(3), {}),
    (FixedWindows(30), {"trigger": trigger.AfterCount(2), "accumulation_mode": trigger.AccumulationMode.DISCARDING}),
)
_Elements = list[tuple[str, int]]  # key and second, which is also the length of the value


class _Plan:
    """A plan with one GroupByKey of strings by string."""

    def __init__(self, windows: Any, windowing: dict[str, Any]) -> None:
        pipeline = beam.Pipeline(options=PipelineOptions(["--allow_unsafe_triggers"]))
        _ = (
            pipeline
            | beam.Create([1])
            | beam.Map(lambda element: (str(element), "")).with_output_types(tuple[str, str])
            | beam.WindowInto(windows, **windowing)
            | beam.GroupByKey()
            | beam.Map(print)
        )
        environment = LuminosityRunner().default_environment(PipelineOptions([]))
        graph = plan(pipeline.to_runner_api(default_environment=environment))
        (buffer,) = [buffer for buffer in graph.buffers.values() if buffer.kind is BufferKind.GROUP]
        codecs = Codecs(graph)
        self.read, self.windowing = codecs.elements(buffer.output_coder_id), codecs.windowing(buffer.pcollection_id)
        self.rule = rule_of(codecs.elements(buffer.coder_id), self.read, self.windowing)
        self.coder: Any = pipeline_context.PipelineContext(graph.components).coders[buffer.coder_id]

    def elements(self, elements: _Elements) -> list[WindowedValue]:
        assign = self.windowing.windowfn
        return [
            WindowedValue(
                (key, str(at % 10) * at), Timestamp(at), tuple(assign.assign(assign.AssignContext(Timestamp(at))))
            )
            for key, at in elements
        ]


class _Worker:
    """What a table needs of its worker."""

    def __init__(self, folder: str, memory_budget: int) -> None:
        self._folder = folder
        self.memory_budget = memory_budget
        self.files: list[SpillFile] = []

    def new_file(self) -> SpillFile:
        self.files.append(SpillFile(self._folder, name=f"w1.{len(self.files)}.groups"))
        return self.files[-1]


class _Output:
    """Collects what a bundle sends."""

    def __init__(self, worker: _Worker) -> None:
        self.messages: list[bytes] = []
        self.stream = BlockStream(self._send, lambda: None)
        self.stream.splits = True
        self.stream.writer = worker

    def _send(self, count: int, *parts: bytes, wrap: Callable[[bytes], bytes] | None = None) -> None:
        message = wire.pack_bytes(count, b"".join(parts))
        self.messages.append(message if wrap is None else wrap(message))


class _Memory:
    def hold(self, size: int) -> None: ...
    def free(self, size: int) -> None: ...
    def add_spilled(self, size: int) -> None: ...


def _expected(of: _Plan, elements: Iterable[WindowedValue], folder: str) -> Counter[tuple[bytes, bytes]]:
    """Return the groups of one table: how each begins, and its values."""
    table = GroupTable(lambda: SpillFile(folder), _Memory(), of.rule.combine_times)
    impl = of.coder.get_impl()
    of.rule.add(table, b"".join(map(impl.encode_nested, elements)))
    groups = (group for entry in table.take() for group in of.rule.groups(entry))
    return Counter((group.start, b"".join(chunk.read() for chunk in group.chunks)) for group in groups)


def _groups(of: _Plan, messages: Iterable[bytes], worker: _Worker) -> Iterable[tuple[bytes, bytes]]:
    """Return the same of the groups that a bundle has sent."""
    for message in messages:
        _, token, value_bytes, rest = wire.unwrap(message)
        count, data = wire.unpack(rest)
        assert isinstance(data, bytes)
        if token:
            (file,) = worker.files
            values = b"".join(chunk.read() for chunk in group_files.chunks_of(token, file))
            assert (count, len(values)) == (1, value_bytes)
            yield data.removesuffix(values_in_state(token)), values
            continue
        for header, value in of.read.elements(data):
            key, values = of.read.key_and_value(value)
            yield of.read.encode_header(header) + key, values[VALUES_LENGTH.size :]


@settings(deadline=None, max_examples=60)
@given(
    elements=st.lists(st.tuples(st.sampled_from(["a", "b", "", "long" * 9]), st.integers(0, 60)), max_size=60),
    of=st.sampled_from([_Plan(*each) for each in _WINDOWS]),
    number=st.sampled_from([1, 7, 32]),
    memory=st.sampled_from([1, 2000, 1 << 30]),
    inline=st.sampled_from([0, 50, 1 << 20]),
)
def test_partitions_give_the_groups_of_one_table(
    elements: _Elements, of: _Plan, number: int, memory: int, inline: int
) -> None:
    windowed = of.elements(elements)
    found: Counter[tuple[bytes, bytes]] = Counter()
    with tempfile.TemporaryDirectory() as folder:
        split = _Output(_Worker(folder, memory))
        output = SplitOutput.of(of.coder, split.stream, number)
        assert output is not None
        for each in windowed:
            output.add(each)
        output.flush()
        for index in range(number):
            worker = _Worker(folder, memory)
            grouped = _Output(worker)
            with mock.patch.multiple(partitions, _LEAST_MEMORY=1, _INLINE_BYTES=inline):
                table = PartitionTable(of.rule, grouped.stream, 1)
                for message in split.messages:
                    if wire.unwrap(message)[0] == index:
                        table.add(wire.read(message))
                table.send()
                found.update(_groups(of, grouped.messages, worker))
                table.close()
            for file in worker.files:
                Path(file.path).unlink(missing_ok=True)
        assert found == _expected(of, windowed, folder)


def test_a_bundle_that_fails_leaves_no_file(tmp_path: Path) -> None:
    of, worker = _Plan(GlobalWindows(), {}), _Worker(str(tmp_path), 1)
    table = PartitionTable(of.rule, _Output(worker).stream, 1)
    impl = of.coder.get_impl()
    for _ in range(3):
        table.add(b"".join(map(impl.encode_nested, of.elements([("a", 60)] * 1000))))
    assert [path.name for path in tmp_path.iterdir()] == ["w1.0.groups"]
    table.close()
    assert not list(tmp_path.iterdir())


def test_output_is_not_split_unless_the_bundle_is_told_to() -> None:
    of, stream = _Plan(GlobalWindows(), {}), BlockStream(lambda *_: None, lambda: None)
    assert SplitOutput.of(of.coder, stream, 7) is None
    stream.splits = True
    assert SplitOutput.of(of.coder, stream, 0) is None
    assert SplitOutput.of(of.coder, stream, 7) is not None
