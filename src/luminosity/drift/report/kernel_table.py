"""What each kernel sees by itself."""

from __future__ import annotations

from luminosity.drift.report.markup import Markup, element, joined
from luminosity.drift.report.numbers import MISSING, plain
from luminosity.drift.result import KernelResult, MMDTestResult

__all__ = ["kernel_table"]

_HEADS = ("kernel", "bandwidth", "MMD²", "95% interval", "in standard deviations of the null", "p")
_BAR_PIXELS = 200.0


def kernel_table(result: MMDTestResult) -> Markup:
    most = max(1.0, *(abs(_standard(each)) for each in result.kernels))
    head = element("tr", *(element("th", text, class_="number" if text in ("MMD²", "p") else None) for text in _HEADS))
    rows = [_row(each, most, result.level) for each in result.kernels]
    return element("table", element("thead", head), element("tbody", *rows))


def _row(each: KernelResult, most: float, level: float) -> Markup:
    low, high = each.interval
    cells = [
        element("td", each.kernel.partition("(")[0] if each.bandwidth is not None else each.kernel),
        element("td", MISSING if each.bandwidth is None else plain(each.bandwidth, 4)),
        element("td", plain(each.mmd2), class_="number"),
        element("td", f"{plain(low)} to {plain(high)}" if low == low else MISSING),
        element("td", _bar(_standard(each), most, each.p_value <= level)),
        element("td", plain(each.p_value), class_="number"),
    ]
    return element("tr", *cells)


def _bar(value: float, most: float, drifted: bool) -> Markup:
    width = max(1.0, max(0.0, value) / most * _BAR_PIXELS)
    kind = "drifted fill" if drifted else "bar"
    bar = element("rect", x=0, y=3, width=width, height=12, rx=2, class_=kind)
    text = element("text", plain(value), x=width + 8, y=13)
    return element("svg", joined([bar, text]), width=_BAR_PIXELS + 60, height=18, class_="small", aria_hidden="true")


def _standard(each: KernelResult) -> float:
    return each.mmd2 / each.null_sd if each.null_sd else 0.0
