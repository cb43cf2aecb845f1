"""The metrics of a folder of records as text for Prometheus: ``/metrics`` of the page, and a file for cron.

:func:`run_samples` says where each value comes from; its name and meaning are in the catalog.
"""

from __future__ import annotations

import importlib.metadata
import math
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING

from luminosity.drift.history import DriftHistory
from luminosity.drift.result import PastTest
from luminosity.errors import DriftError
from luminosity.events import InferenceView, KafkaView, MetricView, Snapshot, StageInfo, StageView, WorkerEnded
from luminosity.extras import require
from luminosity.operate.cost.bill import Bill, bill_of
from luminosity.operate.cost.prices import PriceSheet, load_prices
from luminosity.operate.prometheus.catalog import CATALOG, STATES, Sample, known, numbers, positive, sample_of
from luminosity.operate.prometheus.newest_runs import NewestRuns, Pipeline, PipelineRuns
from luminosity.runs.records import Record

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

__all__ = [
    "ALERT_RULES",
    "DASHBOARD",
    "MOST_OF_USER",
    "MOST_STAGES",
    "Exported",
    "Exporter",
    "drift_samples",
    "left_out_of",
    "metrics_text",
    "run_samples",
]
MOST_STAGES = 200  # of a pipeline; a page of more is unreadable
MOST_OF_USER = 100  # counters, gauges and distributions of a pipeline's own code


def run_samples(runs: PipelineRuns, prices: PriceSheet, now: float) -> Iterator[Sample]:
    """Yield the values of a pipeline's newest run. ``now`` is in seconds since 1970."""
    record, pipeline = runs.newest, (runs.pipeline, runs.folder)
    started_at = record.started.started_at
    for state in STATES:
        yield sample_of("run_state", (*pipeline, state), record.state == state)
    yield sample_of("running_runs", pipeline, len(runs.running))
    yield sample_of("run_start_timestamp_seconds", pipeline, started_at)
    yield from known("run_last_end_timestamp_seconds", pipeline, runs.last_end)
    yield from known("run_last_success_timestamp_seconds", pipeline, runs.last_success)
    if (failure := runs.last_failure) is not None:
        yield sample_of("run_last_failure_timestamp_seconds", (*pipeline, failure.run, runs.run_dir), failure.at)
    yield sample_of("run_info", (*pipeline, record.started.run, runs.run_dir), 1)
    for running in runs.running:
        yield from _stalls((*pipeline, running.started.run, runs.run_dir), running)
    last = record.last
    if last is None:
        return
    yield sample_of("run_last_update_timestamp_seconds", pipeline, started_at + last.seconds)
    yield sample_of("run_duration_seconds", pipeline, last.seconds)
    yield from known("run_remaining_seconds", pipeline, last.seconds_left)
    yield from numbers(last.processes, pipeline)
    yield from numbers(last.memory, pipeline)
    yield from _cost(pipeline, bill_of(record, prices))
    infos = {info.id: info for info in record.started.stages}
    # Since the last snapshot, a watermark has fallen behind further, even if the run does not say so any more.
    age = max(0.0, now - started_at - last.seconds) if record.state == "running" else 0.0
    for view in last.stages[:MOST_STAGES]:
        if (info := infos.get(view.id)) is not None:
            yield from _stage(pipeline, info, view, age)
    yield from _pools(pipeline, record, last)
    for device in last.devices:
        yield from numbers(device, (*pipeline, device.id))
    if (checkpoint := last.checkpoint) is not None:
        yield from numbers(checkpoint, pipeline)
        if checkpoint.last_at is not None:
            yield sample_of("checkpoint_last_timestamp_seconds", pipeline, started_at + checkpoint.last_at)
            yield sample_of("checkpoint_duration_seconds", pipeline, checkpoint.last_seconds)
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
            yield sample_of("drift_p_value", labels, test.p_value)
            yield sample_of("drift_level", labels, test.level)
        yield from known("drift_mmd2", labels, None if math.isnan(test.mmd2) else test.mmd2)
        yield from known("drift_effect", labels, None if math.isnan(test.size) else test.size)
        yield sample_of("drift_detected", labels, test.drift)
        yield sample_of("drift_rows", labels, test.current_rows)
        yield sample_of("drift_last_test_timestamp_seconds", labels, datetime.fromisoformat(test.time).timestamp())


