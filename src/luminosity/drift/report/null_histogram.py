"""The chart that shows the statistic among those of random permutations."""

from __future__ import annotations

from luminosity.drift.result import MMDTestResult
from luminosity.report_page.axes import Frame, Scale, drawing, with_room
from luminosity.report_page.markup import Markup, element, joined, plain

__all__ = ["null_histogram"]

_WIDTH, _HEIGHT = 920.0, 320.0
_FRAME = Frame(left=64, top=56, right=896, bottom=264)
_MOST_TIMES = 5.0  # a statistic farther out than this many widths of the null is shown as an arrow


def null_histogram(result: MMDTestResult) -> Markup:
    """Draw the histogram of the null distribution, the threshold and the statistic."""
    edges, counts = result.null_histogram.edges, result.null_histogram.counts
    low, high = min(edges[0], result.statistic), edges[-1]
    width = (edges[-1] - edges[0]) or abs(result.statistic) or 1.0
    beyond = result.statistic > high + _MOST_TIMES * width
    right = high + _MOST_TIMES * width * 0.4 if beyond else max(high, result.statistic)
    x = _FRAME.x(*with_room(low - 0.04 * (right - low), right + 0.08 * (right - low)))
    y = _FRAME.y(0, max(counts) * 1.08)
    threshold = result.null_quantiles.get(round(1 - result.level, 9))
    bars = [
        _bar(x, y, edges[at], edges[at + 1], count, threshold is not None and edges[at] >= threshold)
        for at, count in enumerate(counts)
        if count
    ]
    title = "MMD²" if len(result.kernels) == 1 else "statistic over all kernels, in standard deviations of the null"
    parts = [
        _FRAME.y_axis(y, "permutations", 4),
        *bars,
        _FRAME.x_axis(x, title),
        _threshold(x, threshold, result.level) if threshold is not None else Markup(),
        _statistic(x, result, beyond),
    ]
    label = f"Histogram of {result.permutations:,} permutations; the statistic is {plain(result.statistic)}"
    return drawing(_WIDTH, _HEIGHT, label, *parts)


def _bar(x: Scale, y: Scale, start: float, end: float, count: int, in_tail: bool) -> Markup:
    wide = max(1.0, x(end) - x(start) - 0.6)
    kind = "bar tail" if in_tail else "bar"
    tip = element("title", f"{plain(start)} to {plain(end)}: {count:,} permutations")
    return element("rect", tip, x=x(start), y=y(count), width=wide, height=y(0) - y(count), class_=kind)


def _threshold(x: Scale, value: float, level: float) -> Markup:
    line = element("line", x1=x(value), x2=x(value), y1=_FRAME.top, y2=_FRAME.bottom, class_="threshold")
    text = f"{plain(100 * (1 - level))}% of permutations lie below"
    return joined([line, element("text", text, x=x(value) + 6, y=_FRAME.top + 10, class_="muted")])


def _statistic(x: Scale, result: MMDTestResult, beyond: bool) -> Markup:
    at = _FRAME.right if beyond else x(result.statistic)
    kind = "drifted" if result.drift else "steady"
    anchor = "end" if at > _WIDTH * 0.75 else "start" if at < _WIDTH * 0.25 else "middle"
    said = f"these samples: {plain(result.statistic)}"
    if beyond:
        away = (result.statistic - result.null_quantiles[0.5]) / (result.null_sd or 1)
        said += f", {plain(away, 2)} standard deviations from the median"
    text = element("text", said, x=at, y=_FRAME.top - 28, text_anchor=anchor, class_=f"{kind} strong")
    if beyond:
        middle = (_FRAME.top + _FRAME.bottom) / 2
        arrow = f"M{at - 70} {middle}H{at}m-9 -7l9 7l-9 7"
        return joined([element("path", d=arrow, class_=f"{kind} line"), text])
    line = element("line", x1=at, x2=at, y1=_FRAME.top - 22, y2=_FRAME.bottom, class_=f"{kind} line")
    return joined([line, text])
