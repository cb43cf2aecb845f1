"""One key's stream: what Beam's state keeps of it, and the alerts that it gives."""

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
    """That drift was detected in a stream."""

    rows_seen: int
    """Of the stream, up to the row at which it was detected."""
    run_length: int
    """The same since the stream's beginning, or since the alert before."""
    statistic: float
    """Unbiased MMD² of the window's rows against the reference."""
    threshold: float
    timestamp: Timestamp
    """Of the element with that row."""
    autocorrelated: bool
    """Whether rows depended on those before them, so that this may well be a false alarm."""


@dataclass(frozen=True)
class Stream:
    run: WindowedStatistic
    rows_seen: int = 0

    @property
    def autocorrelated(self) -> bool:
        return self.run.autocorrelation.found

    def advanced(self, shared: Calibration, rows: Any, timestamp: Timestamp) -> tuple[Stream, list[DriftAlert]]:
        """With prepared rows; after each alert it begins again.

        This stream stays as it is: it may be a runner's own, which must not change if the bundle fails.
        """
        run, done = self.run.copy(), 0
        alerts: list[DriftAlert] = []
        while done < len(rows):
            taken, alarm = run.advance(shared, rows[done:])
            done += taken
            if alarm:
                seen = self.rows_seen + done
                dependent = run.autocorrelation.found
                alerts.append(DriftAlert(seen, run.seen, run.statistic, run.threshold, timestamp, dependent))
                run.restart()
        return Stream(run, self.rows_seen + len(rows)), alerts


def by_stream(batch: pa.RecordBatch, column: Columns, by: str | None) -> Iterator[tuple[Any, Any]]:
    """The rows of each key, in their order.

    >>> table = pa.record_batch({"x": [[1.5], [2.5], [3.5]], "of": ["a", "b", "a"]})
    >>> [(key, rows.tolist()) for key, rows in by_stream(table, "x", "of")]
    [('a', [[1.5], [3.5]]), ('b', [[2.5]])]
    """
    if not isinstance(batch, pa.RecordBatch):
        raise DriftError(
            f"Found an element of type {type(batch).__name__}, expected a pyarrow.RecordBatch, since there is "
            f"column={column!r}."
        )
    rows, wrong = matrix_of(batch, column)
    for place, what in wrong.items():
        raise DriftError(f"Row {place} of a table {what} in column {column!r}. Leave such rows out before.")
    if by is None:
        yield None, rows
        return
    places: dict[Any, list[int]] = {}
    for place, key in enumerate(column_of(batch, by).to_pylist()):
        places.setdefault(key, []).append(place)
    for key, its in places.items():
        yield key, rows[its]