def _stalls(labels: tuple[str, ...], record: Record) -> Iterator[Sample]:
    infos = {info.id: info for info in record.started.stages}
    for view in record.last.stages[:MOST_STAGES] if record.last is not None else ():
        if (info := infos.get(view.id)) is not None:
            yield from positive("run_stalled_seconds", (*labels, info.label), view.stalled_seconds)


def _cost(pipeline: Pipeline, bill: Bill) -> Iterator[Sample]:
    for bound, cost in (("low", bill.low), ("expected", bill.total), ("high", bill.high)):
        yield from known("run_cost", (*pipeline, bill.currency, bound), cost)
    for pool in bill.pools:
        yield sample_of("pool_cost", (*pipeline, pool.pool, bill.currency), pool.total)


def _stage(pipeline: Pipeline, info: StageInfo, view: StageView, age: float) -> Iterator[Sample]:
    labels = (*pipeline, info.label, info.pool)
    yield from numbers(view, labels)
    yield sample_of("stage_held_back", labels, view.status == "held back")
    for model in view.inference:
        yield from _model((*pipeline, info.label, model.step), model)
    for step in view.kafka:
        yield from _kafka(pipeline, step)
    if (stream := view.stream) is not None:
        of_stream = (*pipeline, info.label)
        if stream.behind_seconds is not None:
            yield sample_of("watermark_lag_seconds", of_stream, stream.behind_seconds + age)
        yield from numbers(stream, of_stream)


def _model(labels: tuple[str, ...], model: InferenceView) -> Iterator[Sample]:
    yield from numbers(model, labels)
    if model.requests:
        yield sample_of("model_requests", labels, model.requests)
        yield sample_of("model_retries", labels, model.retries)
        yield sample_of("model_throttled", labels, model.throttled)
        yield sample_of("model_retry_wait_seconds", labels, model.retry_wait_seconds)
    if model.padded_cost:
        yield sample_of("model_padding_ratio", labels, max(0.0, 1 - model.useful_cost / model.padded_cost))


def _kafka(pipeline: Pipeline, step: KafkaView) -> Iterator[Sample]:
    labels = (*pipeline, step.step)
    yield sample_of("kafka_records", (*labels, step.kind), step.records)
    yield sample_of("kafka_dead_letters", (*labels, step.kind), step.dead_letters)
    if step.kind == "read":
        yield sample_of("kafka_lost_records", labels, step.lost)
        if step.partitions:
            yield sample_of("kafka_lag_records", labels, step.lag)


def _pools(pipeline: Pipeline, record: Record, last: Snapshot) -> Iterator[Sample]:
    peaks: dict[str, int] = {}
    workers = [*last.workers, *(event for event in record.happenings if isinstance(event, WorkerEnded))]
    for worker in workers:
        peaks[worker.pool] = max(peaks.get(worker.pool, 0), worker.peak_resident)
    for pool in record.started.pools:
        labels = (*pipeline, pool.name)
        yield sample_of("pool_workers_limit", labels, pool.workers)
        yield from positive("worker_ram_bytes", labels, pool.ram_per_worker)
        yield from positive("worker_peak_resident_bytes", labels, peaks.get(pool.name, 0))
    for view in last.pools:
        yield from numbers(view, (*pipeline, view.name))


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
        yield sample_of("user_value", labels, view.value)
    elif view.kind == "counter":
        if view.value >= 0:  # Prometheus has no counters below 0
            yield sample_of("user_counted", labels, view.value)
    elif view.count:
        yield sample_of("user_distribution", labels, view.value, view.count)
        yield sample_of("user_distribution_min", labels, view.min)
        yield sample_of("user_distribution_max", labels, view.max)


ALERT_RULES = Path(__file__).with_name("alerts.yaml")  # for Prometheus
DASHBOARD = Path(__file__).with_name("dashboard.json")  # for Grafana
_MOST_PIPELINES = 50  # with these, stages and user metrics, Prometheus gets a bounded number of series
_READ_AT_ONCE = 25  # records: a large one takes 50 ms, and Prometheus waits for 10 s
_MOST_TESTS = 500  # of drift: one for each reference and key


@dataclass(frozen=True)
class Exported:
    """Metrics as text, with the media type that tells in which format."""

    text: str
    content_type: str


