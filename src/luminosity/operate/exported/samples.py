"""The values of metrics at one moment: those of a pipeline's newest run, and those of tests for drift."""

from __future__ import annotations

import hashlib
import math
from collections.abc import Iterable, Iterator
from dataclasses import dataclass
from datetime import datetime

from luminosity._shared.text import printable
from luminosity.drift.history import PastTest
from luminosity.events import InferenceView, KafkaView, MetricView, Snapshot, StageInfo, StageView, WorkerEnded
from luminosity.operate.cost.bill import Bill, bill_of
from luminosity.operate.cost.prices import PriceSheet
from luminosity.operate.exported.catalog import CATALOG, STATES, Metric
from luminosity.operate.exported.newest_runs import Pipeline, PipelineRuns
from luminosity.runs.manifest.masking import mask_text
from luminosity.runs.records import Record

__all__ = ["MOST_OF_USER", "MOST_STAGES", "Sample", "drift_samples", "left_out_of", "run_samples"]

MOST_STAGES = 200  # of a pipeline; a page of more is unreadable
MOST_OF_USER = 100  # counters, gauges and distributions of a pipeline's own code
_LONGEST_LABEL = 200  # characters; Prometheus stores a label's value with every series
_LABEL_BEFORE_DIGEST = 191  # characters that stay of a longer one: an ellipsis and 8 digits follow


@dataclass(frozen=True)
class Sample:
    """The value of one series, or the sum and the count of a summary."""

    metric: Metric
    labels: tuple[str, ...]  # in the order of the metric's labels
    value: float
    count: int = 0  # of a summary


def run_samples(runs: PipelineRuns, prices: PriceSheet, now: float) -> Iterator[Sample]:
    """Yield the values of a pipeline's newest run. ``now`` is in seconds since 1970."""
    record, pipeline = runs.newest, (runs.pipeline, runs.folder)
    started_at = record.started.started_at
    for state in STATES:
        yield _sample("run_state", (*pipeline, state), record.state == state)
    yield _sample("running_runs", pipeline, len(runs.running))
    yield _sample("run_start_timestamp_seconds", pipeline, started_at)
    yield from _known("run_last_end_timestamp_seconds", pipeline, runs.last_end)
    yield from _known("run_last_success_timestamp_seconds", pipeline, runs.last_success)
    if (failure := runs.last_failure) is not None:
        yield _sample("run_last_failure_timestamp_seconds", (*pipeline, failure.run, runs.run_dir), failure.at)
    yield _sample("run_info", (*pipeline, record.started.run, runs.run_dir), 1)
    for running in runs.running:
        yield from _stalls((*pipeline, running.started.run, runs.run_dir), running)
    last = record.last
    if last is None:
        return
    yield _sample("run_last_update_timestamp_seconds", pipeline, started_at + last.seconds)
    yield _sample("run_duration_seconds", pipeline, last.seconds)
    yield from _known("run_remaining_seconds", pipeline, last.seconds_left)
    yield from _memory(pipeline, last)
    yield from _cost(pipeline, bill_of(record, prices))
    infos = {info.id: info for info in record.started.stages}
    # Since the last snapshot, a watermark has fallen behind further, even if the run does not say so any more.
    age = max(0.0, now - started_at - last.seconds) if record.state == "running" else 0.0
    for view in last.stages[:MOST_STAGES]:
        if (info := infos.get(view.id)) is not None:
            yield from _stage(pipeline, info, view, age)
    yield from _pools(pipeline, record, last)
    for device in last.devices:
        labels = (*pipeline, device.id)
        yield _sample("device_busy_ratio", labels, device.busy_fraction)
        yield from _known("device_utilization_ratio", labels, device.utilization)
        yield from _known("device_memory_used_bytes", labels, device.memory_used)
        yield from _known("device_memory_peak_bytes", labels, device.peak_memory)
        yield from _known("device_memory_bytes", labels, device.memory_total)
    if (checkpoint := last.checkpoint) is not None:
        yield _sample("checkpoints", pipeline, checkpoint.count)
        if checkpoint.last_at is not None:
            yield _sample("checkpoint_last_timestamp_seconds", pipeline, started_at + checkpoint.last_at)
            yield _sample("checkpoint_duration_seconds", pipeline, checkpoint.last_seconds)
        yield from _positive("checkpoint_folder_bytes", pipeline, checkpoint.folder_bytes)
    for view in _of_user(record)[:MOST_OF_USER]:
        yield from _user(pipeline, view)


