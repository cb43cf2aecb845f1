"""Detects drift in a pipeline, with one stream for each key."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import apache_beam as beam
from apache_beam.coders import PickleCoder
from apache_beam.metrics import Metrics
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec

from luminosity._shared.text import list_some
from luminosity.drift.online.detector import OnlineMMD
from luminosity.drift.online.streams import DriftAlert, Stream, by_stream
from luminosity.drift.online.windowed_statistic import Calibration, WindowedStatistic
from luminosity.drift.transforms.columns import Columns
from luminosity.errors import DriftError

__all__ = ["DetectDrift"]

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
