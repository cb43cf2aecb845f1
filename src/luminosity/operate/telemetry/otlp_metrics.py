"""The metrics of a run's newest state for OTLP: the samples that Prometheus gets, in OpenTelemetry's form."""

from __future__ import annotations

import importlib.metadata
import threading
import time
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from luminosity.events import Event, RunEnded, RunStarted, Snapshot, WorkerEnded, WorkerLost, WorkerStarted
from luminosity.operate.cost.prices import PriceSheet, load_prices
from luminosity.operate.prometheus.catalog import Sample, sample_of
from luminosity.operate.prometheus.exporter import left_out_of, run_samples
from luminosity.operate.prometheus.newest_runs import Failure, PipelineRuns
from luminosity.runs import records
from luminosity.runs.records import Record

if TYPE_CHECKING:
    from opentelemetry.sdk.metrics.export import Metric, MetricsData
    from opentelemetry.sdk.resources import Resource
    from opentelemetry.sdk.util.instrumentation import InstrumentationScope

__all__ = ["OtlpMetrics"]

_MOST_OF_WORKERS = 1000  # starts and ends of workers, for the bill and the memory of pools


class OtlpMetrics:
    """Keeps the newest state of one run. One thread calls :meth:`take`, another one :meth:`collect`."""

    def __init__(self, resource: Resource, scope: InstrumentationScope, run_dir: str | None) -> None:
        self._resource = resource
        self._scope = scope
        folder = records.folder(run_dir)
        self._run_dir = "" if folder is None else str(folder.absolute())
        self._prices = load_prices(None)
        self._lock = threading.Lock()
        self._started: RunStarted | None = None
        self._counted: Snapshot | None = None  # the last snapshot with metrics of user code
        self._last: Snapshot | None = None
        self._ended: RunEnded | None = None
        self._workers: deque[Event] = deque(maxlen=_MOST_OF_WORKERS)

    def take(self, event: Event) -> None:
        """Take an event into account."""
        with self._lock:
            if isinstance(event, RunStarted):
                self._started = event
            elif isinstance(event, Snapshot):
                self._last = event
                self._counted = event if event.metrics else self._counted
            elif isinstance(event, WorkerStarted | WorkerEnded | WorkerLost):
                self._workers.append(event)
            elif isinstance(event, RunEnded):
                self._ended = event

    def collect(self) -> MetricsData | None:
        """Return the metrics now; None if the run has not started yet."""
        with self._lock:
            if self._started is None:
                return None
            snapshots = tuple(each for each in (self._counted, self._last) if each is not None)
            record = Record(self._started, tuple(self._workers), 0, snapshots, self._ended, is_alive=True)
        samples = _samples(record, self._prices, self._run_dir, time.time())
        return self._data(samples, record.started.started_at)

    def _data(self, samples: Iterable[Sample], started_at: float) -> MetricsData:
        from opentelemetry.sdk.metrics.export import MetricsData, ResourceMetrics, ScopeMetrics

        by_name: dict[str, dict[tuple[str, ...], Sample]] = {}
        for sample in samples:
            by_name.setdefault(sample.metric.name, {}).setdefault(sample.labels, sample)
        start, now = int(started_at * 1e9), time.time_ns()
        metrics = [_metric(name, by_name, start, now) for name in by_name]
        scope = ScopeMetrics(self._scope, metrics, schema_url="")
        return MetricsData([ResourceMetrics(self._resource, [scope], schema_url="")])


def _samples(record: Record, prices: PriceSheet, run_dir: str, now: float) -> Iterator[Sample]:
    """Yield what the exporter for Prometheus would say of this run alone."""
    end = None if record.ended is None else record.started.started_at + record.ended.seconds
    failure = Failure(record.started.run, end) if end is not None and record.state == "failed" else None
    runs = PipelineRuns(
        record,
        (record,) if end is None else (),
        last_end=end,
        last_success=end if record.state in ("done", "drained") else None,
        last_failure=failure,
        run_dir=run_dir,
    )
    yield from run_samples(runs, prices, now)
    for what, count in left_out_of(record).items():
        yield sample_of("export_left_out", (what,), count)
    yield sample_of("build_info", (importlib.metadata.version("luminosity"),), 1.0)


def _metric(name: str, by_name: dict[str, dict[tuple[str, ...], Sample]], start: int, now: int) -> Metric:
    """Return all series of a metric. Times are nanoseconds since 1970."""
    from opentelemetry.sdk.metrics.export import (
        AggregationTemporality,
        Gauge,
        Histogram,
        HistogramDataPoint,
        Metric,
        NumberDataPoint,
        Sum,
    )

    samples = list(by_name[name].values())
    metric = samples[0].metric
    labels = [dict(zip(metric.labels, sample.labels, strict=True)) for sample in samples]
    if metric.kind == "summary":  # OpenTelemetry's library has no summaries; without buckets, a histogram is one
        bounds = [[by_name[f"{name}_{bound}"][sample.labels].value for bound in ("min", "max")] for sample in samples]
        data = Histogram(
            [
                HistogramDataPoint(each, start, now, sample.count, sample.value, [], [], least, most)
                for each, sample, (least, most) in zip(labels, samples, bounds, strict=True)
            ],
            AggregationTemporality.CUMULATIVE,
        )
        return Metric(name, metric.meaning, "", data)
    points = [NumberDataPoint(each, start, now, sample.value) for each, sample in zip(labels, samples, strict=True)]
    if metric.kind == "counter":
        return Metric(name, metric.meaning, "", Sum(points, AggregationTemporality.CUMULATIVE, is_monotonic=True))
    return Metric(name, metric.meaning, "", Gauge(points))