def left_out_of(record: Record) -> dict[str, int]:
    """Return how many stages and metrics of user code of a run are not exported."""
    last = record.last
    stages = len(last.stages) if last is not None else 0
    negative = sum(view.kind == "counter" and view.value < 0 for view in _of_user(record)[:MOST_OF_USER])
    return {
        "stages": max(0, stages - MOST_STAGES),
        "user metrics": max(0, len(_of_user(record)) - MOST_OF_USER) + negative,
    }


def drift_samples(tests: Iterable[PastTest]) -> Iterator[Sample]:
    """Yield the values of the newest tests, each against another reference or of another key."""
    for test in tests:
        labels = (test.reference, test.columns, test.kernel, test.key)
        if not test.by_detector:  # a detector of a stream has a threshold of its own, and neither a p-value nor a level
            yield _sample("drift_p_value", labels, test.p_value)
            yield _sample("drift_level", labels, test.level)
        yield from _known("drift_mmd2", labels, None if math.isnan(test.mmd2) else test.mmd2)
        yield _sample("drift_detected", labels, test.drift)
        yield _sample("drift_rows", labels, test.current_rows)
        yield _sample("drift_last_test_timestamp_seconds", labels, datetime.fromisoformat(test.time).timestamp())


def _stalls(labels: tuple[str, ...], record: Record) -> Iterator[Sample]:
    infos = {info.id: info for info in record.started.stages}
    for view in record.last.stages[:MOST_STAGES] if record.last is not None else ():
        if (info := infos.get(view.id)) is not None:
            yield from _positive("run_stalled_seconds", (*labels, info.label), view.stalled_seconds)


def _memory(pipeline: Pipeline, last: Snapshot) -> Iterator[Sample]:
    yield from _positive("run_resident_bytes", pipeline, last.processes.used)
    yield from _positive("run_resident_peak_bytes", pipeline, last.processes.peak)
    yield _sample("run_data_bytes", pipeline, last.memory.used)
    yield from _positive("run_data_limit_bytes", pipeline, last.memory.limit)
    yield _sample("run_spilled_bytes", pipeline, last.memory.spilled)


def _cost(pipeline: Pipeline, bill: Bill) -> Iterator[Sample]:
    for bound, cost in (("low", bill.low), ("expected", bill.total), ("high", bill.high)):
        yield from _known("run_cost", (*pipeline, bill.currency, bound), cost)
    for pool in bill.pools:
        yield _sample("pool_cost", (*pipeline, pool.pool, bill.currency), pool.total)


def _stage(pipeline: Pipeline, info: StageInfo, view: StageView, age: float) -> Iterator[Sample]:
    labels = (*pipeline, info.label, info.pool)
    yield _sample("stage_elements", labels, view.elements)
    yield _sample("stage_bundles", labels, view.bundles)
    yield _sample("stage_retries", labels, view.retries)
    yield _sample("stage_busy_seconds", labels, view.busy_seconds)
    yield from _positive("stage_cpu_seconds", labels, view.cpu_seconds)
    yield from _positive("stage_output_bytes", labels, view.output_bytes)
    yield _sample("stage_queued_elements", labels, view.queued)
    yield _sample("stage_queued_bytes", labels, view.queued_bytes)
    yield _sample("stage_running_bundles", labels, view.running)
    yield _sample("stage_held_back", labels, view.status == "held back")
    for model in view.inference:
        yield from _model((*pipeline, info.label, model.step), model)
    for step in view.kafka:
        yield from _kafka(pipeline, step)
    if (stream := view.stream) is not None:
        of_stream = (*pipeline, info.label)
        if stream.behind_seconds is not None:
            yield _sample("watermark_lag_seconds", of_stream, stream.behind_seconds + age)
        yield from _known("stream_backlog", of_stream, stream.backlog)
        yield _sample("stream_late_elements", of_stream, stream.dropped_late)