class Exporter:
    """Exports the newest run of each pipeline in a folder of records, and the newest tests for drift.

    It opens files when it is asked, and has no thread. Safe to use from several threads. Raises :class:`MissingExtra`
    when it is made if ``prometheus_client`` is not installed.

    >>> import tempfile
    >>> exporter = Exporter(Path(tempfile.mkdtemp()))
    >>> exporter.export().text.splitlines()[-1].partition("{")[0]
    'luminosity_build_info'
    """

    def __init__(
        self,
        folder: Path,
        histories: Sequence[str | os.PathLike[str]] = (),
        prices: str | None = None,
        read_at_once: int | None = _READ_AT_ONCE,
    ) -> None:
        """Make an exporter.

        ``histories`` are files of :class:`luminosity.DriftHistory`, which need not exist yet. ``prices`` is the file of
        a price sheet, by default the one that comes with the package. An export reads at most ``read_at_once`` records
        that are new to the exporter, the newest ones first, and the next export reads more; None sets no limit.
        """
        require("prometheus_client", "metrics")
        self._prices = load_prices(prices)
        self._runs = NewestRuns(folder, read_at_once)
        self._histories = tuple(histories)
        self._lock = threading.Lock()

    def export(self, accept: str = "") -> Exported:
        """Return the metrics now, in the format that a request's header ``Accept`` prefers.

        That is OpenMetrics if the header names it, and Prometheus' own text otherwise.
        """
        from prometheus_client import exposition

        encode, content_type = exposition.choose_encoder(accept)
        return Exported(encode(self).decode(), content_type)

    def collect(self) -> Iterator[Family]:
        """Yield the families of metrics. ``prometheus_client`` calls it."""
        with self._lock:
            samples = list(self._samples(time.time()))
        yield from _families(samples)

    def _samples(self, now: float) -> Iterator[Sample]:
        # If there are too many, those that have succeeded are left out first. The order of the others stays.
        runs = sorted(self._runs.look(), key=lambda each: not each.is_pressing)
        yield from (sample for each in runs[:_MOST_PIPELINES] for sample in run_samples(each, self._prices, now))
        tests, unread = self._tests()
        yield from drift_samples(tests[:_MOST_TESTS])
        left_out = {
            "pipelines": max(0, len(runs) - _MOST_PIPELINES),
            **_left_out(runs[:_MOST_PIPELINES]),
            "tests for drift": max(0, len(tests) - _MOST_TESTS),
            "damaged records": self._runs.damaged,
            "records not read yet": self._runs.not_read,
            "damaged histories": unread,
        }
        for what, count in left_out.items():
            yield Sample(CATALOG["luminosity_export_left_out"], (what,), count)
        yield Sample(CATALOG["luminosity_build_info"], (importlib.metadata.version("luminosity"),), 1.0)

    def _tests(self) -> tuple[list[PastTest], int]:
        """Return the newest tests in all histories, and how many histories can't be read."""
        found: list[PastTest] = []
        unread = 0
        for path in self._histories:
            try:
                if os.path.exists(path):
                    found += DriftHistory(path, read_only=True).newest()
            except DriftError:
                unread += 1
        return found, unread


def metrics_text(folder: Path, histories: Sequence[str | os.PathLike[str]] = (), prices: str | None = None) -> str:
    """Return the metrics of a folder of records in Prometheus' own text, once. See :class:`Exporter`."""
    return Exporter(folder, histories, prices, read_at_once=None).export().text


def _left_out(runs: Iterable[PipelineRuns]) -> dict[str, int]:
    total = {"stages": 0, "user metrics": 0}
    for each in runs:
        for what, count in left_out_of(each.newest).items():
            total[what] += count
    return total


def _families(samples: Iterable[Sample]) -> Iterator[Family]:
    """Yield samples by metric. Prometheus refuses a text with a series twice, so the first of equal ones counts."""
    from prometheus_client.metrics_core import CounterMetricFamily, GaugeMetricFamily, SummaryMetricFamily

    by_metric: dict[str, dict[tuple[str, ...], Sample]] = {}
    for sample in samples:
        by_metric.setdefault(sample.metric.name, {}).setdefault(sample.labels, sample)
    for name, metric in CATALOG.items():
        if name not in by_metric:
            continue
        if metric.kind == "summary":
            family = SummaryMetricFamily(name, metric.meaning, labels=metric.labels)
            for labels, sample in by_metric[name].items():
                family.add_metric(labels, count_value=sample.count, sum_value=sample.value)
        else:
            make = CounterMetricFamily if metric.kind == "counter" else GaugeMetricFamily
            family = make(name, metric.meaning, labels=metric.labels)
            for labels, sample in by_metric[name].items():
                family.add_metric(labels, sample.value)
        yield family
