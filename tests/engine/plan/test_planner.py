"""Tests of the planner: where fusion breaks, and what stages read and write there."""

from __future__ import annotations

from collections.abc import Callable
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.pvalue import AsList
from apache_beam.testing.test_stream import TestStream
from apache_beam.transforms import trigger
from apache_beam.transforms.userstate import BagStateSpec
from apache_beam.transforms.window import FixedWindows

from luminosity import LuminosityRunner
from luminosity.engine.plan.codecs import Codecs
from luminosity.engine.plan.graph import BufferKind, Graph, Stage
from luminosity.engine.plan.planner import plan
from luminosity.runs.run_ids import AT_INTERVALS

_STATE = beam.DoFn.StateParam(BagStateSpec("s", beam.coders.VarIntCoder()))


class Stateful(beam.DoFn):
    def process(self, element: Any, state: Any = _STATE) -> Any:
        yield element


def planned(build: Callable[[beam.Pipeline], Any], *flags: str) -> Graph:
    pipeline = beam.Pipeline(options=PipelineOptions(list(flags)))
    build(pipeline)
    environment = LuminosityRunner().default_environment(PipelineOptions([]))
    return plan(pipeline.to_runner_api(default_environment=environment))


def stage_with(graph: Graph, step: str) -> Stage:
    (stage,) = [s for s in graph.stages if any(step in name for name in s.steps)]
    return stage


def test_steps_without_a_reason_to_part_are_one_stage() -> None:
    graph = planned(lambda p: p | beam.Impulse() | "A" >> beam.Map(id) | "B" >> beam.Map(id))
    assert stage_with(graph, "A") is stage_with(graph, "B")


def test_a_reshuffle_is_a_queue() -> None:
    graph = planned(lambda p: p | beam.Impulse() | "A" >> beam.Map(id) | beam.Reshuffle() | "B" >> beam.Map(id))
    (write,) = stage_with(graph, "A").writes
    (read,) = stage_with(graph, "B").reads
    assert write.buffer_id == read.buffer_id
    assert graph.buffers[read.buffer_id].kind is BufferKind.QUEUE
    assert not [b for b in graph.buffers.values() if b.kind is BufferKind.GROUP]


def test_what_leads_to_a_patient_reshuffle_alone_is_in_no_hurry() -> None:
    def build(pipeline: beam.Pipeline) -> None:
        keyed = pipeline | beam.Create([(1, 1)]) | "Uphill" >> beam.Map(lambda pair: pair)
        patient = keyed | "Patient" >> beam.ParDo(Stateful()) | AT_INTERVALS >> beam.Reshuffle()
        _ = patient | "Behind" >> beam.Map(id)
        keyed = pipeline | "Others" >> beam.Create([(1, 1)]) | "Beside" >> beam.Map(lambda pair: pair)
        soon = keyed | "Soon" >> beam.ParDo(Stateful()) | beam.Reshuffle()
        both = {"soon": soon, "late": soon | "D" >> beam.Map(id) | f"Last/{AT_INTERVALS}" >> beam.Reshuffle()}
        _ = [each | f"End {name}" >> beam.Map(id) for name, each in both.items()]

    graph = planned(build)
    names = {
        name: graph.waits_at_intervals(stage_with(graph, name))
        for name in ("Uphill", "Patient", "Behind", "Beside", "Soon")
    }
    assert names == {"Uphill": True, "Patient": True, "Behind": False, "Beside": False, "Soon": False}
    assert sum(buffer.is_patient for buffer in graph.buffers.values()) == 2


def test_a_hint_parts_stages() -> None:
    graph = planned(
        lambda p: (
            p
            | beam.Impulse()
            | "A" >> beam.Map(id)
            | "B" >> beam.Map(id).with_resource_hints(min_ram="1GB")
            | "C" >> beam.Map(id)
        )
    )
    environments = [stage_with(graph, name).environment_id for name in "ABC"]
    assert environments[0] == environments[2] != environments[1]


def test_a_stateful_step_begins_a_stage() -> None:
    graph = planned(lambda p: p | beam.Create([(1, 1)]) | "A" >> beam.Map(lambda x: x) | "S" >> beam.ParDo(Stateful()))
    assert stage_with(graph, "S") is not stage_with(graph, "A")
    assert stage_with(graph, "S").is_stateful
    assert not stage_with(graph, "A").is_stateful


