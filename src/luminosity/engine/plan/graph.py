"""The plan as data: stages that read and write buffers."""

from __future__ import annotations

import json
from collections.abc import Callable
from dataclasses import dataclass, field
from enum import Enum

from apache_beam.portability.api import beam_fn_api_pb2, beam_runner_api_pb2

from luminosity.core import MODEL_VERSIONS, TEMPORARY_FOLDER
from luminosity.events import ModelVersion

__all__ = [
    "PARTITIONS",
    "Buffer",
    "BufferKind",
    "Graph",
    "Read",
    "SideInput",
    "Stage",
    "TestStream",
    "TimerFamily",
    "Write",
    "may_never_end",
]


PARTITIONS = "luminosity:partitions"  # the annotation of an output that a worker may split by key: into how many


def may_never_end(pcollection_id: str, components: beam_runner_api_pb2.Components) -> bool:
    """Return whether a PCollection may never end."""
    return components.pcollections[pcollection_id].is_bounded == beam_runner_api_pb2.IsBounded.UNBOUNDED


class BufferKind(Enum):
    """The kinds of buffers."""

    QUEUE = "queue"  # blocks move from writers to every reader
    GROUP = "group"  # blocks are grouped by key and window on the way
    IMPULSE = "impulse"  # one element, there when the run starts


@dataclass(frozen=True)
class Buffer:
    """A store of elements between stages."""

    id: bytes
    kind: BufferKind
    coder_id: str  # of the elements written
    pcollection_id: str
    output_coder_id: str = ""  # of the elements read, if it differs (GROUP)
    is_unbounded: bool = False  # whether its input may never end
    step: str = ""  # the name of the GroupByKey (GROUP)
    is_stable: bool = False  # whether it is a Reshuffle: its readers get the same elements again after a restart
    is_patient: bool = False  # whether it waits for the next regular checkpoint, if it is stable
    partitions: int = (
        0  # into which workers split and group its input once it is large; 0: the runner groups it (GROUP)
    )


@dataclass(frozen=True)
class Read:
    """A stage's read from a buffer: the transform that reads, and the coder of the elements."""

    transform_id: str
    buffer_id: bytes
    coder_id: str


@dataclass(frozen=True)
class Write:
    """A stage's write to a buffer: the transform that writes, and the coder of the elements."""

    transform_id: str
    buffer_id: bytes
    coder_id: str


@dataclass(frozen=True)
class SideInput:
    """One side input of one step: the whole content of a buffer."""

    transform_id: str
    tag: str
    buffer_id: bytes
    is_unbounded: bool = False  # whether it may never be complete, so that it is read window by window
    is_singleton: bool = False  # read with AsSingleton; known for unbounded ones alone


@dataclass(frozen=True)
class TimerFamily:
    """The timers of one name in one step."""

    transform_id: str
    family_id: str
    is_processing_time: bool
    coder_id: str

    @property
    def key(self) -> tuple[str, str]:
        """The ids of the step and of the family, as Fn API messages name them."""
        return self.transform_id, self.family_id


@dataclass(frozen=True)
class Stage:
    """Fused steps, which run together in one worker, bundle by bundle."""

    id: str
    label: str
    steps: tuple[str, ...]
    environment_id: str
    reads: tuple[Read, ...]
    writes: tuple[Write, ...]
    side_inputs: tuple[SideInput, ...] = ()
    timers: tuple[TimerFamily, ...] = ()
    is_stateful: bool = False
    is_splittable: bool = False
    is_unbounded: bool = False  # a splittable step without end
    can_cut_elements: bool = False  # whether a splittable step may be split within an element
    is_sink: bool = False  # writes a file per bundle
    sorts_its_bundle: bool = False  # works better on long bundles
    sorts_blocks: bool = False  # its elements are blocks of rows
    transforms: tuple[beam_runner_api_pb2.PTransform, ...] = field(default=(), repr=False)
    # (transform, input tag) of a residual → the read whose element it continues
    residual_reads: dict[tuple[str, str], str] = field(default_factory=dict[tuple[str, str], str], repr=False)
    is_source: bool = False  # a splittable step makes an endless output of bounded input, and may wait for each element
    has_endless_input: bool = False  # whether its input, or the output of its splittable step, may never end
    partitions: int = 0  # of a grouping: it groups each as one bundle, once the input is complete; 0: it has steps
    memory_part: int = 0  # such a bundle groups in 1/this of the memory budget before it writes to disk


