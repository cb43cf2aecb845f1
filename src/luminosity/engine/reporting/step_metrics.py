"""What steps count in committed bundles: models, readers and writers of Kafka, and user code, as views."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Mapping, Sequence
from typing import Any, NamedTuple, TypeAlias

from apache_beam.metrics import monitoring_infos
from apache_beam.portability.api import metrics_pb2

from luminosity._shared.kafka_metrics import KafkaMetrics, bucket_counts, bucket_names, is_bucket, percentile_ms
from luminosity.core import InferenceMetrics, computed_by
from luminosity.engine.loop.metrics import RunMetrics
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.reporting.lag_watch import LagWatch
from luminosity.events import InferenceView, KafkaView, MetricView, ModelLoaded, ModelVersion, PartitionLag

__all__ = ["MOST_METRICS", "KafkaProgress", "LoadedModels", "Views", "inference_views", "user_metrics"]
_BUCKETS = bucket_names(InferenceMetrics.LATENCY) | bucket_names(InferenceMetrics.FIRST_TOKEN)
_NAMES = InferenceMetrics.ALL | _BUCKETS
_LEAST_BATCHES = 4  # for a line: fewer say more about chance than about the model
_LEAST_SPREAD = 0.02  # of the mean cost: the standard deviation of costs from which a line can be told
_MOST_LOADS = 20  # events at once, of one model
_NOTHING = InferenceView("")
Views: TypeAlias = Mapping[str, tuple[InferenceView, ...]]
"""The views of the models of each stage, by its id."""


def inference_views(stage: StageRun, metrics: RunMetrics) -> tuple[InferenceView, ...]:
    """Return a view for each model of a stage that has counted batches. Each model of a step has its own namespace."""
    by_step = metrics.counters(stage.id, _NAMES)
    worker_seconds = round(stage.busy.first_to_last_seconds * stage.pool.most_workers(), 3)
    return tuple(
        _view(
            step if len(by_namespace) == 1 else _model_step(step, namespace),
            counters,
            worker_seconds,
            bool(stage.pool.plan.device_groups),
        )
        for step, by_namespace in by_step.items()
        for namespace, counters in sorted(by_namespace.items())
        if counters.get(InferenceMetrics.BATCHES) or _is_refused(counters)
    )


def _is_refused(counters: Mapping[str, int]) -> bool:
    """Return whether a model's server has answered no request so far."""
    return bool(counters.get(InferenceMetrics.LOADS) and counters.get(InferenceMetrics.REQUESTS))


def _model_step(step: str, namespace: str) -> str:
    """Name the step after one model, if it is named after all of its models.

    >>> _model_step("Enrich/Infer language, tone", "tone")
    'Enrich/Infer tone'
    """
    parent, slash, label = step.rpartition("/")
    return f"{parent}{slash}{label.partition(' ')[0]} {namespace}"


