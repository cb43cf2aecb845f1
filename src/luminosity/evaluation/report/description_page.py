"""The HTML page of a description: what changed, all columns in a table, and a chart for each."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from typing import Any

from luminosity._shared.text import shorten
from luminosity.errors import EvaluationError
from luminosity.evaluation.description.result import ColumnDescription, Description, Histogram
from luminosity.report_page.axes import Frame, drawing
from luminosity.report_page.document import document, headline, section, settings_section, table, write_page
from luminosity.report_page.markup import MISSING, Markup, element, plain

__all__ = ["column_section", "page", "write"]

_FRAME = Frame(left=64, top=36, right=556, bottom=156)
_WIDTH, _HEIGHT = 580.0, 204.0
_LEVEL = 0.05  # of all columns together
_TOP_CHARACTERS = 40  # of a frequent value
_BAR_PIXELS = 160.0
_MOST_CHARTS = 200  # columns with a chart
_SMALLEST_P = 1e-16  # smaller p-values are shown as this


def write(path: str | os.PathLike[str], description: Description, title: str, settings: Mapping[str, Any]) -> None:
    """Write the page as one file."""
    write_page(path, page(description, title, settings), EvaluationError)


def page(description: Description, title: str, settings: Mapping[str, Any]) -> str:
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