def _model(labels: tuple[str, ...], model: InferenceView) -> Iterator[Sample]:
    yield _sample("model_batches", labels, model.batches)
    yield _sample("model_inferences", labels, model.inferences)
    yield from _positive("model_loads", labels, model.loads)
    yield from _positive("model_load_seconds", labels, model.load_seconds)
    yield _sample("model_compute_seconds", labels, model.compute_seconds)
    yield _sample("model_out_of_memory", labels, model.out_of_memory)
    yield from _positive("model_cut_texts", labels, model.cut_texts)
    if model.requests:
        yield _sample("model_requests", labels, model.requests)
        yield _sample("model_retries", labels, model.retries)
        yield _sample("model_throttled", labels, model.throttled)
        yield _sample("model_retry_wait_seconds", labels, model.retry_wait_seconds)
    if model.padded_cost:
        yield _sample("model_padding_ratio", labels, max(0.0, 1 - model.useful_cost / model.padded_cost))
    for name, milliseconds in (("p50", model.batch_p50_ms), ("p99", model.batch_p99_ms)):
        if milliseconds is not None:
            yield _sample(f"model_batch_{name}_seconds", labels, milliseconds / 1000)


def _kafka(pipeline: Pipeline, step: KafkaView) -> Iterator[Sample]:
    labels = (*pipeline, step.step)
    yield _sample("kafka_records", (*labels, step.kind), step.records)
    yield _sample("kafka_dead_letters", (*labels, step.kind), step.dead_letters)
    if step.kind == "read":
        yield _sample("kafka_lost_records", labels, step.lost)
        if step.partitions:
            yield _sample("kafka_lag_records", labels, step.lag)


def _pools(pipeline: Pipeline, record: Record, last: Snapshot) -> Iterator[Sample]:
    peaks: dict[str, int] = {}
    workers = [*last.workers, *(event for event in record.happenings if isinstance(event, WorkerEnded))]
    for worker in workers:
        peaks[worker.pool] = max(peaks.get(worker.pool, 0), worker.peak_resident)
    for pool in record.started.pools:
        labels = (*pipeline, pool.name)
        yield _sample("pool_workers_limit", labels, pool.workers)
        yield from _positive("worker_ram_bytes", labels, pool.ram_per_worker)
        yield from _positive("worker_peak_resident_bytes", labels, peaks.get(pool.name, 0))
    for view in last.pools:
        yield _sample("pool_workers", (*pipeline, view.name), view.workers)
        yield _sample("pool_busy_seconds", (*pipeline, view.name), view.busy_seconds)


def _of_user(record: Record) -> list[MetricView]:
    """Return the newest values of the metrics of user code."""
    if record.ended is not None:
        found = record.ended.metrics
    else:
        found = next((snapshot.metrics for snapshot in reversed(record.snapshots) if snapshot.metrics), ())
    return [view for view in found if not view.of_library]


def _user(pipeline: Pipeline, view: MetricView) -> Iterator[Sample]:
    labels = (*pipeline, view.step, view.namespace, view.name)
    if view.kind == "gauge":
        yield _sample("user_value", labels, view.value)
    elif view.kind == "counter":
        if view.value >= 0:  # Prometheus has no counters below 0
            yield _sample("user_counted", labels, view.value)
    elif view.count:
        yield _sample("user_distribution", labels, view.value, view.count)
        yield _sample("user_distribution_min", labels, view.min)
        yield _sample("user_distribution_max", labels, view.max)


def _sample(name: str, labels: tuple[str, ...], value: float, count: int = 0) -> Sample:
    metric = CATALOG[f"luminosity_{name}"]
    return Sample(metric, tuple(map(_label, labels)), float(value), count)


def _label(text: str) -> str:
    """Return a label without secrets. One that is cut ends with a digest, so that two of them stay apart."""
    clean = mask_text(printable(text))
    if len(clean) <= _LONGEST_LABEL:
        return clean
    return f"{clean[:_LABEL_BEFORE_DIGEST]}…{hashlib.sha256(clean.encode()).hexdigest()[:8]}"


def _known(name: str, labels: tuple[str, ...], value: float | None) -> Iterator[Sample]:
    if value is not None:
        yield _sample(name, labels, value)


def _positive(name: str, labels: tuple[str, ...], value: float) -> Iterator[Sample]:
    """Yield a value that is not known if it is 0."""
    if value:
        yield _sample(name, labels, value)
