"""The result of an MMD test, and how it is drawn: the null distribution and the table of kernels."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import isfinite, nan
from typing import Any, ClassVar

from luminosity.drift.result import SAME_ROWS, DriftResult, chart_image
from luminosity.report_page.axes import Frame, Scale, drawing, with_room
from luminosity.report_page.document import section
from luminosity.report_page.markup import MISSING, Markup, element, joined, plain

__all__ = ["QUANTILES", "Histogram", "KernelResult", "MMDTestResult", "untested"]

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)  # of the null distribution, in every result
_WIDTH, _HEIGHT = 920.0, 320.0
_FRAME = Frame(left=64, top=56, right=896, bottom=264)
_MOST_TIMES = 5.0  # a statistic farther out than this many widths of the null is shown as an arrow
_HEADS = ("kernel", "bandwidth", "MMD²", "95% interval", "MMD² in standard deviations of the null", "p-value")
_BAR_PIXELS = 200.0  # of the longest bar


@dataclass(frozen=True)
class KernelResult:
    """The result of one kernel alone.

    With several kernels, do not pick the smallest p-value: ``MMDTestResult.p_value`` accounts for all of them.
    """

    kernel: str
    bandwidth: float | None
    mmd2: float
    interval: tuple[float, float]
    null_sd: float
    p_value: float


@dataclass(frozen=True)
class Histogram:
    """Counts between consecutive edges."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class MMDTestResult(DriftResult):
    """The result of a test whether two samples come from the same distribution.

    ``statistic`` is what was permuted: MMD² with one kernel, the largest standardised MMD² with several. The null's
    quantiles and histogram are in its unit. ``mmd2`` and its 95% ``interval`` are those of the kernel with the smallest
    p-value. ``p_value_interval`` is a 95% interval for the p-value that all permutations together would give.
    ``smallest_p_value`` is the p-value that the most extreme samples of these sizes would get: few rows have few
    permutations. If it is above ``level``, no data could have given drift. ``same_rows`` says that both samples hold
    the same rows, in whatever order: most likely one file was taken for two. Tests in a pipeline do not look for that.

    In a test by key, one sample may have no row of a key. Then nothing is compared, ``p_value`` is 0, the statistic and
    everything about the null distribution are NaN or empty, and ``verdict`` is ``"gone"`` or ``"new"``.
    """

    test: ClassVar[str] = "mmd"
    effect_name: ClassVar[str] = "MMD²"
    libraries: ClassVar[tuple[str, ...]] = ("jax",)

    mmd2: float
    interval: tuple[float, float]
    statistic: float
    p_value: float
    p_value_interval: tuple[float, float]
    level: float
    null_sd: float
    null_quantiles: dict[float, float]
    null_histogram: Histogram = field(repr=False)  # longer than all other fields together
    kernels: tuple[KernelResult, ...]
    reference_rows: int
    current_rows: int
    reference_bins: int
    current_bins: int
    permutations: int
    seed: int
    precision: str
    smallest_p_value: float = 0.0
    same_rows: bool = False

    @property
    def effect(self) -> float:
        """The MMD² of the kernel with the smallest p-value."""
        return self.mmd2

    @property
    def is_compared(self) -> bool:
        """Whether samples were compared: both had at least two rows."""
        return bool(self.kernels)

    @property
    def threshold(self) -> float | None:
        """The quantile of the null distribution that the statistic must exceed, if it is one of those kept."""
        return self.null_quantiles.get(round(1 - self.level, 9))

    @property
    def setup(self) -> str:
        """The names of the kernels."""
        return ", ".join(each.kernel for each in self.kernels)

    @property
    def strength(self) -> float:
        """MMD² in standard deviations of the null distribution."""
        return self.mmd2 / self.null_sd if self.kernels and self.null_sd else 0.0

    def settings(self) -> dict[str, Any]:
        """Return the number of permutations, the level, the seed and the precision."""
        return {name: getattr(self, name) for name in ("permutations", "level", "seed", "precision")}

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON. What there are too few rows to compute is None."""
        found = asdict(self)
        for each in (found, *found["kernels"]):
            each["interval"] = each["interval"] if isfinite(each["interval"][0]) else None
        for name in ("mmd2", "statistic", "null_sd"):
            found[name] = found[name] if isfinite(found[name]) else None
        found["null_quantiles"] = {format(at, "g"): value for at, value in self.null_quantiles.items()}
        return {"drift": self.drift, "verdict": self.verdict, **found}

    def figures(self) -> str:
        """Return the p-value, and MMD² with its interval."""
        low, high = self.interval
        interval = f" ({low:.4g} to {high:.4g})" if isfinite(low) else ""
        same = SAME_ROWS if self.same_rows and self.verdict != "too few rows" else ""
        return f"p = {self.p_value:.4g}, MMD² = {self.mmd2:.4g}{interval}{same}"

    def said(self) -> str:
        """Return how many permutations gave a difference as large."""
        reached = round(self.p_value * (self.permutations + 1)) - 1
        chance = (
            f": {f'{reached:,}' if reached else 'none'} of {self.permutations:,} random permutations of the rows "
            f"gave a difference as large (p = {plain(self.p_value)}, level {plain(self.level)})."
        )
        same = " Both samples have the same rows: perhaps one file was taken for two." if self.same_rows else ""
        return super().said().partition(":")[0] + chance + same

    def facts(self) -> list[tuple[str, str, str]]:
        """Return the boxes at the top of a report."""
        low, high = self.interval
        interval = f"95% interval: {plain(low)} to {plain(high)}" if low == low else ""
        p_value = ("p-value", plain(self.p_value), f"{self.permutations:,} permutations")
        return [p_value, ("MMD²", plain(self.mmd2), interval), *super().facts()[2:]]

    def sections(self) -> list[Markup]:
        """Return the null distribution with the statistic, and the table of kernels."""
        return [_chance(self), _kernels(self)]

    def charts(self) -> list[Markup]:
        """Return the histogram of the null distribution with the statistic, for a notebook."""
        return [chart_image(_null_histogram(self), "the statistic among those of permutations")] if self.kernels else []


def untested(
    reference_rows: int, current_rows: int, *, permutations: int, level: float, seed: int, precision: str
) -> MMDTestResult:
    """Return the result of a key that can't be compared: a sample has no row of it, or only one.

    A key without rows in both samples, because all were left out, has not drifted.

    >>> print(untested(312, 0, permutations=1000, level=0.05, seed=0, precision="float32"))
    gone: no rows in the current sample, 312 rows in the reference
    """
    p_value = 1.0 if bool(reference_rows) == bool(current_rows) else 0.0
    return MMDTestResult(
        mmd2=nan,
        interval=(nan, nan),
        statistic=nan,
        p_value=p_value,
        p_value_interval=(p_value, p_value),
        level=level,
        null_sd=nan,
        null_quantiles={},
        null_histogram=Histogram((), ()),
        kernels=(),
        reference_rows=reference_rows,
        current_rows=current_rows,
        reference_bins=0,
        current_bins=0,
        permutations=permutations,
        seed=seed,
        precision=precision,
        smallest_p_value=p_value,
    )


def _chance(result: MMDTestResult) -> Markup:
    low, high = result.p_value_interval
    said = (
        f"The bars show the statistic of {result.permutations:,} random permutations of the rows: what chance alone "
        f"gives. The p-value is the share of permutations with a statistic at least as large as that of these samples. "
        f"With this many permutations, its 95% interval is {plain(low, 2)} to {plain(high, 2)}."
    )
    return section("Could it be chance?", said, _null_histogram(result))


def _kernels(result: MMDTestResult) -> Markup:
    said = "A kernel measures how similar two rows are. Its bandwidth is the distance at which rows count as similar."
    if len(result.kernels) > 1:
        said += (
            f" Each row of the table is one kernel alone. The p-value of the test, {plain(result.p_value)}, accounts "
            "for all kernels: do not pick the smallest p-value here."
        )
    return section("What each kernel detects", said, element("div", _kernel_table(result), class_="wide"))


def _null_histogram(result: MMDTestResult) -> Markup:
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


def _kernel_table(result: MMDTestResult) -> Markup:
    most = max(1.0, *(abs(_standard(each)) for each in result.kernels))
    head = element(
        "tr", *(element("th", text, class_="number" if text in ("MMD²", "p-value") else None) for text in _HEADS)
    )
    rows = [_row(each, most, result.level) for each in result.kernels]
    return element("table", element("thead", head), element("tbody", *rows))


def _row(each: KernelResult, most: float, level: float) -> Markup:
    low, high = each.interval
    cells = [
        element("td", each.kernel.partition("(")[0] if each.bandwidth is not None else each.kernel),
        element("td", MISSING if each.bandwidth is None else plain(each.bandwidth, 4)),
        element("td", plain(each.mmd2), class_="number"),
        element("td", f"{plain(low)} to {plain(high)}" if low == low else MISSING),
        element("td", _kernel_bar(_standard(each), most, each.p_value <= level)),
        element("td", plain(each.p_value), class_="number"),
    ]
    return element("tr", *cells)


def _kernel_bar(value: float, most: float, drifted: bool) -> Markup:
    width = max(1.0, max(0.0, value) / most * _BAR_PIXELS)
    kind = "drifted fill" if drifted else "bar"
    bar = element("rect", x=0, y=3, width=width, height=12, rx=2, class_=kind)
    text = element("text", plain(value), x=width + 8, y=13)
    return element("svg", joined([bar, text]), width=_BAR_PIXELS + 60, height=18, class_="small", aria_hidden="true")


def _standard(each: KernelResult) -> float:
    return each.mmd2 / each.null_sd if each.null_sd else 0.0
