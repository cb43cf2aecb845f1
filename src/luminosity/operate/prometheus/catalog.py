"""The metrics that are exported: their names, kinds, labels and meanings, and samples of them.

Most are numbers of views, which :mod:`luminosity.events.views` describes; the others are computed in the exporter.
"""

from __future__ import annotations

import hashlib
from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any, Literal

from luminosity._shared.text import printable
from luminosity.events.numbers import numbers_of
from luminosity.events.views import (
    CheckpointView,
    DeviceView,
    InferenceView,
    MemoryUse,
    PoolView,
    ProcessMemory,
    StageView,
    StreamView,
)
from luminosity.runs.manifest.masking import mask_text

__all__ = [
    "CATALOG",
    "STATES",
    "Metric",
    "Sample",
    "known",
    "markdown_table",
    "numbers",
    "positive",
    "sample_of",
    "series_names",
]

_LONGEST_LABEL = 200  # characters; Prometheus stores a label's value with every series
_LABEL_BEFORE_DIGEST = 191  # characters that stay of a longer one: an ellipsis and 8 digits follow
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


def _metrics_of(view: type[Any], labels: tuple[str, ...]) -> tuple[Metric, ...]:
    """Return the metrics of a view's numbers, which its fields describe."""
    found = [each for each in numbers_of(view) if each.metric]
    return tuple(Metric(f"luminosity_{each.metric}", each.kind, labels, each.meaning) for each in found)


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
    *_metrics_of(ProcessMemory, _RUN),
    *_metrics_of(MemoryUse, _RUN),
    *_metrics_of(StageView, _STAGE),
    _gauge("stage_held_back", _STAGE, "1 if the stage waits because its output is not read fast enough"),
    *_metrics_of(PoolView, _POOL),
    _gauge("pool_workers_limit", _POOL, "Workers that the pool may have"),
    _gauge("pool_cost", (*_POOL, "currency"), "The part of the pool in the run's expected bill"),
    _gauge(
        "worker_peak_resident_bytes", _POOL, "The largest resident memory of one worker of the pool, if it is known"
    ),
    _gauge("worker_ram_bytes", _POOL, "The share of the machine's memory that one worker of the pool has"),
    *_metrics_of(DeviceView, _DEVICE),
    *_metrics_of(InferenceView, _MODEL),
    _counter("model_requests", _MODEL, "Requests to the model's server, also those that were sent again"),
    _counter("model_retries", _MODEL, "Requests that were sent again to the model's server"),
    _counter("model_throttled", _MODEL, "Responses of the model's server that ask to send less: 429 and the like"),
    _counter("model_retry_wait_seconds", _MODEL, "Time that requests waited before they were sent again"),
    _gauge("model_padding_ratio", _MODEL, "Part of the computed cost that is padding"),
    _gauge("watermark_lag_seconds", _STREAM, "How far the stage's watermark is behind the clock"),
    *_metrics_of(StreamView, _STREAM),
    _gauge("kafka_lag_records", _STEP, "Records between the reader and the end of its partitions"),
    _counter("kafka_records", (*_STEP, "direction"), "Records that were read or written"),
    _counter("kafka_dead_letters", (*_STEP, "direction"), "Records that can't be read, or that Kafka does not take"),
    _counter("kafka_lost_records", _STEP, "Records that Kafka removed before they were read"),
    *_metrics_of(CheckpointView, _RUN),
    _gauge("checkpoint_last_timestamp_seconds", _RUN, "When the last checkpoint was complete"),
    _gauge("checkpoint_duration_seconds", _RUN, "How long the last checkpoint took"),
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


@dataclass(frozen=True)
class Sample:
    """The value of one series, or the sum and the count of a summary."""

    metric: Metric
    labels: tuple[str, ...]  # in the order of the metric's labels
    value: float
    count: int = 0  # of a summary


def sample_of(name: str, labels: tuple[str, ...], value: float, count: int = 0) -> Sample:
    """Return the value of a metric, whose name here lacks ``luminosity_``."""
    metric = CATALOG[f"luminosity_{name}"]
    return Sample(metric, tuple(map(_label, labels)), float(value), count)


def _label(text: str) -> str:
    """Return a label without secrets. One that is cut ends with a digest, so that two of them stay apart."""
    clean = mask_text(printable(text))
    if len(clean) <= _LONGEST_LABEL:
        return clean
    return f"{clean[:_LABEL_BEFORE_DIGEST]}…{hashlib.sha256(clean.encode()).hexdigest()[:8]}"


def numbers(view: Any, labels: tuple[str, ...]) -> Iterator[Sample]:
    """Yield the numbers of a view whose fields name a metric, in base units."""
    for each in numbers_of(type(view)):
        value = getattr(view, each.field) if each.metric else None
        if value is not None and (value or each.exports_zero):
            yield sample_of(each.metric, labels, value / 1000 if each.unit == "milliseconds" else value)


def known(name: str, labels: tuple[str, ...], value: float | None) -> Iterator[Sample]:
    """Yield a value, unless it is None."""
    if value is not None:
        yield sample_of(name, labels, value)


def positive(name: str, labels: tuple[str, ...], value: float) -> Iterator[Sample]:
    """Yield a value that is not known if it is 0."""
    if value:
        yield sample_of(name, labels, value)


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
