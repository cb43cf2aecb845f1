"""The state of stages, pools, workers, devices, models and streams at one moment.

A number of a stage, pool, model and so on is named here once: the functions of :mod:`luminosity.events.numbers` say
next to the field what it means, in which unit it is, how the page shows it and what Prometheus calls it.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

from luminosity.events.numbers import counter, gauge, number

__all__ = [
    "CheckpointView",
    "DeviceView",
    "InferenceView",
    "KafkaView",
    "MemoryUse",
    "MetricView",
    "NodeView",
    "PartitionLag",
    "PoolView",
    "ProcessMemory",
    "StageView",
    "StallView",
    "Status",
    "StreamView",
    "WorkerView",
]

_OLD_RECORD = "this run's record does not have it"
_NO_FIRST_TOKEN = "the model writes no text, or can't tell when the first token is there: a server that does not stream"
_NOT_COUNTED = "the step does not count it, or the record is of an older version"

Status = Literal["waiting", "starved", "held back", "needs worker", "busy", "done"]
"""The state of a stage.

- ``waiting``: it waits for a side input or a timer.
- ``starved``: it has no input at the moment.
- ``held back``: its output is not read fast enough.
- ``needs worker``: it has input, but no worker of its pool is free.
"""


@dataclass(frozen=True)
class InferenceView:
    """The progress of a step that runs a model: sums over its committed bundles.

    The step reports it with the counters of :class:`luminosity.core.InferenceMetrics`.
    """

    step: str
    inferences: int = counter(0, "Examples that the model has computed", "model_inferences", title="Inferences")
    batches: int = counter(0, "Batches that the model has computed", "model_batches")
    useful_cost: int = 0
    padded_cost: int = 0
    budget_cost: int = 0  # the greatest padded cost allowed
    queue_wait_seconds: float = 0.0  # summed over examples
    prepare_seconds: float = 0.0  # this and the following: summed over batches
    collate_seconds: float = 0.0
    transfer_seconds: float = 0.0
    compute_seconds: float = counter(0.0, "Time of batches in the model", "model_compute_seconds", "seconds")
    return_seconds: float = 0.0
    device_busy_seconds: float = 0.0
    worker_seconds: float = 0.0  # time of the pool's workers, from the stage's first bundle to its last commit
    out_of_memory: int = counter(0, "Batches that did not fit into memory", "model_out_of_memory", title="Too large")
    loads: int = counter(
        0, "How often workers have loaded the model, if it is known", "model_loads", exports_zero=False
    )
    load_seconds: float = counter(
        0.0, "Time of workers that loaded the model", "model_load_seconds", "seconds", exports_zero=False
    )
    model_bytes: int = 0  # of one copy of the model, the mean of all loads; 0 if not known
    # The line that fits the batches' times: fixed_seconds + seconds_per_cost * padded cost; 0 and 0 if not known.
    fixed_seconds: float = 0.0
    seconds_per_cost: float = 0.0
    # The time of a batch from its start to its result, within 15%; None before the first one.
    batch_p50_ms: float | None = gauge(
        None,
        "Median time of a batch from its start to its result",
        "model_batch_p50_seconds",
        "milliseconds",
        title="p50",
        dash=_NOT_COUNTED,
    )
    batch_p99_ms: float | None = gauge(
        None,
        "The time within which 99% of batches had their result",
        "model_batch_p99_seconds",
        "milliseconds",
        title="p99",
        dash=_NOT_COUNTED,
    )
    # The time from a prompt to the first token of its answer, within 15%; None where the model can't tell it.
    first_token_p50_ms: float | None = gauge(
        None,
        "Median time from a prompt to the first token of its answer",
        "model_first_token_p50_seconds",
        "milliseconds",
        title="First token p50",
        dash=_NO_FIRST_TOKEN,
    )
    first_token_p99_ms: float | None = gauge(
        None,
        "The time within which 99% of answers had their first token",
        "model_first_token_p99_seconds",
        "milliseconds",
        title="First token p99",
        dash=_NO_FIRST_TOKEN,
    )
    # Where the model computes: on an accelerator's worker, any other worker, or a server; empty in older records.
    runs_on: Literal["device", "server", "worker", ""] = ""
    computed_by: str = ""  # how a model of texts ran, such as "padded in attention only"; empty for others
    cut_texts: int = counter(
        0, "Texts that end because the model may not write more tokens", "model_cut_texts", exports_zero=False
    )
    requests: int = 0  # this and the following: of a model on a server; all that were sent, also again
    retries: int = 0  # requests that were sent again
    hedges: int = counter(
        0,
        "Requests that were sent a second time because their answer took long",
        "model_hedged_requests",
        exports_zero=False,
    )
    throttled: int = 0  # responses that ask to send less
    retry_wait_seconds: float = 0.0  # summed over retries: the wait before the request was sent again
    limit_wait_seconds: float = counter(
        0.0,
        "Time that requests waited for limits that you set",
        "model_limit_wait_seconds",
        "seconds",
        exports_zero=False,
    )
    prompt_tokens: int = counter(
        0, "Tokens of prompts that the model has read", "model_prompt_tokens", exports_zero=False
    )
    new_tokens: int = counter(0, "Tokens that the model has written", "model_new_tokens", exports_zero=False)
    cached_prompt_tokens: int = counter(
        0,
        "Tokens of prompts that the model's server had in its cache",
        "model_cached_prompt_tokens",
        exports_zero=False,
    )
    cost: float = counter(
        0.0, "Cost of the tokens, by the prices that you gave", "model_token_cost", exports_zero=False
    )
    cached_answers: int = counter(
        0, "Answers from the cache, without the model", "model_cached_answers", exports_zero=False
    )
    repeated_prompts: int = counter(
        0, "Prompts that got the answer of an equal prompt", "model_repeated_prompts", exports_zero=False
    )


@dataclass(frozen=True)
class StreamView:
    """The state of a stage of a stream, whose input may never end."""

    # Event time up to which its output is complete, in seconds since 1970; None before the first data and at the end.
    watermark: float | None = None
    behind_seconds: float | None = None  # from the watermark to now; negative if the watermark is ahead of the clock
    has_ended: bool = False  # whether the watermark has reached the end of time
    backlog: float | None = gauge(
        None, "Work that waits at the stage's source, in the source's unit: bytes or records", "stream_backlog"
    )
    # Once for each window.
    dropped_late: int = counter(0, "Elements that came later than allowed and were dropped", "stream_late_elements")


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
class StallView:
    """A bundle in which no step has taken or emitted an element for long. Has no data of the user."""

    step: str
    seconds: float  # for how long
    # What it does: works on one element, is in start_bundle or finish_bundle, sets its steps up, waits for a model that
    # is loaded, or nothing: its worker does not answer.
    doing: Literal["element", "start", "finish", "setup", "loading", "nothing"] = "element"
    is_stalled: bool = True  # False if it may well take long: to set up, or to load a model
    worker: str = ""
    pid: int = 0  # 0 on a cluster
    node: str = ""
    state: str = ""  # of the process that it waits for, its worker or a model host: "stopped" or "does not answer"
    waits_for: str = ""  # the model, if it waits for one
    place: str = ""  # the user's own file and line


@dataclass(frozen=True)
class StageView:
    """The state of a stage at one moment."""

    id: str
    status: Status
    by: tuple[str, ...] = ()  # the labels of the stages, or the name of the pool, that it waits for
    elements: int = counter(
        0, "Committed elements of the stage's largest collection", "stage_elements", title="Elements"
    )
    rate: float = 0.0  # elements per second, recently
    queued: int = gauge(0, "Elements that wait in the stage's input queues", "stage_queued_elements", title="Queue")
    queued_bytes: int = gauge(0, "Bytes that wait in the stage's input queues", "stage_queued_bytes", "bytes")
    running: int = gauge(0, "Bundles that run now", "stage_running_bundles")
    workers: int = 0  # workers that run a bundle of it
    # A bundle that shares its worker counts for its slot's share.
    busy_seconds: float = counter(
        0.0,
        "Time of workers in the stage's bundles",
        "stage_busy_seconds",
        "seconds",
        title="Time",
        dash="no work was done",
    )
    fraction: float | None = None  # the part of its work that is done, if known
    seconds_left: float | None = None  # estimated, if known
    inference: tuple[InferenceView, ...] = ()  # of its steps that run models
    stream: StreamView | None = None  # of a stage of a stream
    kafka: tuple[KafkaView, ...] = ()  # of its steps that read or write Kafka
    bundles: int = counter(0, "Committed bundles", "stage_bundles")
    # Of user code and of lost workers, since this start.
    retries: int = counter(0, "Failed attempts of bundles", "stage_retries")
    # Of workers' processes while they ran its committed bundles, all threads, since this start. Bundles that share a
    # worker get the time of their own threads and equal parts of the time of the others.
    cpu_seconds: float = counter(
        0.0,
        "CPU time of workers in the stage's committed bundles, if it is known",
        "stage_cpu_seconds",
        "seconds",
        title="CPU",
        dash=_OLD_RECORD,
        exports_zero=False,
    )
    peak_resident: int = number(
        0,
        "The largest resident memory of a worker during or after one of its bundles",
        unit="bytes",
        title="Memory",
        dash=_OLD_RECORD,
    )
    # Encoded, sent to other stages since this start.
    output_bytes: int = counter(
        0,
        "Output of the stage, estimated from a sample, if it is known",
        "stage_output_bytes",
        "bytes",
        exports_zero=False,
    )
    stalls: tuple[StallView, ...] = ()  # bundles that take long, the longest first; a few at most
    bundle_seconds: tuple[float, ...] = ()  # in the last snapshot: of a random sample of at most 64 committed bundles
    bundle_elements: tuple[int, ...] = ()  # the elements of the same bundles
    # This and the following: of its steps, in the order of ``StageInfo.steps``, over committed bundles; only in some
    # snapshots, since they change slowly. The time of a worker in the step, of which Beam takes samples.
    step_seconds: tuple[float, ...] = ()
    step_elements: tuple[int, ...] = ()  # that the step has put out

    @property
    def stalled_seconds(self) -> float:
        """The seconds in which the stage's longest stalled bundle has done nothing; 0 if none is stalled."""
        return max((stall.seconds for stall in self.stalls if stall.is_stalled), default=0.0)