def _view(step: str, counters: dict[str, int], worker_seconds: float, has_device: bool) -> InferenceView:
    def count(name: str) -> int:
        return counters.get(name, 0)

    def seconds(name: str) -> float:
        return round(count(name) / 1e6, 6)

    loads = count(InferenceMetrics.LOADS)
    fixed_seconds, seconds_per_cost = _line(counters)
    times = bucket_counts(counters, InferenceMetrics.LATENCY)
    first_tokens = bucket_counts(counters, InferenceMetrics.FIRST_TOKEN)
    return InferenceView(
        step,
        inferences=count(InferenceMetrics.EXAMPLES),
        batches=count(InferenceMetrics.BATCHES),
        useful_cost=count(InferenceMetrics.USEFUL_COST),
        padded_cost=count(InferenceMetrics.PADDED_COST),
        budget_cost=count(InferenceMetrics.BUDGET_COST),
        queue_wait_seconds=seconds(InferenceMetrics.QUEUE_WAIT),
        prepare_seconds=seconds(InferenceMetrics.PREPARE),
        collate_seconds=seconds(InferenceMetrics.COLLATE),
        transfer_seconds=seconds(InferenceMetrics.TRANSFER),
        compute_seconds=seconds(InferenceMetrics.COMPUTE),
        return_seconds=seconds(InferenceMetrics.RETURN),
        device_busy_seconds=seconds(InferenceMetrics.DEVICE_BUSY),
        worker_seconds=worker_seconds,
        out_of_memory=count(InferenceMetrics.OUT_OF_MEMORY),
        loads=loads,
        load_seconds=seconds(InferenceMetrics.LOAD),
        model_bytes=count(InferenceMetrics.MODEL_BYTES) // loads if loads else 0,
        fixed_seconds=fixed_seconds,
        seconds_per_cost=seconds_per_cost,
        runs_on="server" if count(InferenceMetrics.REQUESTS) else "device" if has_device else "worker",
        computed_by=computed_by(counters),
        cut_texts=count(InferenceMetrics.CUT_TEXTS),
        requests=count(InferenceMetrics.REQUESTS),
        retries=count(InferenceMetrics.RETRIES),
        hedges=count(InferenceMetrics.HEDGES),
        throttled=count(InferenceMetrics.THROTTLED),
        retry_wait_seconds=seconds(InferenceMetrics.RETRY_WAIT),
        limit_wait_seconds=seconds(InferenceMetrics.LIMIT_WAIT),
        prompt_tokens=count(InferenceMetrics.PROMPT_TOKENS),
        new_tokens=count(InferenceMetrics.NEW_TOKENS),
        cached_prompt_tokens=count(InferenceMetrics.CACHED_TOKENS),
        cost=round(count(InferenceMetrics.COST) / 1e9, 9),
        cached_answers=count(InferenceMetrics.CACHED_ANSWERS),
        repeated_prompts=count(InferenceMetrics.REPEATED_PROMPTS),
        batch_p50_ms=percentile_ms(times, 0.5),
        batch_p99_ms=percentile_ms(times, 0.99),
        first_token_p50_ms=percentile_ms(first_tokens, 0.5),
        first_token_p99_ms=percentile_ms(first_tokens, 0.99),
    )


def _line(counters: Mapping[str, int]) -> tuple[float, float]:
    """Return the line of least squares through the times of batches over their padded cost: at 0, and by unit.

    Both are 0 if there were too few batches, or if their costs were too alike to tell them apart.

    >>> costs = [10, 20, 40, 80]
    >>> micros = [500 + 7 * cost for cost in costs]
    >>> sums = {"line_batches": 4, "line_cost": sum(costs), "line_micro_secs": sum(micros)}
    >>> squares, products = sum(c * c for c in costs), sum(c * m for c, m in zip(costs, micros))
    >>> _line({**sums, "line_cost_squared": squares, "line_cost_micro_secs": products})
    (0.0005, 7e-06)
    """

    def large(name: str) -> int:
        return counters.get(name, 0) + (counters.get(name + InferenceMetrics.HIGH, 0) << 32)

    batches, cost = counters.get(InferenceMetrics.LINE_BATCHES, 0), counters.get(InferenceMetrics.LINE_COST, 0)
    micros = counters.get(InferenceMetrics.LINE_SECONDS, 0)
    spread = batches * large(InferenceMetrics.LINE_COST_SQUARED) - cost * cost
    if batches < _LEAST_BATCHES or spread <= (_LEAST_SPREAD * cost) ** 2:
        return 0.0, 0.0
    by_cost = (batches * large(InferenceMetrics.LINE_PRODUCT) - cost * micros) / spread
    by_cost = min(max(by_cost, 0.0), micros / cost)  # neither part can be below 0
    return float(f"{(micros - by_cost * cost) / batches / 1e6:.6g}"), float(f"{by_cost / 1e6:.6g}")


class LoadedModels:
    """Finds loads of models in the views of stages, to report each as an event."""

    def __init__(self, models: Iterable[ModelVersion], before: Views) -> None:
        """``models`` are the registered ones, whose names are known. Loads in ``before`` are of an earlier start."""
        self._names = {model.step: model.name for model in models}
        self._known = {(stage, view.step): view for stage, views in before.items() for view in views}

    def news(self, run: str, seconds: float, now: Views) -> list[ModelLoaded]:
        """Return an event for each load since the last call. Loads of a model at the same time have their mean time."""
        found: list[ModelLoaded] = []
        for stage, views in now.items():
            for view in views:
                before = self._known.get((stage, view.step), _NOTHING)
                new = view.loads - before.loads
                if new > 0:
                    mean = round((view.load_seconds - before.load_seconds) / new, 3)
                    event = ModelLoaded(
                        run,
                        seconds,
                        view.step,
                        self._names.get(view.step, ""),
                        load_seconds=mean,
                        model_bytes=view.model_bytes,
                    )
                    found += [event] * min(new, _MOST_LOADS)
                self._known[stage, view.step] = view
        return found


