"""Results of tests as HTML for a cell of a notebook."""

from __future__ import annotations

import base64
from collections.abc import Mapping

from luminosity.drift.report.null_histogram import null_histogram
from luminosity.drift.result import MMDTestResult
from luminosity.report_page.markup import Markup, element, joined, plain
from luminosity.report_page.style import STYLE

__all__ = ["detector_html", "keys_html", "result_html"]

_COLOURS = {"drift": "#c44500", "no drift": "#00795a"}  # those of the report; verdicts without one are grey
_OTHER = "#5d6877"
_PIXELS = 720  # of the chart
_METER_PIXELS = 360.0


def result_html(result: MMDTestResult) -> str:
    """Return the verdict, the numbers behind it, and the histogram of the null with the statistic."""
    text = _verdict(result) + element("span", f" · {result.reference_rows:,} rows against {result.current_rows:,}")
    if not result.kernels:
        return element("div", Markup(text))
    return element("div", Markup(text), _image(null_histogram(result), "the statistic among those of permutations"))


def keys_html(results: Mapping[str, MMDTestResult], by: str) -> str:
    """Return a table with the verdict of each key."""
    heads = (by, "verdict", "p-value", "MMD²", "reference rows", "current rows")
    rows = [
        element(
            "tr",
            element("td", key),
            element("td", result.verdict, style=f"color: {_colour(result)}; font-weight: 600"),
            element("td", plain(result.p_value) if result.kernels else ""),
            element("td", plain(result.mmd2)),
            element("td", f"{result.reference_rows:,}"),
            element("td", f"{result.current_rows:,}"),
        )
        for key, result in results.items()
    ]
    head = element("thead", element("tr", *(element("th", name) for name in heads)))
    return element("table", head, element("tbody", *rows))


def detector_html(detected_at: int | None, rows: int, window: int, statistic: float, threshold: float) -> str:
    """Return the state of an online detector: whether there was an alarm, and how near the statistic is to one."""
    said = f"drift detected after {detected_at:,} rows" if detected_at is not None else "no drift so far"
    colour = _COLOURS["no drift" if detected_at is None else "drift"]
    parts = [
        element("b", said, style=f"color: {colour}"),
        element("span", f" · {rows:,} rows seen, window of {window:,}"),
    ]
    if rows and threshold == threshold and threshold > 0:
        parts += [_meter(statistic / threshold, colour), f"MMD² {plain(statistic)}, threshold {plain(threshold)}"]
    return element("div", *parts)


def _meter(share: float, colour: str) -> Markup:
    """Draw the statistic as a bar; the mark is the threshold."""
    at = _METER_PIXELS / 2
    bar = element("rect", x=0, y=4, width=min(max(share, 0.0) * at, _METER_PIXELS), height=10, fill=colour)
    mark = element("line", x1=at, x2=at, y1=0, y2=18, stroke="#1c2430", stroke_width=2)
    ground = element("rect", x=0, y=0, width=_METER_PIXELS, height=18, fill="#f6f7f9")
    drawn = element("svg", ground, bar, mark, width=_METER_PIXELS, height=18, style="display: block; margin: 4px 0")
    return drawn


def _verdict(result: MMDTestResult) -> str:
    verdict, _, rest = str(result).partition(":")
    return joined([element("b", verdict, style=f"color: {_colour(result)}"), f":{rest}"])


def _colour(result: MMDTestResult) -> str:
    return _COLOURS["drift"] if result.drift else _COLOURS.get(result.verdict, _OTHER)


def _image(drawn: Markup, label: str) -> Markup:
    """Return a chart as an image: its style sheet must not apply to the notebook.

    It is always light: a notebook's theme need not be that of the system, and an image can't see it.
    """
    light = STYLE[STYLE.index(":root") : STYLE.index("@media (prefers-color-scheme")].replace("light dark", "light")
    ground = '<rect width="100%" height="100%" fill="#ffffff"/>'
    start = drawn.index(">") + 1
    picture = f"{drawn[:start]}<style>{STYLE}{light}</style>{ground}{drawn[start:]}"
    data = base64.b64encode(picture.encode()).decode()
    return element(
        "img", alt=label, src=f"data:image/svg+xml;base64,{data}", style=f"width: {_PIXELS}px; max-width: 100%"
    )
