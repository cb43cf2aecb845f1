"""Plans which groupings workers take over once their input is large, and the stages that do it.

The input of such a grouping is split by the hash of the key. Each partition is grouped by one bundle of a stage of its
own, the grouper, so that all cores group, and the runner decodes nothing.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import replace

from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.runners.worker import bundle_processor

from luminosity.engine.plan.graph import Buffer, BufferKind, Graph, Read, Stage, Write

__all__ = ["GROUP_ANNOTATION", "GROUP_URN", "grouped_id", "partition_id", "with_groupers"]

GROUP_URN = "luminosity:transform:group:v1"  # of the transform that groups a partition and writes the groups
GROUP_ANNOTATION = "luminosity:group"  # of that transform: the coders, the windowing and the memory, as JSON
_LEAST_PARTITIONS = 32  # few enough for blocks of some size; most partitions of some GB fit into a worker's memory
_MEMORY_PART = 4  # all slots of a pool together may take 1/4 of the memory budget to group in
_PER_SLOT = 4  # partitions, so that slots end together although partitions differ in size


def partition_id(buffer: Buffer) -> bytes:
    """Return the id of the buffer from which the grouper reads the partitions."""
    return b"partitions:" + buffer.id


def grouped_id(buffer: Buffer) -> bytes:
    """Return the id of the buffer to which the grouper writes groups."""
    return b"grouped:" + buffer.id


def with_groupers(graph: Graph, slots: Mapping[str, int]) -> tuple[Graph, dict[str, str]]:
    """Return the plan with a grouper for each grouping that can be split, and the stage whose pool each grouper shares.

    ``slots`` are those of the pools of CPU stages, by stage id. All other groupings stay in the runner: those of
    unbounded input or without a stage on the CPU, and those that are side inputs, which the runner serves.
    """
    as_side_inputs = {side_input.buffer_id for stage in graph.stages for side_input in stage.side_inputs}
    buffers = dict(graph.buffers)
    groupers: list[Stage] = []
    places: dict[str, str] = {}
    for buffer in graph.buffers.values():
        if buffer.kind is not BufferKind.GROUP or buffer.is_unbounded or buffer.id in as_side_inputs:
            continue
        writers = [s for s in graph.stages if any(write.buffer_id == buffer.id for write in s.writes)]
        readers = [s for s in graph.stages if any(read.buffer_id == buffer.id for read in s.reads)]
        stage = next((stage for stage in (*writers, *readers) if stage.id in slots), None)
        if stage is None or not readers:
            continue
        partitions = max(_LEAST_PARTITIONS, _PER_SLOT * slots[stage.id])
        buffers[buffer.id] = replace(buffer, partitions=partitions)
        grouper = _grouper(f"g{len(groupers)}", buffer, partitions, stage, slots[stage.id], graph)
        places[grouper.id] = stage.id
        groupers.append(grouper)
    return replace(graph, buffers=buffers, groupers=tuple(groupers)), places


def _grouper(number: str, buffer: Buffer, partitions: int, beside: Stage, slots: int, graph: Graph) -> Stage:
    read, write = f"{buffer.step}/Partition", f"{buffer.step}/Grouped"
    annotation = {
        "written": buffer.coder_id,
        "read": buffer.output_coder_id,
        "pcollection": buffer.pcollection_id,
        "safe_coders": graph.safe_coders,
        "memory_part": _MEMORY_PART * slots,
    }
    transforms = (
        beam_runner_api_pb2.PTransform(
            unique_name=read,
            outputs={"out": buffer.pcollection_id},
            spec=beam_runner_api_pb2.FunctionSpec(urn=bundle_processor.DATA_INPUT_URN),
        ),
        beam_runner_api_pb2.PTransform(
            unique_name=write,
            inputs={"in": buffer.pcollection_id},
            spec=beam_runner_api_pb2.FunctionSpec(urn=GROUP_URN),
            annotations={GROUP_ANNOTATION: json.dumps(annotation).encode()},
        ),
    )
    return Stage(
        id=number,
        label=buffer.step,
        steps=(buffer.step,),
        environment_id=beside.environment_id,
        reads=(Read(read, partition_id(buffer), buffer.coder_id),),
        writes=(Write(write, grouped_id(buffer), buffer.output_coder_id),),
        transforms=transforms,
        partitions=partitions,
        memory_part=_MEMORY_PART * slots,
    )
