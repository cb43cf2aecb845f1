"""The stream of one key: its state between bundles, and the alerts that it raises."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import pyarrow as pa
from apache_beam.utils.timestamp import Timestamp

from luminosity.drift.online.windowed_statistic import Calibration, WindowedStatistic
from luminosity.drift.transforms.columns import Columns, column_of, matrix_of
from luminosity.errors import DriftError

__all__ = ["DriftAlert", "Stream", "by_stream"]


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
