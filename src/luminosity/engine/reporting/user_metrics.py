"""The metrics that user code counts with ``beam.metrics.Metrics``, as plain data for views and records."""

from __future__ import annotations

from collections.abc import Iterable, Mapping, Sequence
from typing import Any

from apache_beam.metrics import monitoring_infos
from apache_beam.portability.api import metrics_pb2

from luminosity._shared.kafka_metrics import KafkaMetrics, is_bucket
from luminosity.core import InferenceMetrics
from luminosity.events import MetricView

__all__ = ["MOST_METRICS", "user_metrics"]

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
    views = [view for infos in by_stage.values() for info in _without_models(infos) if (view := _view(info))]
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


def _view(info: _Info) -> MetricView | None:
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
