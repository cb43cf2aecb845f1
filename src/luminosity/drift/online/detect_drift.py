"""Detects drift in a pipeline, with one stream for each key."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.coders import PickleCoder
from apache_beam.metrics import Metrics
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec
from apache_beam.utils.timestamp import Timestamp

from luminosity._shared.text import list_some
from luminosity.drift.online.detector import OnlineMMD
from luminosity.drift.online.windowed_statistic import Calibration, WindowedStatistic
from luminosity.drift.transforms.columns import Columns, column_of, matrix_of
from luminosity.errors import DriftError

__all__ = ["DetectDrift", "DriftAlert"]


@dataclass(frozen=True)
class DriftAlert:
    """Drift that was detected in a stream."""

    rows_seen: int
    """Rows of the stream up to and including the row at which drift was detected."""
    run_length: int
    """Rows since the start of the stream, or since the previous alert."""
    statistic: float
    """The unbiased MMD² of the window's rows against the reference."""
    threshold: float
    """The threshold that the statistic exceeded."""
    timestamp: Timestamp
    """The timestamp of the element with that row."""
    autocorrelated: bool
    """Whether rows depended on the rows before them, so that this may be a false alarm."""


@dataclass(frozen=True)
class Stream:
    """The state of one key's stream, which Beam keeps between bundles."""

    current: WindowedStatistic
    rows_seen: int = 0

    @property
    def autocorrelated(self) -> bool:
        """Whether rows depend on the rows before them."""
        return self.current.autocorrelation.found

    def advanced(self, calibration: Calibration, rows: Any, timestamp: Timestamp) -> tuple[Stream, list[DriftAlert]]:
        """Return the stream after processing prepared rows, and its alerts. After each alert the window starts again.

        This object does not change: it may belong to the runner, and must stay the same if the bundle fails.
        """
        current, done = self.current.copy(), 0
        alerts: list[DriftAlert] = []
        while done < len(rows):
            taken, alarm = current.advance(calibration, rows[done:])
            done += taken
            if alarm:
                seen = self.rows_seen + done
                dependent = current.autocorrelation.found
                alerts.append(
                    DriftAlert(seen, current.seen, current.statistic, current.threshold, timestamp, dependent)
                )
                current.restart()
        return Stream(current, self.rows_seen + len(rows)), alerts


def by_stream(batch: pa.RecordBatch, column: Columns, by: str | None) -> Iterator[tuple[Any, Any]]:
    """Yield the rows of each key, in their order.

    >>> table = pa.record_batch({"x": [[1.5], [2.5], [3.5]], "of": ["a", "b", "a"]})
    >>> [(key, rows.tolist()) for key, rows in by_stream(table, "x", "of")]
    [('a', [[1.5], [3.5]]), ('b', [[2.5]])]
    """
    if not isinstance(batch, pa.RecordBatch):
        raise DriftError(
            f"found an element of type {type(batch).__name__}, expected a pyarrow.RecordBatch because of "
            f"column={column!r}"
        )
    rows, wrong = matrix_of(batch, column)
    for place, what in wrong.items():
        raise DriftError(
            f"row {place} of a table {what} in column {column!r}", fix="leave out such rows before this step"
        )
    if by is None:
        yield None, rows
        return
    places: dict[Any, list[int]] = {}
    for place, key in enumerate(column_of(batch, by).to_pylist()):
        places.setdefault(key, []).append(place)
    for key, own in places.items():
        yield key, rows[own]


_LOGGER = logging.getLogger(__name__)
_SHOWN_KEYS = 5  # keys in a message


