"""The metrics of a folder of records as text for Prometheus: ``/metrics`` of the page, and a file for cron."""

from __future__ import annotations

import importlib.metadata
import os
import threading
import time
from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import TYPE_CHECKING

from luminosity.drift.history import DriftHistory, PastTest
from luminosity.errors import DriftError
from luminosity.extras import require
from luminosity.operate.cost.prices import load_prices
from luminosity.operate.exported.catalog import CATALOG
from luminosity.operate.exported.newest_runs import NewestRuns, PipelineRuns
from luminosity.operate.exported.samples import Sample, drift_samples, left_out_of, run_samples

if TYPE_CHECKING:
    from prometheus_client.metrics_core import Metric as Family

__all__ = ["ALERT_RULES", "DASHBOARD", "Exported", "Exporter", "metrics_text"]

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