def test_two_pools_read_one_buffer_and_neither_copies_for_the_other() -> None:
    def build(p: beam.Pipeline) -> None:
        moved = p | beam.Impulse() | "A" >> beam.Map(id) | beam.Reshuffle()
        _ = moved | "B" >> beam.Map(id)
        _ = moved | "C" >> beam.Map(id).with_resource_hints(min_ram="1GB")

    graph = planned(build)
    reads = {stage_with(graph, name).reads[0].buffer_id for name in "BC"}
    assert len(reads) == 1
    assert not stage_with(graph, "B").writes
    assert not stage_with(graph, "C").writes


def test_a_flatten_before_a_group_writes_into_the_group() -> None:
    def build(p: beam.Pipeline) -> None:
        keyed = [p | f"Create{n}" >> beam.Create([(n, n)]) | f"M{n}" >> beam.Map(lambda kv: kv) for n in (1, 2)]
        _ = keyed | beam.Flatten() | beam.GroupByKey() | "Out" >> beam.Map(id)

    graph = planned(build)
    (read,) = stage_with(graph, "Out").reads
    assert graph.buffers[read.buffer_id].kind is BufferKind.GROUP
    for name in ("M1", "M2"):
        assert [w.buffer_id for w in stage_with(graph, name).writes] == [read.buffer_id]


def test_writers_come_before_readers() -> None:
    def build(p: beam.Pipeline) -> None:
        side = p | "Side" >> beam.Create([1]) | "ToSide" >> beam.Map(id)
        main = p | "Main" >> beam.Create([(1, 2)]) | "First" >> beam.GroupByKey()
        _ = main | "Use" >> beam.Map(lambda x, s: x, AsList(side)) | beam.GroupByKey() | "End" >> beam.Map(id)

    graph = planned(build)
    written: set[bytes] = set()
    total = {w.buffer_id for s in graph.stages for w in s.writes}
    for stage in graph.stages:
        for source in (*stage.reads, *stage.side_inputs):
            assert source.buffer_id in written or source.buffer_id not in total
        written |= {w.buffer_id for w in stage.writes}


def test_a_sink_that_writes_a_file_per_bundle_has_its_own_queue(tmp_path: Path) -> None:
    graph = planned(
        lambda p: p | beam.Impulse() | "A" >> beam.Map(str) | "B" >> beam.io.WriteToText(str(tmp_path / "out"))
    )
    (read, *_) = stage_with(graph, "WriteBundles").reads
    assert stage_with(graph, "WriteBundles").is_sink
    assert read.buffer_id in {write.buffer_id for write in stage_with(graph, "A").writes}


def test_a_sink_with_a_fixed_number_of_files_has_no_queue_before_its_keys(tmp_path: Path) -> None:
    write = beam.io.WriteToText(str(tmp_path / "out"), num_shards=2)
    graph = planned(lambda p: p | beam.Impulse() | "A" >> beam.Map(str) | "B" >> write)
    assert stage_with(graph, "A") is stage_with(graph, "WriteImpl/WindowInto")


@pytest.mark.parametrize(
    ("early", "is_combined_first"),
    [
        (None, True),
        (trigger.AfterProcessingTime(5), True),
        (trigger.AfterCount(1), True),
        (trigger.AfterCount(2), False),
    ],
)
def test_combining_begins_before_the_grouping_unless_a_trigger_counts(early: Any, is_combined_first: bool) -> None:
    def build(pipeline: beam.Pipeline) -> None:
        windows = beam.WindowInto(
            FixedWindows(10),
            trigger=trigger.AfterWatermark(early=early),
            accumulation_mode=trigger.AccumulationMode.DISCARDING,
        )
        pairs = pipeline | TestStream() | beam.Map(lambda element: element).with_output_types(tuple[str, int])
        _ = pairs | windows | "Sum" >> beam.CombinePerKey(sum)

    graph = planned(build, "--streaming")
    steps = [transform.unique_name for stage in graph.stages for transform in stage.transforms]
    assert any("Precombine" in step for step in steps) == is_combined_first
    (grouping,) = [buffer for buffer in graph.buffers.values() if buffer.kind is BufferKind.GROUP]
    windowing = Codecs(graph).windowing(grouping.pcollection_id)
    assert repr(windowing.triggerfn) == repr(trigger.AfterWatermark(early=early))
