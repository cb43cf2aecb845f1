"""The events of a run, and what its first event knows of stages, pools, models and the machine."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Literal

from luminosity.events.views import (
    CheckpointView,
    DeviceView,
    MemoryUse,
    MetricView,
    NodeView,
    PoolView,
    ProcessMemory,
    StageView,
    StallView,
    WorkerView,
)

__all__ = [
    "BundleRetried",
    "BundleStalled",
    "CheckpointDone",
    "DeviceInfo",
    "Event",
    "LogMessage",
    "MachineInfo",
    "ModelLoaded",
    "ModelVersion",
    "NodeChanged",
    "NodeInfo",
    "PoolInfo",
    "Resources",
    "RunEnded",
    "RunStarted",
    "Snapshot",
    "StageInfo",
    "Subscriber",
    "TransformInfo",
    "WorkerEnded",
    "WorkerLost",
    "WorkerStarted",
]


@dataclass(frozen=True)
class Resources:
    """What resource hints ask for. An empty field asks for nothing."""

    ram: int = 0  # bytes, with the hint min_ram
    cores: float = 0.0  # with the hint cpu_count
    accelerator: str = ""  # such as "type:nvidia-tesla-t4;count:1"


@dataclass(frozen=True)
class StageInfo:
    """A stage: fused steps, which run together in one worker."""

    id: str
    label: str  # unique within the run
    pool: str
    reads_from: tuple[str, ...] = ()  # ids of stages
    side_inputs_from: tuple[str, ...] = ()
    is_stream: bool = False  # whether its input may never end
    steps: tuple[str, ...] = ()  # whole names of the pipeline's steps in it, in order
    asked: Resources = Resources()  # what the resource hints of its steps ask for
    reads_groups: bool = False  # of a GroupByKey: in a batch, it starts when the stages that it reads from are done


@dataclass(frozen=True)
class TransformInfo:
    """A transform as the author applied it: a step, or a composite of others."""

    name: str  # within its composite: the whole name is the composite's, a slash, and this one
    inside: int = -1  # the place of its composite in the list of all transforms; -1: it is in none
    reads_from: tuple[int, ...] = ()  # this and the following: places of the steps that make the inputs of a step
    side_inputs_from: tuple[int, ...] = ()
    # A step that moves elements between workers may run in no stage.
    moves: Literal["reshuffle", "group", "flatten", ""] = ""


@dataclass(frozen=True)
class PoolInfo:
    """A pool: worker processes with the same resources."""

    name: str
    workers: int  # at most
    slots: int  # bundles that one worker runs at once
    devices: tuple[str, ...] = ()
    cores_per_worker: float = 0.0  # this and the following: a worker's share of the machine; 0 if not known
    ram_per_worker: int = 0
    asked: Resources = Resources()  # what the resource hints of its steps ask for
    python: str = ""  # the folder of its Python environment, if it has its own


@dataclass(frozen=True)
class DeviceInfo:
    """An accelerator of the machine."""

    id: str  # such as gpu:0
    name: str = ""  # as its driver names it, such as "Tesla T4"
    memory: int = 0  # bytes; 0 if not known


@dataclass(frozen=True)
class NodeInfo:
    """A node of the cluster on which a run started."""

    id: str
    address: str = ""
    cores: float = 0.0
    ram: int = 0  # bytes
    accelerators: float = 0.0
    accelerator_type: str = ""
    object_store: int = 0  # bytes
    is_driver: bool = False  # whether the process that runs the pipeline is there


@dataclass(frozen=True)
class MachineInfo:
    """The machine of a run, or the sum of a cluster's nodes."""

    cores: int = 0  # that the run may use
    ram: int = 0  # bytes that the run may use
    devices: tuple[DeviceInfo, ...] = ()
    nodes: tuple[NodeInfo, ...] = ()  # of the cluster; empty on one machine


@dataclass(frozen=True)
class ModelVersion:
    """The version of a registered model that a step starts with."""

    step: str
    name: str  # as the handler names it, such as models:/sentiment@champion
    version: str
    path: str  # where the registry keeps its files
    digest: str = ""  # empty if it is not known before a worker has loaded the model


@dataclass(frozen=True)
class Event:
    """The base class of all events."""

    run: str  # the run's id
    seconds: float  # since the run started


@dataclass(frozen=True)
class RunStarted(Event):
    """The first event of a run: its plan."""

    name: str  # of the script
    started_at: float  # seconds since 1970
    stages: tuple[StageInfo, ...]  # writers before readers
    pools: tuple[PoolInfo, ...]
    queue_limit: int  # bytes in a queue at which its writers are held back
    memory_limit: int = 0
    checkpoint_dir: str = ""  # the folder in which the run keeps itself, if it does
    models: tuple[ModelVersion, ...] = ()  # those that a registry names
    machine: MachineInfo = MachineInfo()
    version: str = ""  # of Luminosity
    pools_mode: str = ""  # --pools: hints, uniform or fitted
    job: str = ""  # --job_name, if it was given
    folder: str = ""  # of the script; empty in records of older versions
    transforms: tuple[TransformInfo, ...] = ()  # as the author applied them, composites before their parts
    arguments: tuple[str, ...] = ()  # of the command, without the values of secrets
    user: str = ""  # who started it

    @property
    def title(self) -> str:
        """The name of the job, or else of the script."""
        return self.job or self.name

    @property
    def pipeline(self) -> tuple[str, str]:
        """What tells its pipeline from others: the job and nothing else, or else the script's name and its folder."""
        return (self.job, "") if self.job else (self.name, self.folder)