MOST_METRICS = 200  # of a run, so that its record stays small
_LIBRARIES = ("apache_beam.", "BeamML", "luminosity")  # how namespaces of their counters begin
_NAMESPACES = frozenset(
    {"DetectDrift", "MMDTest", "ReadTable", "WriteTable", KafkaMetrics.READ, KafkaMetrics.WRITE}
    | {"BatchElements", "RunInference"}  # of Beam
)
_Info = metrics_pb2.MonitoringInfo


def user_metrics(by_stage: Mapping[str, Sequence[_Info]], steps: Iterable[str]) -> list[MetricView]:
    """Return counters, distributions and gauges of committed bundles, in the order of ``steps``, then by name.

    Those of libraries come last. The counters of steps that run models are left out: they are shown as rates and
    shares, see ``InferenceView``. So are the buckets of times of Kafka, see ``KafkaView``.
    """
    places = {step: place for place, step in enumerate(steps)}
    views = [view for infos in by_stage.values() for info in _without_models(infos) if (view := _metric_view(info))]
    last = len(places)
    return sorted(views, key=lambda v: (v.of_library, places.get(v.step, last), v.step, v.namespace, v.name))


def _without_models(infos: Sequence[_Info]) -> Iterable[_Info]:
    """Leave out what a step that runs a model counts: all of a namespace with the counter of its batches or loads."""
    of_models = {
        (_label(info, "PTRANSFORM"), _label(info, "NAMESPACE"))
        for info in infos
        if _label(info, "NAME") in (InferenceMetrics.DEVICE_BUSY, InferenceMetrics.LOAD)
    }
    return [i for i in infos if (_label(i, "PTRANSFORM"), _label(i, "NAMESPACE")) not in of_models]


def _metric_view(info: _Info) -> MetricView | None:
    namespace = _label(info, "NAMESPACE")
    of_library = namespace in _NAMESPACES or namespace.startswith(_LIBRARIES)
    names = _label(info, "PTRANSFORM"), namespace, _label(info, "NAME"), of_library
    if is_bucket(namespace, _label(info, "NAME")):
        return None
    if info.urn == monitoring_infos.USER_COUNTER_URN:
        return MetricView("counter", *names, value=int(_extracted(monitoring_infos.extract_counter_value, info)))
    if info.urn == monitoring_infos.USER_DISTRIBUTION_URN:
        count, total, least, most = _extracted(monitoring_infos.extract_distribution, info)
        if not count:
            return None
        return MetricView("distribution", *names, value=int(total), count=int(count), min=int(least), max=int(most))
    if info.urn == monitoring_infos.USER_GAUGE_URN:
        _, value = _extracted(monitoring_infos.extract_gauge_value, info)
        return MetricView("gauge", *names, value=int(value))
    return None


def _extracted(extract: Any, info: _Info) -> Any:
    return extract(info)


def _label(info: _Info, name: str) -> str:
    return info.labels.get(name, "")


_KAFKA_NAMESPACES = frozenset({KafkaMetrics.READ, KafkaMetrics.WRITE})
_WINDOW_S = 60.0  # what "now" covers: long enough for a percentile, short enough to follow changes
_POINT_EVERY_S = 2.0  # bounds the number of points
_MOST_LAGS = 5  # partitions named in a snapshot


class _Point(NamedTuple):
    seconds: float  # since the run's start
    records: int
    bytes: int
    times: Mapping[int, int]  # counts by bucket


class KafkaProgress:
    """Tracks the steps of a stage that read or write Kafka. Only the loop's thread uses it."""

    def __init__(self, stage: str, metrics: RunMetrics, watch: LagWatch | None = None) -> None:
        """``watch`` knows how far partitions go now."""
        self._stage = stage
        self._metrics = metrics
        self._watch = watch
        self._steps: dict[tuple[str, str], _Step] = {}

    def update(self, seconds: float) -> None:
        """Take the metrics that were committed up to ``seconds`` after the run's start."""
        for key, numbers in self._metrics.numbers(self._stage, _KAFKA_NAMESPACES).items():
            if key not in self._steps:
                self._steps[key] = _Step(*key, self._watch)
            self._steps[key].reached(seconds, numbers)

    def views(self, seconds: float, *, is_last: bool = False) -> tuple[KafkaView, ...]:
        """Return a view for each step: of the last minute, or of the whole run if it is the last one."""
        return tuple(step.view(seconds, is_last) for _, step in sorted(self._steps.items()))