class DetectDrift(beam.PTransform[Any, Any]):
    """Turns pairs ``(key, row)``, or tables, into alerts ``(key, DriftAlert)``. Each key is a separate stream.

    The detector is calibrated before you pass it: workers simulate nothing, and all streams share its reference. With a
    mapping, every key has its own detector and reference.

    A value is one row, or a matrix of several, as ``OnlineMMD.update`` takes them. The rows of a key are processed in
    the order in which they arrive. Beam promises no order: if it matters, pass several rows at once, in order, as
    matrices or tables.

    After an alert a stream starts again. Beam's state holds the last rows of each stream, as many as the detector's
    window has; with Beam windows, a stream starts in each window.

    >>> import numpy as np
    >>> random = np.random.default_rng(0)
    >>> detector = OnlineMMD(random.normal(size=(300, 2)), expected_run_time=1000, window=10, simulations=100)
    >>> streams = [("a", random.normal(size=(40, 2))), ("b", random.normal(3, 1, size=(10, 2)))]
    >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:
    ...     alerts = pipeline | beam.Create(streams) | DetectDrift(detector)
    ...     _ = alerts | beam.Keys() | beam.Distinct() | beam.Map(print)
    b

    Args:
        detector: one detector for all keys, or a mapping from keys to detectors.
        column: for record batches: the column of vectors, or several columns of numbers that form a vector together.
        by: for record batches: the column with keys; without it all rows are one stream with the key None.
    """

    def __init__(
        self,
        detector: OnlineMMD | Mapping[Any, OnlineMMD],
        *,
        column: Columns | None = None,
        by: str | None = None,
    ) -> None:
        super().__init__()
        if by is not None and column is None:
            raise DriftError(f"found by={by!r} without column=", fix="pass column=, the column of vectors")
        self._calibration = detector.calibration if isinstance(detector, OnlineMMD) else _by_key(detector)
        self._column = column
        self._by = by

    def expand(self, input_or_inputs: Any) -> Any:
        """Split tables into streams by key, and run a detector with Beam state on each stream."""
        streams = input_or_inputs
        if self._column is not None:
            part = beam.FlatMap(by_stream, self._column, self._by).with_output_types(tuple[Any, Any])
            streams = streams | "Part" >> part
        detect = beam.ParDo(_DetectDoFn(self._calibration)).with_output_types(tuple[Any, DriftAlert])
        return streams | "Detect" >> detect


class _DetectDoFn(beam.DoFn):
    STREAM = ReadModifyWriteStateSpec("stream", PickleCoder())

    def __init__(self, calibration: Calibration | dict[Any, Calibration]) -> None:
        self._calibration = calibration
        self._rows = Metrics.counter("DetectDrift", "rows")
        self._alerts = Metrics.counter("DetectDrift", "alerts")
        self._autocorrelated = Metrics.counter("DetectDrift", "autocorrelated_streams")
        self._warned = False

    def process(  # type: ignore[override]
        self,
        element: tuple[Any, Any],
        timestamp: Any = beam.DoFn.TimestampParam,
        state: Any = beam.DoFn.StateParam(STREAM),  # noqa: B008  # how Beam passes state
    ) -> Iterator[tuple[Any, DriftAlert]]:
        key, batch = element
        calibration = _calibration_of(self._calibration, key)
        rows = calibration.reference.prepared(batch)
        before: Stream = state.read() or Stream(WindowedStatistic(calibration))
        stream, alerts = before.advanced(calibration, rows, timestamp)
        state.write(stream)
        self._rows.inc(len(rows))
        self._alerts.inc(len(alerts))
        if stream.autocorrelated and not before.autocorrelated:
            self._warn(key)
        for alert in alerts:
            yield key, alert

    def _warn(self, key: Any) -> None:
        self._autocorrelated.inc()
        if not self._warned:
            self._warned = True
            _LOGGER.warning(
                "Rows of the stream %r depend on the rows before them: false alarms come more often than calibrated. "
                "The counter autocorrelated_streams says how many streams are like this.",
                key,
            )


def _by_key(detectors: Any) -> dict[Any, Calibration]:
    if not isinstance(detectors, Mapping) or not all(isinstance(each, OnlineMMD) for each in detectors.values()):
        raise DriftError(
            f"found a {type(detectors).__name__} as detector, expected an OnlineMMD, or a mapping from keys to them"
        )
    return {key: each.calibration for key, each in detectors.items()}


def _calibration_of(calibration: Calibration | dict[Any, Calibration], key: Any) -> Calibration:
    if isinstance(calibration, Calibration):
        return calibration
    if key not in calibration:
        known = list_some(map(repr, calibration), _SHOWN_KEYS) or "no key"
        raise DriftError(f"found a row of {key!r}, for which DetectDrift has no detector, expected {known}")
    return calibration[key]
