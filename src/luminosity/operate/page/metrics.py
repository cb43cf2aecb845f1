"""What Prometheus reads from the page's server."""

from __future__ import annotations

import threading
from pathlib import Path

from luminosity.operate.exported.text import Exported, Exporter
from luminosity.operate.page.drift_data import DriftFiles

__all__ = ["Metrics"]


class Metrics:
    """Exports the metrics of a folder of records. Its exporter, which remembers files, is made when it is needed."""

    def __init__(self, folder: Path, drift_files: DriftFiles, prices: str | None) -> None:
        self._folder = folder
        self._drift_files = drift_files
        self._prices = prices
        self._lock = threading.Lock()
        self._histories: tuple[str, ...] = ()
        self._exporter: Exporter | None = None

    def export(self, accept: str) -> Exported:
        """Return the metrics in the format that the header ``Accept`` prefers.

        Raises :class:`luminosity.errors.MissingExtra` if ``prometheus_client`` is not installed.
        """
        with self._lock:
            histories = self._drift_files.paths
            if self._exporter is None or histories != self._histories:
                self._exporter, self._histories = Exporter(self._folder, histories, self._prices), histories
            exporter = self._exporter
        return exporter.export(accept)
