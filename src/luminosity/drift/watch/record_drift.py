"""Records the results of tests in a pipeline: one row of a history for each key and window."""

from __future__ import annotations

import logging
import math
import os
import uuid
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timezone
from functools import partial
from typing import Any

import apache_beam as beam
from apache_beam.metrics import Metrics
from apache_beam.transforms.window import IntervalWindow, WindowedValue

from luminosity.drift.by_key import key_text
from luminosity.drift.history import MOST_ROWS, DriftHistory
from luminosity.drift.mmd.mmd_result import MMDTestResult
from luminosity.drift.online.detect_drift import DriftAlert
from luminosity.drift.report.page import Contents, page, write_report_of_point
from luminosity.drift.result import DETECTOR, DriftResult, PastTest, utc_text
from luminosity.errors import DriftError
from luminosity.report_page.document import write_page

__all__ = ["RecordDrift"]

_LOGGER = logging.getLogger(__name__)
_MOST_BUFFERED = 1000  # rows of a bundle in memory; more are written in several transactions
_SAME_BANDWIDTH = 1e-6  # relative difference: float32 and rounding on other machines


class RecordDrift(beam.PTransform[Any, Any]):
    """Writes the results of a test, or the alerts of ``DetectDrift``, into a history, and returns the rows.

    Tests are ``MMDTest``, ``ColumnTest``, and any other whose results are a ``DriftResult``.

    There is one row for each key and window. A bundle that is repeated, or a run over the same windows, replaces rows
    instead of adding them. In the global window, each run of the pipeline adds a row for each key. Processes and
    machines may write at the same time, if all of them see the file: on a cluster, put it on a shared disk, or write
    the rows that this transform returns to a place of your own.

    >>> import tempfile
    >>> import numpy as np
    >>> from luminosity.drift import RBF, MMDTest
    >>> random = np.random.default_rng(0)
    >>> reference, current = random.normal(size=(200, 3)), random.normal(1, 1, size=(200, 3))
    >>> path = os.path.join(tempfile.mkdtemp(), "drift.sqlite")
    >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:
    ...     results = pipeline | beam.Create(list(current)) | MMDTest(reference, RBF(2.0))
    ...     _ = results | RecordDrift(path, reference="january", bandwidth=2.0)
    >>> [(test.reference, test.drift, test.bandwidth) for test in DriftHistory(path).last("january")]
    [('january', True, 2.0)]

    Args:
        history: the SQLite file, which is created if it does not exist. Its folder must exist.
        reference: the name of the reference, the same in each run: it says which rows can be compared.
        columns: the names of the tested columns, for people.
        current: the name of the current sample, for people.
        by: what keys are, such as ``language``; a key is then recorded as ``language=de``.
        bandwidth: the bandwidth of the kernel whose MMD² is recorded, so that rows can be compared over time: pass the
            same to ``MMDTest`` as ``RBF(bandwidth)``. A result without this bandwidth is an error. Without it, the
            result's own MMD² is recorded, and a warning says if its bandwidth changes from row to row.
        reports: a folder for an HTML page about each test that found drift. It keeps the newest 1,000.
        limit: the most rows of repeated tests in the file; the oldest are deleted.

    Counters: ``rows``, ``drifted``, ``changed_bandwidths``.
    """

    def __init__(
        self,
        history: str | os.PathLike[str],
        *,
        reference: str,
        columns: str = "",
        current: str = "",
        by: str = "",
        bandwidth: float | None = None,
        reports: str | os.PathLike[str] | None = None,
        limit: int = MOST_ROWS,
    ) -> None:
        super().__init__()
        path = os.fspath(history)
        if "://" in path:
            raise DriftError(
                f"found history={path!r}, expected a file on a disk that all workers see: SQLite needs its locks",
                fix="record to a shared disk, or write the rows that RecordDrift returns to a table",
            )
        if bandwidth is not None and not 0 < bandwidth < math.inf:
            raise DriftError(f"found bandwidth={bandwidth!r}, expected a positive number")
        if not reference:
            raise DriftError("found an empty reference, expected its name, the same in each run")
        DriftHistory(path, limit=limit)  # Errors now, not in a worker.
        self._write = _WriteRows(
            os.path.abspath(path),
            limit,
            _RowMaker(reference, columns, current, by, bandwidth, os.path.abspath(reports) if reports else None),
        )

    def expand(self, input_or_inputs: Any) -> Any:
        """Write each element's row at the end of its bundle."""
        return input_or_inputs | "Write" >> beam.ParDo(self._write).with_output_types(PastTest)


