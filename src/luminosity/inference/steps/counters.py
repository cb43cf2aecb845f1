"""The metrics of RunInference: Beam's own, with the same names, and the host's."""

from __future__ import annotations

from collections import Counter
from collections.abc import Sequence
from typing import Any

import numpy as np
from apache_beam.metrics import Metrics
from apache_beam.ml.inference.base import _MetricsCollector  # pyright: ignore[reportPrivateUsage]

from luminosity._shared.kafka_metrics import TimeCounters
from luminosity.core import InferenceMetrics
from luminosity.inference.handler import Handler
from luminosity.inference.host.model import LoadStats
from luminosity.inference.host.work import BatchStats

__all__ = ["StepCounters"]

_FIRST_BATCHES = 2  # of a worker: they take longer, since libraries and devices prepare themselves


class StepCounters:
    """Counts the work of one model. Call it on a bundle's thread: Beam finds the step by the thread."""

    def __init__(self, handler: Handler[Any, Any, Any], namespace: str, prefixes: Sequence[str]) -> None:
        """``prefixes``: for each, a set of Beam's own counters, whose names begin with it, counts everything."""
        overridden = handler.override_metrics(namespace)
        self._beam = [] if overridden else [_MetricsCollector(namespace, prefix) for prefix in prefixes]
        self._namespace = namespace
        self._times = TimeCounters(namespace, InferenceMetrics.LATENCY)
        self._batches = 0

    def prepared(self, seconds: float) -> None:
        """Count the time of preparing a block."""
        self._add_seconds(InferenceMetrics.PREPARE, seconds)

    def update(self, batches: list[BatchStats], loads: list[LoadStats]) -> None:
        """Count batches and loads."""
        for beam in self._beam:
            self._update_beam(beam, batches, loads)
        self._add(InferenceMetrics.LOADS, len(loads))
        self._add(InferenceMetrics.LOAD, sum(load.milli_secs for load in loads) * 1000)
        self._add(InferenceMetrics.MODEL_BYTES, sum(load.num_bytes // load.copies for load in loads))
        noted = Counter[str]()
        for batch in batches:
            noted.update(batch.notes)
        for name, amount in noted.items():
            self._add(name, amount)
        done = [batch for batch in batches if not batch.failed]
        self._add(InferenceMetrics.OUT_OF_MEMORY, sum(batch.out_of_memory for batch in batches))
        if not done:
            return
        self._add(InferenceMetrics.EXAMPLES, sum(batch.count for batch in done))
        self._add(InferenceMetrics.BATCHES, len(done))
        self._add(InferenceMetrics.USEFUL_COST, sum(batch.useful for batch in done))
        self._add(InferenceMetrics.PADDED_COST, sum(batch.padded for batch in done))
        self._add(InferenceMetrics.BUDGET_COST, sum(max(batch.budget, batch.padded) for batch in done))
        self._add_seconds(InferenceMetrics.QUEUE_WAIT, sum(batch.waited for batch in done))
        self._add_seconds(InferenceMetrics.COLLATE, sum(batch.collate for batch in done))
        self._add_seconds(InferenceMetrics.TRANSFER, sum(batch.transfer for batch in done))
        self._add_seconds(InferenceMetrics.COMPUTE, sum(batch.compute for batch in done))
        self._add_seconds(InferenceMetrics.RETURN, sum(batch.collect for batch in done))
        self._add_seconds(InferenceMetrics.DEVICE_BUSY, sum(batch.busy for batch in done))
        self._times.count(np.array([batch.latency_micro_secs // 1000 for batch in done]))
        self._update_line(done[max(0, _FIRST_BATCHES - self._batches) :])
        self._batches += len(done)

    def _update_line(self, batches: list[BatchStats]) -> None:
        """Count the sums of which the line of least squares through the batches' times is made."""
        points = [(round(batch.padded), round(batch.busy * 1e6)) for batch in batches]
        self._add(InferenceMetrics.LINE_BATCHES, len(points))
        self._add(InferenceMetrics.LINE_COST, sum(cost for cost, _ in points))
        self._add(InferenceMetrics.LINE_SECONDS, sum(micros for _, micros in points))
        self._add_large(InferenceMetrics.LINE_COST_SQUARED, sum(cost * cost for cost, _ in points))
        self._add_large(InferenceMetrics.LINE_PRODUCT, sum(cost * micros for cost, micros in points))

    def _update_beam(self, beam: _MetricsCollector, batches: list[BatchStats], loads: list[LoadStats]) -> None:
        for load in loads:
            beam.update_load_model_metrics(load.milli_secs, load.num_bytes)
        for batch in batches:
            if batch.failed:
                beam.failed_batches_counter.inc()
            else:
                beam.update(batch.count, batch.num_bytes, batch.latency_micro_secs)

    def _add(self, name: str, amount: float) -> None:
        if amount:
            Metrics.counter(self._namespace, name).inc(int(amount))

    def _add_large(self, name: str, amount: int) -> None:
        high, low = divmod(amount, 1 << 32)
        self._add(name, low)
        self._add(name + InferenceMetrics.HIGH, high)

    def _add_seconds(self, name: str, seconds: float) -> None:
        self._add(name, seconds * 1e6)
