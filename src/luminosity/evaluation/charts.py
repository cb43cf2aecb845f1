"""The charts of an evaluation: curves, calibration, confusion matrix, and intervals as bars."""

from __future__ import annotations

from collections.abc import Sequence

from luminosity.evaluation.result import CalibrationBin, Confusion, Curve, Metric
from luminosity.report_page.axes import Frame, drawing
from luminosity.report_page.markup import Markup, element, joined, plain

__all__ = ["calibration_chart", "confusion_chart", "curve_chart", "interval_bar"]

_SIDE = 440.0  # pixels of a square chart
_FRAME = Frame(left=64, top=44, right=420, bottom=384)
_BAR_PIXELS = 220.0
_CELL = 64.0  # pixels of a cell of the confusion matrix, at most
_MATRIX_PIXELS = 560.0
_LABEL_PIXELS = 150.0
_LABEL_CHARACTERS = 18  # of a class beside the matrix


def curve_chart(curve: Curve, title: str, x_title: str, y_title: str, diagonal: bool) -> Markup:
    """Draw a curve between 0 and 1."""
    x, y = _FRAME.x(0, 1), _FRAME.y(0, 1)
    points = [f"{x(across):.1f} {y(up):.1f}" for across, up in zip(curve.x, curve.y, strict=True)]
    parts = [_FRAME.y_axis(y, y_title), _FRAME.x_axis(x, x_title, 5)]
    if diagonal:
        parts.append(element("line", x1=x(0), y1=y(0), x2=x(1), y2=y(1), class_="threshold"))
    parts.append(element("path", d="M" + "L".join(points), class_="outline reference"))
    return element("div", drawing(_SIDE, _SIDE, title, *parts), style=f"max-width: {_SIDE:g}px")


def calibration_chart(bins: Sequence[CalibrationBin]) -> Markup:
    """Draw the share of events against the mean score of each bin; the size of a dot shows its share of rows."""
    x, y = _FRAME.x(0, 1), _FRAME.y(0, 1)
    rows = sum(each.rows for each in bins)
    parts = [_FRAME.y_axis(y, "share of events"), _FRAME.x_axis(x, "mean score of a bin", 5)]
    parts.append(element("line", x1=x(0), y1=y(0), x2=x(1), y2=y(1), class_="threshold"))
    for each in bins:
        if each.mean_score is None or each.share is None:
            continue
        said = f"{each.rows:,} rows with scores from {plain(each.low)} to {plain(each.high)}: mean "
        tip = element("title", f"{said}{plain(each.mean_score)}, share {plain(each.share)}")
        radius = 3 + 14 * (each.rows / rows) ** 0.5
        parts.append(element("circle", tip, cx=x(each.mean_score), cy=y(each.share), r=radius, class_="dot reference"))
    return element("div", drawing(_SIDE, _SIDE, "Calibration", *parts), style=f"max-width: {_SIDE:g}px")


def confusion_chart(confusion: Confusion) -> Markup:
    """Draw the matrix: a row for each label, a column for each prediction. Colours show shares of the row."""
    labels, counts = confusion.labels, confusion.counts
    cell = min(_CELL, _MATRIX_PIXELS / len(labels))
    left, top = _LABEL_PIXELS, 76.0
    parts = [
        element("text", "prediction", x=left, y=14, class_="title"),
        element("text", "label", x=left - 10, y=top - 10, text_anchor="end", class_="title"),
    ]
    for at, label in enumerate(labels):
        text = _short(label)
        across, down = left + (at + 0.5) * cell, top + (at + 0.5) * cell + 4
        turn = f"rotate(-30 {across:.1f} {top - 10:.1f})"
        parts.append(element("text", text, x=across, y=top - 10, transform=turn))
        parts.append(element("text", text, x=left - 10, y=down, text_anchor="end"))
        in_all = sum(counts[at]) or 1
        for column, count in enumerate(counts[at]):
            x, y = left + column * cell, top + at * cell
            tip = element("title", f"{count:,} rows with the label {label}, predicted as {labels[column]}")
            kind = "reference" if column == at else "current"
            shade = f"{count / in_all:.3f}"
            parts.append(element("rect", x=x, y=y, width=cell - 1, height=cell - 1, class_="cell"))
            parts.append(
                element("rect", tip, x=x, y=y, width=cell - 1, height=cell - 1, class_=kind, fill_opacity=shade)
            )
            if cell > 36:
                style = "fill: #ffffff" if count / in_all > 0.55 else None
                parts.append(
                    element(
                        "text", _count(count), x=x + cell / 2, y=y + cell / 2 + 4, text_anchor="middle", style=style
                    )
                )
    width = left + len(labels) * cell + 90
    chart = drawing(width, top + len(labels) * cell + 8, "Confusion matrix", *parts)
    return element("div", chart, style=f"max-width: {width:g}px")


def interval_bar(metric: Metric, low: float, high: float, mark: float | None = None) -> Markup:
    """Draw a metric as a dot and its interval as a line between ``low`` and ``high``; ``mark`` is a requirement."""
    span = (high - low) or 1.0

    def at(value: float) -> float:
        return 6 + (min(max(value, low), high) - low) / span * (_BAR_PIXELS - 12)

    parts = [element("line", x1=6, x2=_BAR_PIXELS - 6, y1=9, y2=9, class_="grid")]
    if mark is not None:
        parts.append(element("line", x1=at(mark), x2=at(mark), y1=0, y2=18, class_="threshold"))
    if metric.low is not None and metric.high is not None:
        line = element("line", x1=at(metric.low), x2=at(metric.high), y1=9, y2=9, class_="interval")
        parts.append(line)
    if metric.value is not None:
        parts.append(element("circle", cx=at(metric.value), cy=9, r=4, class_="dot key reference"))
    return element("svg", joined(parts), width=_BAR_PIXELS, height=18, class_="small", aria_hidden="true")


def _short(label: object) -> str:
    text = str(label)
    return text if len(text) <= _LABEL_CHARACTERS else f"{text[: _LABEL_CHARACTERS - 1]}…"


def _count(count: int) -> str:
    return f"{count:,}" if count < 100_000 else plain(count / 1000) + "k" if count < 10_000_000 else plain(count)
