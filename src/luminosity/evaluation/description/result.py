"""What a description of a table returns, and how it differs from a reference."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

__all__ = ["ColumnChange", "ColumnDescription", "Description", "Histogram"]


@dataclass(frozen=True)
class Histogram:
    """Counts between edges. The first and the last bin also have what lies beyond their edges."""

    edges: Sequence[float]
    counts: Sequence[int]


@dataclass(frozen=True)
class ColumnDescription:
    """One column. Fields that its kind does not have are None or empty.

    For texts, lists and bytes, ``mean``, ``quantiles`` and the like are those of lengths; for vectors, those of norms,
    and ``width`` is how many numbers they have, the least and the most. For times they are seconds since 1970;
    for times of a day and durations, seconds.
    ``distinct`` is an estimate unless ``distinct_is_exact``; counts in ``top`` may be too low by at most ``top_error``.
    """

    name: str
    kind: str
    types: Sequence[str]
    count: int
    nulls: int
    nan: int = 0
    infinite: int = 0
    distinct: int | None = None
    distinct_is_exact: bool = True
    mean: float | None = None
    deviation: float | None = None
    quantiles: Mapping[float, float] = field(default_factory=dict[float, float])
    histogram: Histogram | None = None
    top: Sequence[tuple[Any, int]] = ()
    top_error: int = 0
    width: tuple[int, int] | None = None

    @property
    def of(self) -> str:
        """What the numbers of this column are: values, lengths, norms or times."""
        return {"texts": "length", "lists": "length", "bytes": "length", "vectors": "norm", "times": "time"}.get(
            self.kind, "value"
        )

    def time_text(self, seconds: float) -> str:
        """Return a number of a column of times as a date and time, or as a duration if the column holds those.

        >>> ColumnDescription("at", "times", ["timestamp[us]"], 1, 0).time_text(90)
        '1970-01-01 00:01:30'
        >>> ColumnDescription("took", "times", ["duration[s]"], 1, 0).time_text(-90061.5)
        '-25:01:01.5'
        """
        if self.types and all(each.startswith(("duration", "time32", "time64")) for each in self.types):
            minutes, rest = divmod(round(abs(seconds), 6), 60)
            whole, _, part = f"{rest:09.6f}".rstrip("0").partition(".")
            sign = "-" if seconds < 0 else ""
            return f"{sign}{int(minutes) // 60:02}:{int(minutes) % 60:02}:{whole}{'.' if part else ''}{part}"
        try:
            shown = datetime.fromtimestamp(seconds, timezone.utc).strftime("%Y-%m-%d %H:%M:%S")
        except (OverflowError, ValueError, OSError):  # beyond the years that Python knows
            return f"{seconds:g} s"
        return shown.removesuffix(" 00:00:00")

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that are there, for JSON."""
        found = {name: value for name, value in vars(self).items() if value not in (None, (), [], {})}
        if self.histogram is not None:
            found["histogram"] = dict(vars(self.histogram))
        if self.top:
            found["top"] = [{"value": value, "count": count} for value, count in self.top]
        if self.distinct is None:
            del found["distinct_is_exact"]
        if not self.top:
            found.pop("top_error", None)
        return found


@dataclass(frozen=True)
class ColumnChange:
    """How a column differs from that of the reference.

    ``distance`` lies between 0 (equal) and 1 (nothing in common): the statistic of Kolmogorov and Smirnov for numbers,
    lengths and norms; the total variation for texts of few distinct values; or the change of the share of missing
    values, if that is larger. ``p_value`` is that of the Kolmogorov-Smirnov or chi-squared test, or None.
    """

    name: str
    distance: float
    p_value: float | None
    said: str


@dataclass(frozen=True)
class Description:
    """The columns of a table, in order, and with a reference the ``changes``, the largest first."""

    rows: int
    columns: Mapping[str, ColumnDescription]
    changes: Sequence[ColumnChange] = ()
    reference: Description | None = None
    reference_histograms: Mapping[str, Histogram] = field(default_factory=dict[str, Histogram])

    def __getitem__(self, name: str) -> ColumnDescription:
        """Return the description of a column."""
        return self.columns[name]

    def __str__(self) -> str:
        return f"{self.rows:,} rows, {len(self.columns):,} columns"

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain dictionaries and lists, for JSON."""
        found: dict[str, Any] = {
            "rows": self.rows,
            "columns": [column.as_dict() for column in self.columns.values()],
        }
        if self.reference is not None:
            found["changes"] = [dict(vars(change)) for change in self.changes]
            found["reference"] = self.reference.as_dict()
        return found

    def write_report(
        self, path: str | os.PathLike[str], *, title: str = "table", settings: Mapping[str, Any] | None = None
    ) -> None:
        """Write an HTML page with a chart for each column, which loads nothing from the network."""
        page = importlib.import_module("luminosity.evaluation.report.description_page")
        page.write(path, self, title, settings or {})