class _Step:
    def __init__(self, step: str, namespace: str, watch: LagWatch | None) -> None:
        self._step = step
        self._watch = watch
        self._name = _partition_label(step)
        self._is_read = namespace == KafkaMetrics.READ
        self._points: deque[_Point] = deque([_Point(0.0, 0, 0, {})])
        self._numbers: Mapping[str, int] = {}
        self._now = self._points[0]

    def reached(self, seconds: float, numbers: Mapping[str, int]) -> None:
        is_read = self._is_read
        self._numbers = numbers
        self._now = _Point(
            seconds,
            numbers.get(KafkaMetrics.RECORDS_READ if is_read else KafkaMetrics.RECORDS_WRITTEN, 0),
            numbers.get(KafkaMetrics.BYTES_READ if is_read else KafkaMetrics.BYTES_WRITTEN, 0),
            bucket_counts(numbers, KafkaMetrics.AGE if is_read else KafkaMetrics.LATENCY),
        )
        if seconds - self._points[-1].seconds >= _POINT_EVERY_S:
            self._points.append(self._now)

    def view(self, seconds: float, is_last: bool) -> KafkaView:
        now, numbers = self._now, self._numbers
        before = _Point(0.0, 0, 0, {}) if is_last else self._minute_ago(seconds)
        elapsed = max(1e-9, seconds - (before.seconds if is_last else max(before.seconds, seconds - _WINDOW_S)))
        times = {bucket: count - before.times.get(bucket, 0) for bucket, count in now.times.items()}
        lags = [PartitionLag(name, lag) for name, lag in self._lags(is_last).items()]
        lags.sort(key=lambda each: (-each.records, each.partition))
        letters = KafkaMetrics.RECORDS_UNREADABLE if self._is_read else KafkaMetrics.RECORDS_UNWRITTEN
        return KafkaView(
            self._name,
            "read" if self._is_read else "write",
            records=now.records,
            bytes=now.bytes,
            records_per_second=round((now.records - before.records) / elapsed, 2),
            bytes_per_second=round((now.bytes - before.bytes) / elapsed, 1),
            dead_letters=numbers.get(letters, 0),
            lost=numbers.get(KafkaMetrics.RECORDS_LOST, 0),
            p50_ms=percentile_ms(times, 0.5),
            p99_ms=percentile_ms(times, 0.99),
            lag=sum(each.records for each in lags),
            partitions=len(lags),
            lags=tuple(lags if is_last else [each for each in lags[:_MOST_LAGS] if each.records]),
        )

    def _lags(self, is_last: bool) -> dict[str, int]:
        """Return how many offsets wait in each partition: now, or when the last bundle ended if no broker answers."""
        lags = _named(self._numbers, KafkaMetrics.LAG)
        positions = _named(self._numbers, KafkaMetrics.POSITION)
        if self._watch is not None:
            ends = self._watch.ends(self._step, list(positions), is_last=is_last)
            lags |= {name: max(0, end - positions[name]) for name, end in ends.items() if name in positions}
        return lags

    def _minute_ago(self, seconds: float) -> _Point:
        """Return the last point before the minute, and forget those before it."""
        while len(self._points) > 1 and self._points[1].seconds <= seconds - _WINDOW_S:
            self._points.popleft()
        return self._points[0]


def _named(numbers: Mapping[str, int], prefix: str) -> dict[str, int]:
    return {name.removeprefix(prefix): number for name, number in numbers.items() if name.startswith(prefix)}


def _partition_label(step: str) -> str:
    """Return the name that the transform has in the pipeline, without its inner steps.

    >>> _partition_label("Live/Read reviews/Read/Process"), _partition_label("Publish/Write")
    ('Live/Read reviews', 'Publish')
    """
    return step.removesuffix("/Process").removesuffix("/Read").removesuffix("/Write")