class _RowMaker:
    """Makes rows from elements."""

    def __init__(
        self, reference: str, columns: str, current: str, by: str, bandwidth: float | None, reports: str | None
    ) -> None:
        self._reference = reference
        self._columns = columns
        self._current = current
        self._by = by
        self._bandwidth = bandwidth
        self._reports = reports
        self._kernel = "mmd" if bandwidth is None else f"rbf({bandwidth:g})"
        self._run = uuid.uuid4().hex  # of rows in the global window, which have no interval: one for each pipeline

    def row(self, element: Any, window: Any) -> PastTest:
        is_pair = isinstance(element, tuple)
        key, result = element if is_pair else (None, element)
        name = "" if not is_pair else f"{self._by}={key_text(key)}" if self._by else key_text(key)
        if isinstance(result, DriftAlert):
            return self._alert(name, result)
        if not isinstance(result, DriftResult):
            raise DriftError(
                f"found {type(result).__name__}, expected results of MMDTest or ColumnTest, or alerts of DetectDrift",
                fix="apply RecordDrift right behind MMDTest, ColumnTest or DetectDrift; of (results, failures), record "
                "the results",
            )
        is_window = isinstance(window, IntervalWindow)
        start, end = (utc_text(_utc(each)) for each in (window.start, window.end)) if is_window else (None, None)
        test = PastTest.of(
            result,
            reference=self._reference,
            current=self._current,
            columns=self._columns,
            kernel=self._kernel if isinstance(result, MMDTestResult) else result.setup,
            key=name,
            settings=result.settings(),
            time=_utc(window.end) if is_window else None,
        )
        once = f"{start}/{end}" if is_window else f"run {self._run}"
        test = replace(test, window_start=start, window_end=end, once=once)
        if isinstance(result, MMDTestResult):
            bandwidth, mmd2 = self._at_bandwidth(result, name)
            test = replace(test, bandwidth=bandwidth)
            if len(result.kernels) > 1:  # The statistic and threshold of several kernels have another unit than MMD².
                test = replace(test, statistic=mmd2, threshold=None, mmd2=mmd2)
        elif self._bandwidth is not None:
            raise DriftError(
                f"found a result of the test {result.test!r} beside bandwidth={self._bandwidth:g}, expected one of MMD",
                fix="remove bandwidth",
            )
        if self._reports is not None and result.verdict == "drift":
            contents = Contents(result, (self._reference, name or self._current or "current"))
            identity = "\0".join((test.reference, test.columns, test.kernel, test.key, once))
            write = partial(write_page, text=page(contents), error=DriftError)
            test = replace(test, report=write_report_of_point(self._reports, identity, write))
        return test

    def _at_bandwidth(self, result: MMDTestResult, key: str) -> tuple[float | None, float]:
        """Return the bandwidth to record and the MMD² at this bandwidth."""
        if not result.kernels:
            return self._bandwidth, result.mmd2
        if self._bandwidth is None:
            return (result.kernels[0].bandwidth if len(result.kernels) == 1 else None), result.mmd2
        for each in result.kernels:
            if each.bandwidth is not None and math.isclose(each.bandwidth, self._bandwidth, rel_tol=_SAME_BANDWIDTH):
                return self._bandwidth, each.mmd2
        found = ", ".join(f"{each.kernel.partition('(')[0]}({each.bandwidth or 0:g})" for each in result.kernels)
        raise DriftError(
            f"found {found}{f' for {key}' if key else ''}, expected a kernel with bandwidth {self._bandwidth:g}",
            fix=f"pass RBF({self._bandwidth:g}) to MMDTest, alone or in its list of kernels",
        )

    def _alert(self, key: str, alert: DriftAlert) -> PastTest:
        """Return the row of a detector's alert, which has a threshold and no p-value: 0 stands for it."""
        time = utc_text(_utc(alert.timestamp))
        return PastTest(
            time=time,
            reference=self._reference,
            current=self._current,
            columns=self._columns,
            kernel=self._kernel,
            statistic=alert.statistic,
            threshold=alert.threshold,
            mmd2=alert.statistic,
            p_value=0.0,
            level=0.0,
            drift=True,
            reference_rows=0,
            current_rows=alert.run_length,
            settings={"kind": DETECTOR, "rows_seen": alert.rows_seen, "autocorrelated": alert.autocorrelated},
            key=key,
            window_start=time,
            window_end=time,
            bandwidth=self._bandwidth,
            once=f"alert {time} {alert.rows_seen}",
        )


class _WriteRows(beam.DoFn):
    """Writes rows in one transaction for each bundle, and emits them once they are written."""

    def __init__(self, path: str, limit: int, maker: _RowMaker) -> None:
        self._path = path
        self._limit = limit
        self._maker = maker
        self._rows: list[tuple[PastTest, Any, Any]] = []
        self._bandwidths: dict[str, float] = {}
        self._warned = False
        self._written = Metrics.counter("RecordDrift", "rows")
        self._drifted = Metrics.counter("RecordDrift", "drifted")
        self._changed = Metrics.counter("RecordDrift", "changed_bandwidths")

    def start_bundle(self) -> None:
        self._rows = []

    def process(  # type: ignore[override]
        self,
        element: Any,
        timestamp: Any = beam.DoFn.TimestampParam,
        window: Any = beam.DoFn.WindowParam,
    ) -> Iterator[WindowedValue]:
        row = self._maker.row(element, window)
        self._check_bandwidth(row)
        self._rows.append((row, timestamp, window))
        if len(self._rows) >= _MOST_BUFFERED:
            yield from self._flush()

    def finish_bundle(self) -> Iterator[WindowedValue]:  # type: ignore[override]  # Beam declares None, and accepts these.
        yield from self._flush()

    def _flush(self) -> Iterator[WindowedValue]:
        rows, self._rows = self._rows, []
        if not rows:
            return
        DriftHistory(self._path, limit=self._limit).append(*(row for row, _, _ in rows))
        self._written.inc(len(rows))
        self._drifted.inc(sum(row.drift for row, _, _ in rows))
        for row, timestamp, window in rows:
            yield WindowedValue(row, timestamp, (window,))

    def _check_bandwidth(self, row: PastTest) -> None:
        if row.bandwidth is None:
            return
        first = self._bandwidths.setdefault(row.key, row.bandwidth)
        if math.isclose(first, row.bandwidth, rel_tol=_SAME_BANDWIDTH):
            return
        self._changed.inc()
        if not self._warned:
            self._warned = True
            _LOGGER.warning(
                "The bandwidth of %r changed from %g to %g, because it comes from the data: MMD² can't be compared "
                "over time. Pass RBF(%g) to MMDTest and bandwidth=%g to RecordDrift.",
                row.key or row.reference,
                first,
                row.bandwidth,
                first,
                first,
            )


def _utc(time: Any) -> datetime:
    return time.to_utc_datetime().replace(tzinfo=timezone.utc)
