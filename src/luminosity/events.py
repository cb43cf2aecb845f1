"""The events of a run, as plain data: one stream for all views, records and subscribers.

The first event of a run is :class:`RunStarted`, the last one :class:`RunEnded`. About five times a second a
:class:`Snapshot` reports the state of all stages and pools. Events can be turned into JSON and back.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

from luminosity.errors import RecordError

__all__ = [
    "BundleRetried",
    "DeviceView",
    "Event",
    "InferenceView",
    "KafkaView",
    "MemoryUse",
    "MetricView",
    "ModelVersion",
    "PartitionLag",
    "PoolInfo",
    "PoolView",
    "ProcessMemory",
    "RunEnded",
    "RunStarted",
    "Snapshot",
    "StageInfo",
    "StageView",
    "Status",
    "StreamView",
    "Subscriber",
    "WorkerLost",
    "WorkerStarted",
    "from_json",
    "to_json",
]

Status = Literal["waiting", "starved", "held back", "needs worker", "busy", "done"]
"""The state of a stage.

- ``waiting``: it waits for a side input or a timer.
- ``starved``: it has no input at the moment.
- ``held back``: its output is not read fast enough.
- ``needs worker``: it has input, but no worker of its pool is free.
"""


@dataclass(frozen=True)
class StageInfo:
    """A stage: fused steps, which run together in one worker."""

    id: str
    label: str  # unique within the run
    pool: str
    reads_from: tuple[str, ...] = ()  # ids of stages
    side_inputs_from: tuple[str, ...] = ()
    is_stream: bool = False  # whether its input may never end


@dataclass(frozen=True)
class PoolInfo:
    """A pool: worker processes with the same resources."""

    name: str
    workers: int  # at most
    slots: int  # bundles that one worker runs at once
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class ModelVersion:
    """The version of a registered model that a step starts with."""

    step: str
    name: str  # as the handler names it, such as models:/sentiment@champion
    version: str
    path: str  # where the registry keeps its files
    digest: str = ""  # empty if it is not known before a worker has loaded the model


@dataclass(frozen=True)
class InferenceView:
    """The progress of a step that runs a model: sums over its committed bundles.

    The step reports it with the counters of :class:`luminosity.core.InferenceMetrics`.
    """

    step: str
    inferences: int = 0
    batches: int = 0
    useful_cost: int = 0
    padded_cost: int = 0
    budget_cost: int = 0  # the greatest padded cost allowed
    queue_wait_seconds: float = 0.0  # summed over examples
    prepare_seconds: float = 0.0  # this and the following: summed over batches
    collate_seconds: float = 0.0
    transfer_seconds: float = 0.0
    compute_seconds: float = 0.0
    return_seconds: float = 0.0
    device_busy_seconds: float = 0.0
    worker_seconds: float = 0.0  # time of the pool's workers, from the stage's first bundle to its last commit
    out_of_memory: int = 0  # how often a batch did not fit into memory


@dataclass(frozen=True)
class StreamView:
    """The state of a stage of a stream, whose input may never end."""

    # Event time up to which its output is complete, in seconds since 1970; None before the first data and at the end.
    watermark: float | None = None
    behind_seconds: float | None = None  # from the watermark to now; negative if the watermark is ahead of the clock
    has_ended: bool = False  # whether the watermark has reached the end of time
    backlog: float | None = None  # work that waits at its source, in the source's unit (bytes or records), if known
    dropped_late: int = 0  # elements, once for each window, that came later than allowed


@dataclass(frozen=True)
class PartitionLag:
    """How far a reader is behind the end of a partition."""

    partition: str  # such as "reviews[0]"; with very many partitions also "of others in group 0"
    records: int  # offsets that are left


@dataclass(frozen=True)
class KafkaView:
    """The state of a step that reads or writes Kafka: sums over its committed bundles.

    Rates and times cover the last minute; in the last snapshot of a run, the whole run.
    """

    step: str
    kind: Literal["read", "write"]
    records: int = 0
    bytes: int = 0  # of keys and values
    records_per_second: float = 0.0
    bytes_per_second: float = 0.0
    dead_letters: int = 0  # records that can't be read, or that Kafka does not take
    lost: int = 0  # offsets that retention removed before they were read
    # From a record's timestamp to its reading, or from an element's event time to the moment when Kafka has its record;
    # within 15%; None if nothing had a time.
    p50_ms: float | None = None
    p99_ms: float | None = None
    lag: int = 0  # this and the following: of a read; summed over partitions
    partitions: int = 0  # of which the lag is known
    lags: tuple[PartitionLag, ...] = ()  # the largest ones that are not 0; in the last snapshot all


@dataclass(frozen=True)
class StageView:
    """The state of a stage at one moment."""

    id: str
    status: Status
    by: tuple[str, ...] = ()  # the labels of the stages, or the name of the pool, that it waits for
    elements: int = 0  # committed elements of its largest collection
    rate: float = 0.0  # elements per second, recently
    queued: int = 0  # elements in its input queues
    queued_bytes: int = 0
    running: int = 0  # bundles
    workers: int = 0  # workers that run a bundle of it
    busy_seconds: float = 0.0  # of workers; a bundle that shares its worker counts for its slot's share
    fraction: float | None = None  # the part of its work that is done, if known
    seconds_left: float | None = None  # estimated, if known
    inference: tuple[InferenceView, ...] = ()  # of its steps that run models
    stream: StreamView | None = None  # of a stage of a stream
    kafka: tuple[KafkaView, ...] = ()  # of its steps that read or write Kafka


@dataclass(frozen=True)
class PoolView:
    """The state of a pool at one moment."""

    name: str
    workers: int = 0  # that are up
    busy: int = 0  # bundles that run
    slots: int = 0  # bundles that could run if all its workers were up
    busy_seconds: float = 0.0  # summed over its workers
    busy_fraction: float = 0.0  # of the time of all its workers since the run started


@dataclass(frozen=True)
class DeviceView:
    """The state of an accelerator at one moment."""

    id: str
    busy_fraction: float = 0.0  # the part of the run's time during which its worker had a bundle
    utilization: float | None = None  # this and the following: as its driver reports it, if it does
    memory_used: int | None = None
    memory_total: int | None = None


@dataclass(frozen=True)
class MemoryUse:
    """The bytes that the engine holds between stages."""

    used: int = 0
    peak: int = 0
    limit: int = 0  # 0: no limit
    spilled: int = 0  # written to disk so far


@dataclass(frozen=True)
class ProcessMemory:
    """The memory of this process and its descendants; 0 if the system does not report it."""

    used: int = 0
    peak: int = 0


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


@dataclass(frozen=True)
class Snapshot(Event):
    """The state of a run at one moment, about five times a second."""

    stages: tuple[StageView, ...]
    pools: tuple[PoolView, ...]
    devices: tuple[DeviceView, ...] = ()
    memory: MemoryUse = MemoryUse()
    processes: ProcessMemory = ProcessMemory()
    seconds_left: float | None = None  # estimated: the largest of all stages for which it is known


@dataclass(frozen=True)
class WorkerStarted(Event):
    """A worker process has started."""

    worker: str
    pool: str
    pid: int
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class WorkerLost(Event):
    """A worker process has ended before the run did."""

    worker: str
    pool: str
    reason: str
    bundles: int  # that ran there and are run again


@dataclass(frozen=True)
class BundleRetried(Event):
    """User code raised an exception, and the bundle is retried."""

    step: str
    exception: str  # in one line
    tries: int  # attempts so far
    elements: int


@dataclass(frozen=True)
class MetricView:
    """A metric that user code counts with ``beam.metrics.Metrics``, over all committed bundles."""

    kind: Literal["counter", "distribution", "gauge"]
    step: str
    namespace: str
    name: str
    of_library: bool = False  # whether a transform of Beam or of Luminosity counts it, not your own code
    value: int = 0  # of a counter or gauge; the sum of a distribution
    count: int = 0  # this and the following: of a distribution
    min: int = 0
    max: int = 0

    @property
    def mean(self) -> float:
        """The mean of a distribution."""
        return self.value / self.count if self.count else 0.0


@dataclass(frozen=True)
class RunEnded(Event):
    """The last event of a run: how it ended."""

    state: Literal["done", "failed", "cancelled", "stopped", "drained"]  # the last two: with a checkpoint
    last: Snapshot  # the state at the end
    failure: str = ""  # in one line
    metrics: tuple[MetricView, ...] = ()  # of user code, by step
    metrics_left_out: int = 0  # beyond the most that an event holds


Subscriber = Callable[[Event], None]
"""A function that gets every event of a run, in order, on a thread of its own."""

_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (RunStarted, Snapshot, WorkerStarted, WorkerLost, BundleRetried, RunEnded)
}


def to_json(event: Event) -> dict[str, Any]:
    """Return ``event`` as a dictionary for ``json.dumps``, without the fields that have their default.

    >>> lost = WorkerLost("r1", 2.5, "w1", "cpu", "was killed by SIGKILL", bundles=1)
    >>> from_json(to_json(lost)) == lost
    True
    """
    return {"event": type(event).__name__, **_plain(event)}


def from_json(data: Any) -> Event:
    """Return the event that :func:`to_json` turned into ``data``.

    Leaves out fields that only a later version knows. Raises :class:`RecordError`, which is a ``ValueError``, for
    anything else.
    """
    try:
        content = dict(data)
        return _build(_KINDS[content.pop("event")], content)
    except (AttributeError, KeyError, TypeError) as error:
        raise RecordError(f"not an event of this version: {error!r}") from error


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        held = [(field, getattr(value, field.name)) for field in fields(value)]
        return {field.name: _plain(v) for field, v in held if v != field.default}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _build(kind: Any, data: Any) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: _build(hints[name], value) for name, value in data.items() if name in hints})
    origin = get_origin(kind)
    if origin is tuple:
        return tuple(_build(get_args(kind)[0], item) for item in data)
    allowed = get_args(kind)
    if isinstance(data, dict):
        kinds = [one for one in allowed if is_dataclass(one)]
        if kinds:
            return _build(kinds[0], data)
    if origin is Literal:
        is_fitting = data in allowed
    else:
        accepted = allowed if origin in (Union, types.UnionType) else (kind,)
        # Other JSON writers turn whole floats into integers.
        is_fitting = isinstance(data, (*accepted, int) if float in accepted else accepted)
    if not is_fitting:
        raise RecordError(f"found {data!r}, expected {kind}")
    return data


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
