"""What a description of a table returns, how it differs from a reference, and its HTML page."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timezone
from typing import Any

from luminosity._shared.text import shorten
from luminosity.errors import EvaluationError
from luminosity.report_page.axes import Frame, drawing
from luminosity.report_page.document import document, headline, section, settings_section, table, write_page
from luminosity.report_page.markup import MISSING, Markup, element, plain

__all__ = ["ColumnChange", "ColumnDescription", "Description", "Histogram", "column_section"]


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
        write_page(path, _page(self, title, settings or {}), EvaluationError)


_FRAME = Frame(left=64, top=36, right=556, bottom=156)
_WIDTH, _HEIGHT = 580.0, 204.0
_LEVEL = 0.05  # of all columns together
_TOP_CHARACTERS = 40  # of a frequent value
_BAR_PIXELS = 160.0
_MOST_CHARTS = 200  # columns with a chart
_SMALLEST_P = 1e-16  # smaller p-values are shown as this


def _page(description: Description, title: str, settings: Mapping[str, Any]) -> str:
    """Return the page as HTML."""
    sections = [_headline(description, title)]
    if description.reference is not None:
        sections.append(_changes(description))
    sections.append(_columns(description))
    order = [change.name for change in description.changes if change.name in description.columns]
    names = [*order, *(name for name in description.columns if name not in order)]
    sections += [column_section(description, description.columns[name]) for name in names[:_MOST_CHARTS]]
    sections.append(
        settings_section(settings, ("luminosity", "numpy", "pyarrow"), "values of the data, such as the most frequent")
    )
    return document(f"Description of {title}", sections)


def _headline(description: Description, title: str) -> Markup:
    values = list(description.columns.values())
    cells = description.rows * len(values)
    missing = sum(each.nulls + each.nan for each in values)
    facts = [
        ("rows", f"{description.rows:,}", ""),
        ("columns", f"{len(values):,}", ""),
        ("missing values", plain(100 * missing / cells if cells else 0.0) + "%", f"{missing:,} of {cells:,}"),
    ]
    kind, said, verdict = "unknown", "", str(description)
    if description.reference is not None:
        changed = _changed(description)
        kind = "drifted" if changed else "steady"
        verdict = f"{len(changed):,} of {len(description.changes):,} columns changed"
        said = "More than chance explains: " + ", ".join(changed[:10]) + "." if changed else "No column changed."
        facts.append(("reference", f"{description.reference.rows:,}", "rows"))
    return headline(verdict, kind, title, said, facts)


def _changed(description: Description) -> list[str]:
    """Return the columns that differ by more than chance explains, the largest difference first."""
    tests = sum(change.p_value is not None for change in description.changes) or 1
    return [
        change.name
        for change in description.changes
        if (change.distance == 1 if change.p_value is None else change.p_value <= _LEVEL / tests)
    ]


def _changes(description: Description) -> Markup:
    changed = set(_changed(description))
    rows: list[Sequence[str]] = []
    for change in description.changes:
        width = max(1.0, change.distance * _BAR_PIXELS)
        kind = "drifted fill" if change.name in changed else "bar"
        bar = element("rect", x=0, y=3, width=width, height=12, rx=2, class_=kind)
        text = element("text", plain(change.distance), x=width + 8, y=13)
        chart = element("svg", bar, text, width=_BAR_PIXELS + 60, height=18, class_="small")
        rows.append((change.name, chart, _p_value(change.p_value), change.said))
    said = (
        "The distance lies between 0 (equal) and 1 (nothing in common): that of Kolmogorov and Smirnov for numbers, "
        "lengths and norms, the total variation for texts of few values, or the change of missing values. Orange: more "
        "than chance explains, at a level of 5% for all columns together. Of many rows, small changes are significant."
    )
    return section("What changed most", said, table(("column", "distance", "p-value", "change"), rows, ("p-value",)))


def _p_value(value: float | None) -> str:
    if value is None:
        return MISSING
    return plain(value) if value >= _SMALLEST_P else f"< {plain(_SMALLEST_P)}"


def _columns(description: Description) -> Markup:
    rows: list[Sequence[str]] = []
    for each in description.columns.values():
        distinct = "" if each.distinct is None else f"{'' if each.distinct_is_exact else '≈ '}{each.distinct:,}"
        ends = [_shown(each, each.quantiles.get(share)) for share in (0.0, 0.5, 1.0)]
        missing = each.nulls + each.nan
        rows.append((each.name, each.kind, f"{missing:,}" if missing else MISSING, distinct, *ends))
    heads = ("column", "kind", "missing", "distinct", "least", "median", "largest")
    said = "Least, median and largest: of numbers, of the lengths of texts and lists, of the norms of vectors."
    return section("Columns", said, table(heads, rows, ("missing", "distinct", "least", "median", "largest")))


def column_section(description: Description, each: ColumnDescription) -> Markup:
    """Return the section on one column: its histogram beside that of the reference, and its most frequent values."""
    parts: list[Markup] = []
    if each.histogram is not None and each.kind != "booleans":
        reference = description.reference_histograms.get(each.name)
        parts.append(element("div", _histogram(each, reference), style=f"max-width: {_WIDTH:g}px"))
    if each.top:
        rows = [
            (shorten(_value(each, value), _TOP_CHARACTERS), f"{count:,}", f"{100 * count / (each.count or 1):.3g}%")
            for value, count in each.top[:5]
        ]
        parts.append(table(("most frequent", "rows", "share"), rows, ("rows", "share")))
    said = f"{', '.join(each.types) or each.kind} · {each.count:,} values"
    for count, what in ((each.nulls, "null"), (each.nan, "NaN"), (each.infinite, "infinite")):
        said += f" · {count:,} {what}" if count else ""
    if each.mean is not None and each.kind != "times":
        said += f" · mean {each.of} {plain(each.mean, 4)}"
        said += f" ± {plain(each.deviation, 4)}" if each.deviation is not None else ""
    if each.width is not None:
        low, high = each.width
        said += f" · {low:,} numbers each" if low == high else f" · {low:,} to {high:,} numbers each"
    return section(each.name, said, element("div", *parts, class_="charts"))


def _histogram(each: ColumnDescription, reference: Histogram | None) -> Markup:
    assert each.histogram is not None, "the caller has checked it"
    edges = each.histogram.edges
    shares = [count / (each.count or 1) for count in each.histogram.counts]
    others: list[float] = []
    if reference is not None:
        in_all = sum(reference.counts) or 1
        others = [count / in_all for count in reference.counts]
    x, y = _FRAME.x(edges[0], edges[-1]), _FRAME.y(0, 1.08 * max(*shares, *others, 1e-9))
    bars: list[Markup] = []
    for at, share in enumerate(shares):
        left, right = x(edges[at]), x(edges[at + 1])
        said = f"{_shown(each, edges[at])} to {_shown(each, edges[at + 1])}: {each.histogram.counts[at]:,}"
        tip = element("title", said)
        size = {"width": max(0.5, right - left - 0.6), "height": y(0) - y(share)}
        bars.append(element("rect", tip, x=left, y=y(share), **size, class_="bar"))
    parts = [_FRAME.y_axis(y, "share of rows", 3), *bars]
    if others:
        steps = "".join(f"V{y(share):.1f}H{x(edge):.1f}" for share, edge in zip(others, edges[1:], strict=True))
        line = f"M{x(edges[0]):.1f} {y(0):.1f}{steps}V{y(0):.1f}"
        parts.append(element("path", d=line, class_="outline reference"))
        parts.append(element("text", "line: the reference", x=_FRAME.right, y=20, text_anchor="end", class_="muted"))
    if each.kind == "times":
        ends = [("start", edges[0], _FRAME.left), ("end", edges[-1], _FRAME.right)]
        parts += [
            element("text", each.time_text(t), x=at, y=_FRAME.bottom + 18, text_anchor=side) for side, t, at in ends
        ]
    else:
        parts.append(_FRAME.x_axis(x, each.of, 6))
    return drawing(_WIDTH, _HEIGHT, f"Histogram of {each.name}", *parts)


def _value(each: ColumnDescription, value: Any) -> str:
    return _shown(each, value) if isinstance(value, float) else str(value)


def _shown(each: ColumnDescription, value: float | None) -> str:
    if value is None:
        return MISSING
    return each.time_text(value) if each.kind == "times" else plain(value, 4)
