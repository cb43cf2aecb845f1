"""Writes the HTML report of an MMD test: the chart of both samples, and the rows that differ most."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np

from luminosity._shared.text import shorten
from luminosity.drift.kernels import Kernel
from luminosity.drift.mmd.mmd_result import MMDTestResult
from luminosity.drift.mmd.witness import Extremes, find_extremes, strongest_kernel
from luminosity.drift.pca import PCA
from luminosity.drift.report.page import Contents, page
from luminosity.drift.result import Details, PastTest, Progress
from luminosity.drift.rows import as_rows, same_width
from luminosity.errors import DriftError
from luminosity.report_page.axes import Frame, Scale, drawing, with_room
from luminosity.report_page.document import section, write_page
from luminosity.report_page.markup import MISSING, Markup, element, joined, plain

__all__ = ["sections_of_rows", "write_report"]

_SHOWN = 8  # rows of a table
_COLUMNS = 7  # of a table
_CHARACTERS = 240  # of a cell
_NUMBERS = 4  # of a vector
_WORDS = 3  # of a cell that says what its row is about; shorter ones are names, labels, dates
_BAR_PIXELS = 70.0  # of the longest bar
_POINTS = 2000  # rows of each sample: more would hide each other
_WIDTH, _HEIGHT = 920.0, 560.0
_FRAME = Frame(left=64, top=44, right=896, bottom=504)
_LOW_FRAME = Frame(left=64, top=44, right=896, bottom=264)
_EDGE = 0.002  # the share of points at either end that may lie beyond the axes; they are drawn at the edge
_ROUNDING = 1e-6  # of the longest axis: a shorter one shows only rounding errors
_BARS = 60  # of a histogram
_OF_BOTH = (
    f"At most {_POINTS:,} random rows of each sample. Rows of several numbers are shown along the two directions in "
    "which both samples together vary most. Samples can differ in directions that this chart does not show."
)


def write_report(
    path: str | os.PathLike[str],
    result: MMDTestResult,
    reference: Any = None,
    current: Any = None,
    *,
    names: tuple[str, str] = ("reference", "current"),
    details: tuple[Details, Details] | None = None,
    kernel: Kernel | None = None,
    history: Sequence[PastTest] = (),
    settings: Mapping[str, Any] | None = None,
    progress: Progress | None = None,
) -> None:
    """Write the report of a test as one HTML file, which loads nothing from the network.

    Args:
      path: the file to write; an existing file is replaced.
      result: the result of ``mmd_test``.
      reference: the rows that were compared, for the chart of both samples and the rows that differ most.
      current: likewise.
      names: the names of the samples.
      details: for each sample, a function that takes row numbers and returns a dictionary for each row, such as
        ``lambda numbers: table.take(numbers).to_pylist()``. By default the report shows the rows' own numbers.
      kernel: the kernel that finds the rows that differ most. The default is the kernel of the result with the smallest
        p-value. Pass a kernel of your own, because the result has only its name.
      history: past tests, the oldest first, from ``DriftHistory.last``.
      settings: further settings to list.
      progress: called with the number of tiles done and of all tiles, while rows are scored.
    """
    sections, holds = (), ""
    if reference is not None and current is not None:
        reference, current = as_rows(reference, "the reference"), as_rows(current, "the current sample")
        same_width(reference, current)
        sections, holds = sections_of_rows(result, reference, current, details, kernel, progress)
    write_page(path, page(Contents(result, names, sections, history, settings or {}, holds)), DriftError)


def sections_of_rows(
    result: MMDTestResult,
    reference: Any,
    current: Any,
    details: tuple[Details, Details] | None,
    kernel: Kernel | None,
    progress: Progress | None,
) -> tuple[Sequence[Markup], str]:
    """Draw the samples and find the rows that differ most. The arguments are those of ``write_report``."""
    extremes = find_extremes(reference, current, kernel or strongest_kernel(result), result.seed, progress)
    of_reference, of_current = details or (None, None)
    gone = _shown_rows(extremes.gone, of_reference, reference, extremes.gone_counts)
    new = _shown_rows(extremes.new, of_current, current, extremes.new_counts)
    marked = [row.number for row in gone], [row.number for row in new]
    said = "Rows that are typical of one sample and rare in the other. Rows that say the same are shown once."
    if not result.drift:
        said = "The test found no drift, so these rows differ by no more than chance explains."
    sections = [
        section("Both samples", _OF_BOTH, _scatter(reference, current, marked, result.seed)),
        section("The rows that differ most", said, _witness_tables(gone, new, extremes)),
    ]
    return sections, "rows of the data"


@dataclass(frozen=True)
class _WitnessRow:
    """A row that is shown in the report. ``alike`` counts further rows that say the same."""

    number: int
    score: float
    cells: Mapping[str, str]
    alike: int = 0


def _shown_rows(
    found: Sequence[tuple[int, float]], details: Details | None, values: Any, counts: Sequence[int]
) -> list[_WitnessRow]:
    """Return the first few rows that say different things; without ``details``, contents are the rows' own numbers.

    ``counts`` are the numbers of rows that each row stands for.
    """
    numbers = [number for number, _ in found]
    contents = details(numbers) if details is not None else [_own(number, values[number]) for number in numbers]
    rows: list[_WitnessRow] = []
    places: dict[tuple[str, ...], int] = {}
    for (number, score), count, each in zip(found, counts, contents, strict=True):
        cells = {str(name): _cell(value) for name, value in list(each.items())[:_COLUMNS]}
        meanings = _meanings(number, cells)
        place = next((places[meaning] for meaning in meanings if meaning in places), None)
        if place is not None:
            rows[place] = replace(rows[place], alike=rows[place].alike + count)
        elif len(rows) < _SHOWN:
            place = len(rows)
            rows.append(_WitnessRow(number, score, cells, count - 1))
        if place is not None:
            places |= dict.fromkeys(meanings, place)
    return rows


def _meanings(number: int, cells: Mapping[str, str]) -> list[tuple[str, ...]]:
    """Return what a row says: all of its cells, and its longest text. Rows that share either say the same.

    A text that occurs twice usually has two ids, dates or file names.
    """
    whole = tuple(text for name, text in cells.items() if name not in ("file", "row")) or (str(number),)
    text = max((text for name, text in cells.items() if name != "file"), key=len, default="")
    is_text = len(text.split()) >= _WORDS and not text.startswith("[")
    return [whole, ("text", text.casefold())] if is_text else [whole]


def _witness_tables(gone: Sequence[_WitnessRow], new: Sequence[_WitnessRow], extremes: Extremes) -> Markup:
    """Draw the tables of new and gone rows, and a note on how they were found."""
    most = max((abs(row.score) for row in (*gone, *new)), default=1.0) or 1.0
    scored, against = extremes.scored, extremes.against
    note = (
        f"The score of a row is its mean similarity to rows of the current sample minus its mean similarity to rows of "
        f"the reference, measured by {extremes.kernel}. Scored rows: {scored[0]:,} of the reference and {scored[1]:,} "
        f"of the current sample, each compared with {against[0]:,} and {against[1]:,} rows."
    )
    return joined(
        [
            element("h3", element("span", class_="key current"), "New: rows most typical of the current sample"),
            _table(new, most, "current"),
            element("h3", element("span", class_="key reference"), "Gone: rows most typical of the reference"),
            _table(gone, most, "reference"),
            element("p", note, class_="muted"),
        ]
    )


def _table(rows: Sequence[_WitnessRow], most: float, kind: str) -> Markup:
    names = list(dict.fromkeys(name for row in rows for name in row.cells))
    head = element("tr", element("th", "score"), *(element("th", name) for name in names))
    body = [
        element("tr", element("td", _score(row.score, most, kind)), *(_td(row, name, names) for name in names))
        for row in rows
    ]
    return element("div", element("table", element("thead", head), element("tbody", *body)), class_="wide")


def _td(row: _WitnessRow, name: str, names: Sequence[str]) -> Markup:
    text = row.cells.get(name, "")
    if row.alike and name == names[-1]:
        more = f" and {row.alike:,} more {'row' if row.alike == 1 else 'rows'} like it"
        return element("td", text, element("span", more, class_="muted"))
    return element("td", text)


def _score(score: float, most: float, kind: str) -> Markup:
    bar = element("rect", x=0, y=3, width=max(1.0, abs(score) / most * _BAR_PIXELS), height=12, rx=2, class_=kind)
    drawn = element("svg", bar, width=_BAR_PIXELS, height=18, class_="small", aria_hidden="true")
    return joined([drawn, " ", plain(score, 2)])


def _own(number: int, values: Any) -> dict[str, Any]:
    return {"row": number, "numbers": [float(value) for value in values]}


def _cell(value: Any) -> str:
    if value is None:
        return MISSING
    if isinstance(value, float):
        return plain(value, 4)
    if isinstance(value, bytes):
        return f"{len(value):,} bytes"
    if isinstance(value, list) and value and all(isinstance(each, (int, float)) for each in value):
        shown = ", ".join(plain(float(each), 2) for each in value[:_NUMBERS])
        return f"[{shown}, … {len(value)} numbers]" if len(value) > _NUMBERS else f"[{shown}]"
    text = " ".join(str(value).split())
    return shorten(text, _CHARACTERS)


def _scatter(reference: Any, current: Any, marked: tuple[Sequence[int], Sequence[int]], seed: int) -> Markup:
    """Draw random rows of both samples. The ``marked`` rows of each sample get a ring."""
    random = np.random.default_rng((seed, 6))
    samples = [_sampled(rows, random) for rows in (reference, current)]
    if reference.shape[1] == 1:
        return _histograms(*(rows[:, 0] for rows in samples))
    pca = PCA.fit(np.concatenate(samples), 2)
    points = [pca.transform(rows) for rows in samples]
    both = np.concatenate(points)
    x, y = (_scale(both, axis) for axis in (0, 1))
    kinds = np.repeat(["reference", "current"], [len(each) for each in points])
    dots = [_dot(x, y, both[at], f"dot {kinds[at]}", 2.4) for at in random.permutation(len(both))]
    rings = [
        _dot(x, y, point, f"ring {kind}", 6)
        for rows, numbers, kind in zip((reference, current), marked, ("reference", "current"), strict=True)
        if len(numbers)
        for point in pca.transform(rows[list(numbers)])
    ]
    shares = pca.explained_variance_ratio
    return drawing(
        _WIDTH,
        _HEIGHT,
        "Both samples along their first two principal components",
        _FRAME.y_axis(y, f"second principal component, {shares[1]:.0%} of the variance"),
        _FRAME.x_axis(x, f"first principal component, {shares[0]:.0%} of the variance"),
        *dots,
        *rings,
        _legend(len(samples[0]), len(samples[1]), bool(rings)),
    )


def _sampled(rows: Any, random: Any) -> Any:
    return rows if len(rows) <= _POINTS else rows[np.sort(random.choice(len(rows), _POINTS, replace=False))]


def _scale(points: Any, axis: int) -> Scale:
    """Return the scale of an axis. If rows differ along it only by rounding, it is as long as the other axis."""
    lows, highs = np.quantile(points.astype(np.float64), [_EDGE, 1 - _EDGE], axis=0)
    spans = highs - lows
    span = float(spans[axis] if spans[axis] > _ROUNDING * spans.max() else spans.max())
    middle = float(lows[axis] + highs[axis]) / 2
    low, high = with_room(middle - 0.56 * span, middle + 0.56 * span)
    return (_FRAME.y if axis else _FRAME.x)(low, high)


def _dot(x: Scale, y: Scale, point: Any, kind: str, radius: float) -> Markup:
    across, up = (float(np.clip(value, scale.low, scale.high)) for value, scale in zip(point, (x, y), strict=True))
    return element("circle", cx=x(across), cy=y(up), r=radius, class_=kind)


def _legend(reference: int, current: int, rings: bool) -> Markup:
    return _FRAME.legend(
        ("dot reference key", f"reference ({reference:,} rows)", 4),
        ("dot current key", f"current ({current:,} rows)", 4),
        *([("ring key", "rows shown below", 5)] if rings else []),
    )


def _histograms(reference: Any, current: Any) -> Markup:
    both = np.concatenate([reference, current]).astype(np.float64)
    low, high = with_room(float(both.min()), float(both.max()))
    edges = np.linspace(low, high, _BARS + 1)
    shares = [np.histogram(each, edges)[0] / len(each) for each in (reference, current)]
    x = _LOW_FRAME.x(low, high)
    y = _LOW_FRAME.y(0, 1.08 * float(max(each.max() for each in shares)))
    lines = [
        element("path", d=_steps(x, y, edges, each), class_=f"{kind} outline")
        for each, kind in zip(shares, ("reference", "current"), strict=True)
    ]
    return drawing(
        _WIDTH,
        320,
        "Histograms of both samples",
        _LOW_FRAME.y_axis(y, "share of rows"),
        *lines,
        _LOW_FRAME.x_axis(x, "value"),
        _legend(len(reference), len(current), rings=False),
    )


def _steps(x: Scale, y: Scale, edges: Any, shares: Any) -> str:
    along = "".join(f"V{y(share):.1f}H{x(edge):.1f}" for share, edge in zip(shares, edges[1:], strict=True))
    return f"M{x(edges[0]):.1f} {y(0):.1f}{along}V{y(0):.1f}"