@dataclass(frozen=True)
class PoolView:
    """The state of a pool at one moment."""

    name: str
    workers: int = gauge(0, "Workers that are up", "pool_workers")
    busy: int = 0  # bundles that run
    slots: int = 0  # bundles that could run if all workers were up for which it has a place now
    busy_seconds: float = counter(0.0, "Time in which workers of the pool had a bundle", "pool_busy_seconds", "seconds")
    busy_fraction: float = 0.0  # of the time of all its workers since the run started
    waiting: int = gauge(0, "Workers for which a cluster has no place yet", "pool_workers_waiting", exports_zero=False)
    waits_for: str = ""  # what each of these asks for, such as "1 GPU"
    wanted: int = gauge(
        0, "Workers that the work left is worth, on a cluster", "pool_workers_wanted", exports_zero=False
    )


@dataclass(frozen=True)
class DeviceView:
    """The state of an accelerator at one moment."""

    id: str
    busy_fraction: float = gauge(
        0.0, "Part of the run's time in which the device's worker had a bundle", "device_busy_ratio", "share"
    )
    # This and the following: as its driver reports it, if it does.
    utilization: float | None = gauge(
        None, "Load of the device as its driver reports it", "device_utilization_ratio", "share"
    )
    memory_used: int | None = gauge(None, "Memory of the device that is in use", "device_memory_used_bytes", "bytes")
    memory_total: int | None = gauge(None, "Memory that the device has", "device_memory_bytes", "bytes")
    mean_utilization: float | None = None  # this and the following: over the run so far
    peak_utilization: float | None = None
    peak_memory: int | None = gauge(
        None, "The largest memory of the device in use during the run", "device_memory_peak_bytes", "bytes"
    )


