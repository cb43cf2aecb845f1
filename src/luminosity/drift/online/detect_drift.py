"""Drift detected in the streams of a pipeline, one for each key."""

from __future__ import annotations

import logging
from collections.abc import Iterator, Mapping
from typing import Any

import apache_beam as beam
from apache_beam.coders import PickleCoder
from apache_beam.metrics import Metrics
from apache_beam.transforms.userstate import ReadModifyWriteStateSpec

from luminosity.drift.online.detector import OnlineMMD
from luminosity.drift.online.streams import DriftAlert, Stream, by_stream
from luminosity.drift.online.windowed_statistic import Calibration, WindowedStatistic
from luminosity.drift.transforms.columns import Columns
from luminosity.errors import DriftError

__all__ = ["DetectDrift"]

_LOGGER = logging.getLogger(__name__)
_SHOWN_KEYS = 5


class DetectDrift(beam.PTransform[Any, Any]):
    """From pairs ``(key, row)``, or tables, to alerts ``(key, DriftAlert)``: each key is a stream of its own.

    A detector is calibrated before it is given here: nothing is simulated on workers, and all streams share its
    reference. With a mapping every key has a detector of its own, and so its own reference.

    A value is one row, or a matrix of several: what `OnlineMMD.update` takes. Rows of a key count in the order in which
    they arrive. Beam promises none: where it matters, give whole stretches of rows, in order, as matrices or tables.

    After an alert a stream begins again. Beam's state holds the last rows of each stream, as many as the detector's
    window; with windows of Beam's, a stream begins in each of them.

    >>> import numpy as np
    >>> random = np.random.default_rng(0)
    >>> detector = OnlineMMD(random.normal(size=(300, 2)), expected_run_time=1000, window=10, simulations=100)
    >>> streams = [("a", random.normal(size=(40, 2))), ("b", random.normal(3, 1, size=(10, 2)))]
    >>> with beam.Pipeline(runner="FnApiRunner") as pipeline:
    ...     alerts = pipeline | beam.Create(streams) | DetectDrift(detector)
    ...     _ = alerts | beam.Keys() | beam.Distinct() | beam.Map(print)
    b

    Args:
        detector: one for all keys, or a mapping with one for each.
        column: of record batches: where the vectors are, or which columns of numbers are a vector together.
        by: of record batches: the column with the key; without it all rows are one stream, of the key None.
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
            raise DriftError(f"Found by={by!r} without column=, which says where a table's vectors are.")
        self._shared = detector.shared if isinstance(detector, OnlineMMD) else _by_key(detector)
        self._column = column
        self._by = by

    def expand(self, input_or_inputs: Any) -> Any:
        streams = input_or_inputs
        if self._column is not None:
            part = beam.FlatMap(by_stream, self._column, self._by).with_output_types(tuple[Any, Any])
            streams = streams | "Part" >> part
        detect = beam.ParDo(_DetectDoFn(self._shared)).with_output_types(tuple[Any, DriftAlert])
        return streams | "Detect" >> detect


class _DetectDoFn(beam.DoFn):
    STREAM = ReadModifyWriteStateSpec("stream", PickleCoder())

    def __init__(self, shared: Calibration | dict[Any, Calibration]) -> None:
        self._shared = shared
        self._rows = Metrics.counter("DetectDrift", "rows")
        self._alerts = Metrics.counter("DetectDrift", "alerts")
        self._autocorrelated = Metrics.counter("DetectDrift", "autocorrelated_streams")
        self._told = False

    def process(  # type: ignore[override]
        self,
        element: tuple[Any, Any],
        timestamp: Any = beam.DoFn.TimestampParam,
        state: Any = beam.DoFn.StateParam(STREAM),  # noqa: B008  # Beam's way of asking for it
    ) -> Iterator[tuple[Any, DriftAlert]]:
        key, batch = element
        shared = self._shared if isinstance(self._shared, Calibration) else _shared_by(self._shared, key)
        rows = shared.reference.prepared(batch)
        before: Stream = state.read() or Stream(WindowedStatistic(shared))
        stream, alerts = before.advanced(shared, rows, timestamp)
        state.write(stream)
        self._rows.inc(len(rows))
        self._alerts.inc(len(alerts))
        if stream.autocorrelated and not before.autocorrelated:
            self._tell(key)
        for alert in alerts:
            yield key, alert

    def _tell(self, key: Any) -> None:
        self._autocorrelated.inc()
        if not self._told:
            self._told = True
            _LOGGER.warning(
                "Rows of the stream %r depend on those before them, so that false alarms do not come as rarely as "
                "asked for. The counter autocorrelated_streams says how many streams are like this.",
                key,
            )


def _by_key(detectors: Any) -> dict[Any, Calibration]:
    if not isinstance(detectors, Mapping) or not all(isinstance(each, OnlineMMD) for each in detectors.values()):
        raise DriftError(
            f"Found a {type(detectors).__name__} as detector, expected an OnlineMMD, or a mapping of keys to such."
        )
    return {key: each.shared for key, each in detectors.items()}


def _shared_by(shared: dict[Any, Calibration], key: Any) -> Calibration:
    if key not in shared:
        known = ", ".join([*map(repr, list(shared)[:_SHOWN_KEYS]), *["…"] * (len(shared) > _SHOWN_KEYS)])
        raise DriftError(f"Found a row of {key!r}, for which DetectDrift has no detector, only for {known or 'none'}.")
    return shared[key]