@dataclass(frozen=True)
class Snapshot(Event):
    """The state of a run at one moment, about five times a second."""

    stages: tuple[StageView, ...]
    pools: tuple[PoolView, ...]
    devices: tuple[DeviceView, ...] = ()
    memory: MemoryUse = MemoryUse()
    processes: ProcessMemory = ProcessMemory()
    # Estimated: the largest of all stages for which it is known. None while a stage is stalled.
    seconds_left: float | None = None
    workers: tuple[WorkerView, ...] = ()
    checkpoint: CheckpointView | None = None  # of a durable run
    metrics: tuple[MetricView, ...] = ()  # of user code so far; only in some snapshots, since it changes slowly
    nodes: tuple[NodeView, ...] = ()  # of the cluster that the run uses; empty on one machine


@dataclass(frozen=True)
class WorkerStarted(Event):
    """A worker process has started."""

    worker: str
    pool: str
    pid: int  # 0 on a cluster
    devices: tuple[str, ...] = ()
    node: str = ""  # the id of its node; empty on one machine


@dataclass(frozen=True)
class WorkerLost(Event):
    """A worker process has ended before the run did."""

    worker: str
    pool: str
    reason: str
    bundles: int  # that ran there and are run again
    lifetime_seconds: float = 0.0  # this and the following two: as in ``WorkerEnded``, up to the last sample
    cpu_seconds: float = 0.0
    peak_resident: int = 0
    node: str = ""  # the id of its node; empty on one machine


@dataclass(frozen=True)
class WorkerEnded(Event):
    """A worker process has ended as it should, because the run is over."""

    worker: str
    pool: str
    lifetime_seconds: float = 0.0  # from its start to its end
    cpu_seconds: float = 0.0
    peak_resident: int = 0  # bytes


@dataclass(frozen=True)
class NodeChanged(Event):
    """The run uses a node of the cluster from now on, or not any more."""

    node: str  # its id
    address: str  # the name of its host, if it is known
    change: Literal["came", "went"]  # also a node that was lost, and is back, came


@dataclass(frozen=True)
class BundleRetried(Event):
    """User code raised an exception, and the bundle is retried."""

    step: str
    exception: str  # in one line
    tries: int  # attempts so far
    elements: int
    traceback: str = ""  # whole, but bounded; without the element, which is data
    place: str = ""  # the user's own file and line, such as pipeline.py:12


@dataclass(frozen=True)
class BundleStalled(Event):
    """A bundle does nothing any more. Comes again each time that this has lasted twice as long."""

    message: str  # which step, for how long, and in which worker
    stall: StallView
    traceback: str = ""  # the worker's stack, from the user's code on; without values


@dataclass(frozen=True)
class ModelLoaded(Event):
    """A worker has loaded a model."""

    step: str
    model: str
    worker: str = ""
    device: str = ""
    load_seconds: float = 0.0
    model_bytes: int = 0


@dataclass(frozen=True)
class LogMessage(Event):
    """A warning or an error that code in a worker or in this process has logged.

    Messages of one place with the same text are counted, not repeated. If a place logs very many different ones, an
    event says how many are left out.
    """

    level: Literal["warning", "error", "critical"]
    message: str  # bounded
    logger: str = ""
    worker: str = ""  # empty: the process that started the run
    step: str = ""
    count: int = 1  # of equal messages since the last event about them
    traceback: str = ""
    left_out: int = 0  # further messages that the event stands for; 0: the event is a message itself


@dataclass(frozen=True)
class CheckpointDone(Event):
    """A checkpoint of a durable run is complete. Reported at most once a second."""

    number: int
    checkpoint_seconds: float
    folder_bytes: int = 0


@dataclass(frozen=True)
class RunEnded(Event):
    """The last event of a run: how it ended."""

    state: Literal["done", "failed", "cancelled", "stopped", "drained"]  # the last two: with a checkpoint
    last: Snapshot  # the state at the end
    failure: str = ""  # in one line
    metrics: tuple[MetricView, ...] = ()  # of user code, by step
    metrics_left_out: int = 0  # beyond the most that an event holds
    traceback: str = ""  # this and the following: of user code that failed the run
    place: str = ""  # the user's own file and line
    step: str = ""
    element: str = ""  # at which it failed, cut to a few words


Subscriber = Callable[[Event], None]
"""A function that gets every event of a run, in order, on a thread of its own."""