@dataclass(frozen=True)
class TestStream:
    """A source whose elements, watermarks and processing times are listed in the pipeline, for tests."""

    name: str
    payload: beam_runner_api_pb2.TestStreamPayload = field(repr=False)
    outputs: dict[str, tuple[bytes, str]]  # tag → buffer and the coder of its elements


@dataclass(frozen=True)
class Graph:
    """The plan: stages in topological order and the buffers between them."""

    stages: tuple[Stage, ...]
    buffers: dict[bytes, Buffer]
    components: beam_runner_api_pb2.Components = field(repr=False)
    safe_coders: dict[str, str] = field(repr=False)
    test_streams: tuple[TestStream, ...] = ()
    groupers: tuple[Stage, ...] = ()  # one for each buffer with partitions, which have bundles if its input is large

    def split_buffers(self) -> list[Buffer]:
        """Return the buffers that workers may group, in the order of their groupers."""
        return [buffer for buffer in self.buffers.values() if buffer.partitions]

    def temporary_folders(self) -> list[str]:
        """Return the temporary folders of steps, to be removed if the run fails."""
        annotations = [transform.annotations for stage in self.stages for transform in stage.transforms]
        return [found[TEMPORARY_FOLDER].decode() for found in annotations if TEMPORARY_FOLDER in found]

    def waits_at_intervals(self, stage: Stage) -> bool:
        """Return whether all that a stage does waits for a regular checkpoint, at once or behind further stages."""
        taken = {pcollection for transform in stage.transforms for pcollection in transform.inputs.values()}
        has_ends = any(
            transform.unique_name not in {write.transform_id for write in stage.writes}
            and taken.isdisjoint(transform.outputs.values())
            for transform in stage.transforms
        )
        return not has_ends and all(
            self.buffers[write.buffer_id].is_patient or self._all_readers(write.buffer_id, self.waits_at_intervals)
            for write in stage.writes
        )

    def _all_readers(self, buffer_id: bytes, holds: Callable[[Stage], bool]) -> bool:
        readers = [stage for stage in self.stages if any(read.buffer_id == buffer_id for read in stage.reads)]
        return bool(readers) and all(map(holds, readers))

    def model_versions(self) -> tuple[ModelVersion, ...]:
        """Return the versions of registered models with which steps start."""
        found: dict[ModelVersion, None] = {}  # in the order of the steps
        for stage in self.stages:
            for transform in stage.transforms:
                annotation = transform.annotations.get(MODEL_VERSIONS)
                for fields in json.loads(annotation) if annotation else ():
                    found[ModelVersion(step=transform.unique_name, **fields)] = None
        return tuple(found)

    def descriptor(self, stage: Stage, url: str) -> beam_fn_api_pb2.ProcessBundleDescriptor:
        """Return the descriptor with which a worker runs ``stage``, using the Fn API services at ``url``."""
        ports = {read.transform_id: read.coder_id for read in stage.reads}
        ports |= {write.transform_id: write.coder_id for write in stage.writes}
        buffers = {write.transform_id: self.buffers.get(write.buffer_id) for write in stage.writes}
        split = {name: buffer.partitions for name, buffer in buffers.items() if buffer is not None}
        descriptor = beam_fn_api_pb2.ProcessBundleDescriptor(
            id=stage.id,
            coders=dict(self.components.coders.items()),
            windowing_strategies=dict(self.components.windowing_strategies.items()),
            environments=dict(self.components.environments.items()),
        )
        descriptor.state_api_service_descriptor.url = url
        descriptor.timer_api_service_descriptor.url = url
        for transform in stage.transforms:
            descriptor.transforms[transform.unique_name].CopyFrom(transform)
            if transform.unique_name in ports:
                port = beam_fn_api_pb2.RemoteGrpcPort(coder_id=ports[transform.unique_name])
                port.api_service_descriptor.url = url
                descriptor.transforms[transform.unique_name].spec.payload = port.SerializeToString()
            if partitions := split.get(transform.unique_name):
                descriptor.transforms[transform.unique_name].annotations[PARTITIONS] = b"%d" % partitions
            for pcollection in (*transform.inputs.values(), *transform.outputs.values()):
                descriptor.pcollections[pcollection].CopyFrom(self.components.pcollections[pcollection])
        return descriptor