@dataclass(frozen=True)
class MemoryUse:
    """The bytes that the engine holds between stages."""

    used: int = gauge(0, "Memory that holds data between stages", "run_data_bytes", "bytes")
    peak: int = 0
    limit: int = gauge(
        0,
        "Memory for data between stages, beyond which data is spilled to disk",
        "run_data_limit_bytes",
        "bytes",
        exports_zero=False,
    )
    spilled: int = counter(0, "Data between stages that was written to disk", "run_spilled_bytes", "bytes")
    objects: int = 0  # blocks in the stores of a cluster, without second copies; not among those in use


@dataclass(frozen=True)
class ProcessMemory:
    """The memory of this process and its descendants; 0 if the system does not report it."""

    used: int = gauge(
        0,
        "Memory of the run's processes; pages that several share count once",
        "run_resident_bytes",
        "bytes",
        exports_zero=False,
    )
    peak: int = gauge(
        0, "The largest memory of the run's processes so far", "run_resident_peak_bytes", "bytes", exports_zero=False
    )


@dataclass(frozen=True)
class WorkerView:
    """The state of a worker process at one moment; 0 where the system does not report it."""

    worker: str
    pool: str
    pid: int = 0
    running: tuple[str, ...] = ()  # ids of the stages whose bundles it runs
    cpu_seconds: float = 0.0  # since it started
    resident: int = 0  # bytes, with pages that it shares with other workers
    peak_resident: int = 0
    own: int = 0  # bytes: its own pages and its part of shared ones; measured less often
    node: str = ""  # the id of its node; empty on one machine
    waits_for: str = ""  # what it lacks to start, such as "1 GPU"; empty if it runs


@dataclass(frozen=True)
class NodeView:
    """The state of a node of a cluster at one moment, with all that runs there; None where it is not known."""

    id: str
    address: str = ""
    workers: int = 0  # of this run that are up
    utilization: float | None = None  # of all cores, between 0 and 1
    ram_used: int = 0
    ram_total: int = 0
    blocks: int = 0  # bytes of the run's blocks in the cluster's store there, second copies included
    devices: tuple[DeviceView, ...] = ()  # its accelerators, as their driver reports them


@dataclass(frozen=True)
class CheckpointView:
    """The checkpoints of a durable run."""

    count: int = counter(0, "Checkpoints since the run's last start", "checkpoints")
    last_at: float | None = None  # when the last one was complete, in seconds since the run started
    last_seconds: float = 0.0  # how long it took
    folder_bytes: int = gauge(
        0, "Disk space of the checkpoint folder", "checkpoint_folder_bytes", "bytes", exports_zero=False
    )
    copy_lag_seconds: float | None = gauge(
        None,
        "For how long something has not been in the copy of the checkpoint",
        "checkpoint_copy_lag_seconds",
        "seconds",
    )


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
