"""What happens in a run, as plain data: one stream of events that every view, record and subscriber reads.

A run begins with :class:`RunStarted`, ends with :class:`RunEnded`, and shows itself about five times a second in a
:class:`Snapshot`. Everything in an event can be turned into JSON and back.
"""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import dataclass, fields, is_dataclass
from typing import Any, Literal, Union, get_args, get_origin, get_type_hints

__all__ = [
    "BundleRetried",
    "DeviceView",
    "Event",
    "InferenceView",
    "MemoryUse",
    "PoolInfo",
    "PoolView",
    "ProcessMemory",
    "RunEnded",
    "RunStarted",
    "Snapshot",
    "StageInfo",
    "StageView",
    "Status",
    "Subscriber",
    "WorkerLost",
    "WorkerStarted",
    "from_json",
    "to_json",
]

# waiting: for a side input, or for time to pass. starved: of input. held back: what it writes is not read quickly
# enough. needs worker: there is input, and no worker of its pool is free.
Status = Literal["waiting", "starved", "held back", "needs worker", "busy", "done"]


@dataclass(frozen=True)
class StageInfo:
    """Steps that run together."""

    id: str
    label: str  # no two stages of a run have the same
    pool: str
    reads_from: tuple[str, ...] = ()  # ids of stages
    side_inputs_from: tuple[str, ...] = ()


@dataclass(frozen=True)
class PoolInfo:
    """Worker processes of one kind."""

    name: str
    workers: int  # at most
    slots: int  # bundles that one of them runs at once
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class InferenceView:
    """How a step that runs a model fares: sums over what is committed. It tells so by the counters of
    :class:`luminosity.core.InferenceMetrics`."""

    step: str
    inferences: int = 0
    batches: int = 0
    useful_cost: int = 0
    padded_cost: int = 0
    budget_cost: int = 0  # what the padded cost could have been
    queue_wait_seconds: float = 0.0  # over examples
    prepare_seconds: float = 0.0  # this and what follows: over batches
    collate_seconds: float = 0.0
    transfer_seconds: float = 0.0
    compute_seconds: float = 0.0
    return_seconds: float = 0.0
    device_busy_seconds: float = 0.0
    worker_seconds: float = 0.0  # what its pool's workers had, from the stage's first bundle to its last commit
    out_of_memory: int = 0  # times that a batch did not fit


@dataclass(frozen=True)
class StageView:
    """How a stage stands."""

    id: str
    status: Status
    by: tuple[str, ...] = ()  # the labels of the stages, or the name of the pool, that it waits for
    elements: int = 0  # committed, of the largest of the collections in it
    rate: float = 0.0  # elements a second, lately
    queued: int = 0  # elements that wait before it
    queued_bytes: int = 0
    running: int = 0  # bundles
    workers: int = 0  # that run a bundle of it
    busy_seconds: float = 0.0  # of workers; a bundle beside others counts for its slot's share
    fraction: float | None = None  # done of what there is to do, where that is known
    seconds_left: float | None = None  # about, where that is known
    inference: tuple[InferenceView, ...] = ()  # of its steps that run models


@dataclass(frozen=True)
class PoolView:
    name: str
    workers: int = 0  # that are up
    busy: int = 0  # bundles that run
    slots: int = 0  # bundles that could run, were all its workers up
    busy_seconds: float = 0.0  # that its workers had something to do
    busy_fraction: float = 0.0  # of the time that they could have since the run began


@dataclass(frozen=True)
class DeviceView:
    id: str
    busy_fraction: float = 0.0  # of the time since the run began, that its process had a bundle
    utilization: float | None = None  # how much it computes now; this and its memory where its driver tells
    memory_used: int | None = None
    memory_total: int | None = None


@dataclass(frozen=True)
class MemoryUse:
    """The bytes that the engine holds between stages."""

    used: int = 0
    peak: int = 0
    limit: int = 0  # 0: none
    spilled: int = 0  # written to disk so far


@dataclass(frozen=True)
class ProcessMemory:
    """The memory of this process and all below it; 0 where the system does not tell."""

    used: int = 0
    peak: int = 0


@dataclass(frozen=True)
class Event:
    run: str  # the run's id
    seconds: float  # since the run began


@dataclass(frozen=True)
class RunStarted(Event):
    name: str  # of the script
    started_at: float  # seconds since 1970
    stages: tuple[StageInfo, ...]  # writers before readers
    pools: tuple[PoolInfo, ...]
    queue_limit: int  # bytes before a stage that hold back what writes them
    memory_limit: int = 0


@dataclass(frozen=True)
class Snapshot(Event):
    stages: tuple[StageView, ...]
    pools: tuple[PoolView, ...]
    devices: tuple[DeviceView, ...] = ()
    memory: MemoryUse = MemoryUse()
    processes: ProcessMemory = ProcessMemory()
    seconds_left: float | None = None  # about: the largest that is known of any stage


@dataclass(frozen=True)
class WorkerStarted(Event):
    worker: str
    pool: str
    pid: int
    devices: tuple[str, ...] = ()


@dataclass(frozen=True)
class WorkerLost(Event):
    worker: str
    pool: str
    reason: str
    bundles: int  # that ran there, and are run again


@dataclass(frozen=True)
class BundleRetried(Event):
    step: str
    exception: str  # in one line
    tries: int  # so far
    elements: int


@dataclass(frozen=True)
class RunEnded(Event):
    state: Literal["done", "failed", "cancelled"]
    last: Snapshot  # how everything stood
    failure: str = ""  # in one line


Subscriber = Callable[[Event], None]

_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind for kind in (RunStarted, Snapshot, WorkerStarted, WorkerLost, BundleRetried, RunEnded)
}


def to_json(event: Event) -> dict[str, Any]:
    """``event`` as what ``json.dumps`` takes; fields at their default are left out.

    >>> lost = WorkerLost("r1", 2.5, "w1", "cpu", "was killed by SIGKILL", bundles=1)
    >>> from_json(to_json(lost)) == lost
    True
    """
    return {"event": type(event).__name__, **_plain(event)}


def from_json(data: Any) -> Event:
    """The event that ``to_json`` gave ``data`` for. Anything else is a ``ValueError``."""
    try:
        content = dict(data)
        return _build(_KINDS[content.pop("event")], content)
    except (AttributeError, KeyError, TypeError) as error:
        raise ValueError(f"not an event of this version: {error!r}") from error


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
        return kind(**{name: _build(hints[name], value) for name, value in data.items()})
    origin = get_origin(kind)
    if origin is tuple:
        return tuple(_build(get_args(kind)[0], item) for item in data)
    allowed = get_args(kind)
    if origin is Literal:
        is_fitting = data in allowed
    else:
        accepted = allowed if origin in (Union, types.UnionType) else (kind,)
        # Whole floats come back from other JSON writers as integers.
        is_fitting = isinstance(data, (*accepted, int) if float in accepted else accepted)
    if not is_fitting:
        raise ValueError(f"found {data!r}, expected {kind}")
    return data


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
