"""Metrics of committed bundles, merged."""

from __future__ import annotations

import threading
from collections.abc import Iterable

from apache_beam.metrics import monitoring_infos
from apache_beam.portability.api import metrics_pb2

_MERGE_EVERY = 256


class RunMetrics:
    """Counts only what was committed: a bundle that was tried again counts once."""

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._by_stage: dict[str, list[metrics_pb2.MonitoringInfo]] = {}

    def add(self, stage: str, infos: Iterable[metrics_pb2.MonitoringInfo]) -> None:
        with self._lock:
            known = self._by_stage.setdefault(stage, [])
            known.extend(infos)
            if len(known) > _MERGE_EVERY:
                known[:] = _merged(known)

    def by_stage(self) -> dict[str, list[metrics_pb2.MonitoringInfo]]:
        with self._lock:
            return {stage: _merged(known) for stage, known in self._by_stage.items()}


def _merged(infos: list[metrics_pb2.MonitoringInfo]) -> list[metrics_pb2.MonitoringInfo]:
    # Beam leaves types that it can't combine side by side; of those the latest counts.
    merged = {monitoring_infos.to_key(info): info for info in monitoring_infos.consolidate(infos)}
    return list(merged.values())
