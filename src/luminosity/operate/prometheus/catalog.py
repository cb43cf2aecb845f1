"""The metrics that are exported: their names, kinds, labels and meanings."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Literal

__all__ = ["CATALOG", "STATES", "Metric", "markdown_table", "series_names"]

STATES = ("running", "done", "failed", "cancelled", "stopped", "drained", "lost")

_RUN = ("pipeline", "folder")
_ONE_RUN = (*_RUN, "run", "run_dir")
_STAGE = (*_RUN, "stage", "pool")
_POOL = (*_RUN, "pool")
_DEVICE = (*_RUN, "device")
_MODEL = (*_RUN, "stage", "model")
_STREAM = (*_RUN, "stage")
_STEP = (*_RUN, "step")
_USER = (*_RUN, "step", "namespace", "name")
_DRIFT = ("reference", "columns", "kernel", "key")


@dataclass(frozen=True)
class Metric:
    """One metric: a family of series that differ in their labels."""

    name: str  # without the suffix _total of counters
    kind: Literal["counter", "gauge", "summary"]
    labels: tuple[str, ...]
    meaning: str  # one sentence without a final period

    @property
    def series(self) -> tuple[str, ...]:
        """The names of its series, as expressions use them.

        >>> CATALOG["luminosity_stage_elements"].series
        ('luminosity_stage_elements_total',)
        """
        if self.kind == "summary":
            return f"{self.name}_sum", f"{self.name}_count"
        return (f"{self.name}_total",) if self.kind == "counter" else (self.name,)


def _gauge(name: str, labels: tuple[str, ...], meaning: str) -> Metric:
    return Metric(f"luminosity_{name}", "gauge", labels, meaning)


def _counter(name: str, labels: tuple[str, ...], meaning: str) -> Metric:
    return Metric(f"luminosity_{name}", "counter", labels, meaning)


_METRICS = (
    _gauge("run_state", (*_RUN, "state"), "1 for the state of the newest run, 0 for all other states"),
    _gauge("running_runs", _RUN, "Runs of the pipeline that go on now"),
    _gauge("run_start_timestamp_seconds", _RUN, "When the newest run started"),
    _gauge("run_last_update_timestamp_seconds", _RUN, "When the newest run last said how it is going"),
    _gauge("run_last_end_timestamp_seconds", _RUN, "When a run of the pipeline last ended, however it ended"),
    _gauge("run_last_success_timestamp_seconds", _RUN, "When a run of the pipeline last ended with all its results"),
    _gauge(
        "run_last_failure_timestamp_seconds",
        _ONE_RUN,
        "When a run of the pipeline last failed, or when a killed one was last heard of; with that run's id",
    ),
    _gauge("run_info", _ONE_RUN, "1, with the id of the newest run and the folder of its record"),
    _gauge(
        "run_stalled_seconds",
        (*_ONE_RUN, "stage"),
        "For how long a stalled bundle of a run, also of an older one that still runs, has done nothing; none if no "
        "bundle is stalled",
    ),
    _gauge("run_duration_seconds", _RUN, "How long the newest run has taken so far, or took"),
    _gauge("run_remaining_seconds", _RUN, "Estimated time to the end of the newest run, if it is known"),
    _gauge("run_cost", (*_RUN, "currency", "bound"), "The bill of the newest run so far: low, expected and high"),
    _gauge("run_resident_bytes", _RUN, "Memory of the run's processes; pages that several share count once"),
    _gauge("run_resident_peak_bytes", _RUN, "The largest memory of the run's processes so far"),
    _gauge("run_data_bytes", _RUN, "Memory that holds data between stages"),
    _gauge("run_data_limit_bytes", _RUN, "Memory for data between stages, beyond which data is spilled to disk"),
    _counter("run_spilled_bytes", _RUN, "Data between stages that was written to disk"),
    _counter("stage_elements", _STAGE, "Committed elements of the stage's largest collection"),
    _counter("stage_bundles", _STAGE, "Committed bundles"),
    _counter("stage_retries", _STAGE, "Failed attempts of bundles"),
    _counter("stage_busy_seconds", _STAGE, "Time of workers in the stage's bundles"),
    _counter("stage_cpu_seconds", _STAGE, "CPU time of workers in the stage's committed bundles, if it is known"),
    _counter("stage_output_bytes", _STAGE, "Output of the stage, estimated from a sample, if it is known"),
    _gauge("stage_queued_elements", _STAGE, "Elements that wait in the stage's input queues"),
    _gauge("stage_queued_bytes", _STAGE, "Bytes that wait in the stage's input queues"),
    _gauge("stage_running_bundles", _STAGE, "Bundles that run now"),
    _gauge("stage_held_back", _STAGE, "1 if the stage waits because its output is not read fast enough"),
    _gauge("pool_workers", _POOL, "Workers that are up"),
    _gauge("pool_workers_limit", _POOL, "Workers that the pool may have"),
    _counter("pool_busy_seconds", _POOL, "Time in which workers of the pool had a bundle"),
    _gauge("pool_cost", (*_POOL, "currency"), "The part of the pool in the run's expected bill"),
    _gauge(
        "worker_peak_resident_bytes", _POOL, "The largest resident memory of one worker of the pool, if it is known"
    ),
    _gauge("worker_ram_bytes", _POOL, "The share of the machine's memory that one worker of the pool has"),
    _gauge("device_busy_ratio", _DEVICE, "Part of the run's time in which the device's worker had a bundle"),
    _gauge("device_utilization_ratio", _DEVICE, "Load of the device as its driver reports it"),
    _gauge("device_memory_used_bytes", _DEVICE, "Memory of the device that is in use"),
    _gauge("device_memory_peak_bytes", _DEVICE, "The largest memory of the device in use during the run"),
    _gauge("device_memory_bytes", _DEVICE, "Memory that the device has"),
    _counter("model_batches", _MODEL, "Batches that the model has computed"),
    _counter("model_inferences", _MODEL, "Examples that the model has computed"),
    _counter("model_loads", _MODEL, "How often workers have loaded the model, if it is known"),
    _counter("model_load_seconds", _MODEL, "Time of workers that loaded the model"),
    _counter("model_compute_seconds", _MODEL, "Time of batches in the model"),
    _counter("model_out_of_memory", _MODEL, "Batches that did not fit into memory"),
    _counter("model_cut_texts", _MODEL, "Texts that end because the model may not write more tokens"),
    _counter("model_requests", _MODEL, "Requests to the model's server, also those that were sent again"),
    _counter("model_retries", _MODEL, "Requests that were sent again to the model's server"),
    _counter("model_throttled", _MODEL, "Responses of the model's server that ask to send less: 429 and the like"),
    _counter("model_retry_wait_seconds", _MODEL, "Time that requests waited before they were sent again"),
    _gauge("model_padding_ratio", _MODEL, "Part of the computed cost that is padding"),
    _gauge("model_batch_p50_seconds", _MODEL, "Median time of a batch from its start to its result"),
    _gauge("model_batch_p99_seconds", _MODEL, "The time within which 99% of batches had their result"),
    _gauge("watermark_lag_seconds", _STREAM, "How far the stage's watermark is behind the clock"),
    _gauge("stream_backlog", _STREAM, "Work that waits at the stage's source, in the source's unit: bytes or records"),
    _counter("stream_late_elements", _STREAM, "Elements that came later than allowed and were dropped"),
    _gauge("kafka_lag_records", _STEP, "Records between the reader and the end of its partitions"),
    _counter("kafka_records", (*_STEP, "direction"), "Records that were read or written"),
    _counter("kafka_dead_letters", (*_STEP, "direction"), "Records that can't be read, or that Kafka does not take"),
    _counter("kafka_lost_records", _STEP, "Records that Kafka removed before they were read"),
    _counter("checkpoints", _RUN, "Checkpoints since the run's last start"),
    _gauge("checkpoint_last_timestamp_seconds", _RUN, "When the last checkpoint was complete"),
    _gauge("checkpoint_duration_seconds", _RUN, "How long the last checkpoint took"),
    _gauge("checkpoint_folder_bytes", _RUN, "Disk space of the checkpoint folder"),
    _counter("user_counted", _USER, "A counter of your own code"),
    _gauge("user_value", _USER, "A gauge of your own code"),
    Metric("luminosity_user_distribution", "summary", _USER, "A distribution of your own code"),
    _gauge("user_distribution_min", _USER, "The smallest value of a distribution of your own code"),
    _gauge("user_distribution_max", _USER, "The largest value of a distribution of your own code"),
    _gauge("drift_p_value", _DRIFT, "The p-value of the newest test"),
    _gauge("drift_level", _DRIFT, "The false-alarm rate of the newest test: a p-value at or below it is drift"),
    _gauge("drift_mmd2", _DRIFT, "The squared MMD of the newest test: how different the data is"),
    _gauge("drift_effect", _DRIFT, "How different the newest test found the data, in the unit of its test"),
    _gauge("drift_detected", _DRIFT, "1 if the newest test found drift"),
    _gauge("drift_rows", _DRIFT, "Rows of new data in the newest test"),
    _gauge("drift_last_test_timestamp_seconds", _DRIFT, "When the newest test was made"),
    _gauge(
        "export_left_out", ("what",), "Things that are not exported because there are too many, or that can't be read"
    ),
    _gauge("build_info", ("version",), "1, with the version of Luminosity that exports"),
)

CATALOG = {metric.name: metric for metric in _METRICS}


def series_names() -> frozenset[str]:
    """Return the names of all series that may be exported."""
    return frozenset(name for metric in _METRICS for name in metric.series)


def markdown_table() -> str:
    """Return the metrics as a Markdown table, for the guide."""
    lines = ["| metric | kind | labels | meaning |", "|---|---|---|---|"]
    for metric in _METRICS:
        names = "<br>".join(f"`{name}`" for name in metric.series)
        labels = ", ".join(metric.labels)
        lines.append(f"| {names} | {metric.kind} | {labels} | {metric.meaning} |")
    return "".join(f"{line}\n" for line in lines)
