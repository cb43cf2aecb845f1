"""What the loop runs: stages that read and write buffers."""

from __future__ import annotations

from dataclasses import dataclass, field
from enum import Enum

from apache_beam.portability.api import beam_fn_api_pb2, beam_runner_api_pb2

from luminosity.core import TEMPORARY_FOLDER


class BufferKind(Enum):
    QUEUE = "queue"  # blocks move from writers to every reader
    GROUP = "group"  # blocks are grouped by key and window on the way
    IMPULSE = "impulse"  # one element, there from the start


@dataclass(frozen=True)
class Buffer:
    """What lies between stages."""

    id: bytes
    kind: BufferKind
    coder_id: str  # of what is written
    pcollection_id: str
    output_coder_id: str = ""  # of what is read, where it differs (GROUP)


@dataclass(frozen=True)
class Read:
    transform_id: str
    buffer_id: bytes
    coder_id: str


@dataclass(frozen=True)
class Write:
    transform_id: str
    buffer_id: bytes
    coder_id: str


@dataclass(frozen=True)
class SideInput:
    """One side input of one step, and the buffer whose whole content it is."""

    transform_id: str
    tag: str
    buffer_id: bytes


@dataclass(frozen=True)
class TimerFamily:
    transform_id: str
    family_id: str
    is_processing_time: bool
    coder_id: str

    @property
    def key(self) -> tuple[str, str]:
        return self.transform_id, self.family_id


@dataclass(frozen=True)
class Stage:
    """Steps that run together in one worker, bundle by bundle."""

    id: str
    label: str
    steps: tuple[str, ...]
    environment_id: str
    reads: tuple[Read, ...]
    writes: tuple[Write, ...]
    side_inputs: tuple[SideInput, ...]
    timers: tuple[TimerFamily, ...]
    is_stateful: bool
    is_splittable: bool
    is_sink: bool  # writes a file per bundle
    sorts_its_bundle: bool  # and so wants long ones
    transforms: tuple[beam_runner_api_pb2.PTransform, ...] = field(repr=False)
    # (transform, input tag) of a residual → the read whose element it continues
    residual_reads: dict[tuple[str, str], str] = field(repr=False)


@dataclass(frozen=True)
class Graph:
    """The plan: stages in topological order and the buffers between them."""

    stages: tuple[Stage, ...]
    buffers: dict[bytes, Buffer]
    components: beam_runner_api_pb2.Components = field(repr=False)
    safe_coders: dict[str, str] = field(repr=False)

    def temporary_folders(self) -> list[str]:
        """Those of steps, which are of no use once the run has failed."""
        annotations = [transform.annotations for stage in self.stages for transform in stage.transforms]
        return [found[TEMPORARY_FOLDER].decode() for found in annotations if TEMPORARY_FOLDER in found]

    def descriptor(self, stage: Stage, url: str) -> beam_fn_api_pb2.ProcessBundleDescriptor:
        """What a worker needs to know to run ``stage`` against the services at ``url``."""
        ports = {read.transform_id: read.coder_id for read in stage.reads}
        ports |= {write.transform_id: write.coder_id for write in stage.writes}
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
            for pcollection in (*transform.inputs.values(), *transform.outputs.values()):
                descriptor.pcollections[pcollection].CopyFrom(self.components.pcollections[pcollection])
        return descriptor
