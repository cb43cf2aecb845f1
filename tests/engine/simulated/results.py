"""How simulated pipelines tell what they give: as metrics, which a run commits with its bundles."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import dataclass, field
from typing import Any

import apache_beam as beam
from apache_beam.metrics import Metrics
from apache_beam.metrics.monitoring_infos import (
    NAME_LABEL,
    NAMESPACE_LABEL,
    extract_counter_value,
    extract_string_set_value,
)
from apache_beam.portability.api import metrics_pb2

from tests.engine.simulated.steps import WORLD

__all__ = ["Finalize", "Tell", "Told", "told"]

_OUTPUT = "output"  # the namespace of the metrics


class Finalize(beam.DoFn):
    """Passes numbers on, and tells when their bundle is final. Only bundles that count may become final."""

    def start_bundle(self) -> None:
        self._number = 0

    def process(self, element: int, finalizer: Any = beam.DoFn.BundleFinalizerParam) -> Iterable[int]:
        WORLD.meet()
        if not self._number:
            WORLD.told += 1
            number = self._number = WORLD.told
            finalizer.register(lambda: WORLD.finalized.append(number))
            Metrics.string_set(_OUTPUT, "to finalize").add(str(number))
        return (element,)


class Tell(beam.DoFn):
    """Tells each result by its value, time and window, as metrics: those of committed bundles count once.

    All results of a bundle are one string of a set, which is far less work than a counter for each. The number makes
    the strings of two bundles differ; the counter tells if a bundle is committed twice.
    """

    def start_bundle(self) -> None:
        self._told: list[str] = []

    def process(
        self, element: int, at: Any = beam.DoFn.TimestampParam, inside: Any = beam.DoFn.WindowParam
    ) -> Iterable[int]:
        self._told.append(f"{element} {at.micros // 1000} {inside}")
        return ()

    def finish_bundle(self) -> None:
        if self._told:
            WORLD.told += 1
            Metrics.string_set(_OUTPUT, "results").add("\n".join([str(WORLD.told), *self._told]))
            Metrics.counter(_OUTPUT, "count").inc(len(self._told))


@dataclass
class Told:
    """What the committed bundles of a run have told."""

    results: Counter[str] = field(default_factory=Counter[str])
    count: int = 0  # of results
    to_finalize: set[int] = field(default_factory=set[int])  # numbers of bundles


def told(infos: Iterable[metrics_pb2.MonitoringInfo]) -> Told:
    """Return what :class:`Tell` and :class:`Finalize` have told."""
    found = Told()
    for info in infos:
        if info.labels.get(NAMESPACE_LABEL) != _OUTPUT:
            continue
        name = info.labels[NAME_LABEL]
        if name == "count":
            found.count += extract_counter_value(info)
        elif name == "results":
            for bundle in extract_string_set_value(info):
                found.results.update(bundle.split("\n")[1:])
        else:
            found.to_finalize |= {int(number) for number in extract_string_set_value(info)}
    return found
