"""The HTML page of a report: its sections, in reading order."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from luminosity.drift.history import PastTest
from luminosity.drift.report.null_histogram import null_histogram
from luminosity.drift.report.over_time import over_time
from luminosity.drift.report.scatter import POINTS
from luminosity.drift.report.witness_rows import WitnessRow, witness_tables
from luminosity.drift.result import KernelResult, MMDTestResult
from luminosity.drift.witness_function import Extremes
from luminosity.report_page.document import document, headline, section, settings_section
from luminosity.report_page.markup import MISSING, Markup, element, joined, plain

__all__ = ["Contents", "kind_of", "page", "settings_table", "test_sections"]

_HEADS = ("kernel", "bandwidth", "MMD²", "95% interval", "MMD² in standard deviations of the null", "p-value")
_BAR_PIXELS = 200.0  # of the longest bar
_SAID = {
    "drift": "The two samples differ by more than chance explains",
    "no drift": "The test found no difference",
    "too few rows": "There are so few rows that no p-value can be as low as the level, however different they are",
}


@dataclass(frozen=True)
class Contents:
    """The contents of the page. Sections without data are left out."""

    result: MMDTestResult
    names: tuple[str, str]
    scatter: Markup | None = None
    extremes: Extremes | None = None
    gone: Sequence[WitnessRow] = ()
    new: Sequence[WitnessRow] = ()
    history: Sequence[PastTest] = ()
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])


def page(contents: Contents) -> str:
    """Return the page as HTML."""
    verdict = contents.result.verdict.capitalize()
    title = f"{verdict}: {contents.names[0]} and {contents.names[1]}"
    return document(title, [_headline(contents), *test_sections(contents), _settings(contents)])


def test_sections(contents: Contents) -> list[Markup]:
    """Return the sections on one test, without its headline and settings."""
    sections = [_chance(contents.result), _kernels(contents.result)]
    if contents.scatter is not None:
        sections.append(_both(contents.scatter))
    if contents.extremes is not None:
        sections.append(_rows(contents, contents.extremes))
    if contents.history:
        sections.append(_history(contents.history))
    return sections


def kind_of(result: MMDTestResult) -> str:
    """Return the style of a result: drift and its opposite are coloured, too few rows are not."""
    return "drifted" if result.drift else "unknown" if result.verdict == "too few rows" else "steady"


def _headline(contents: Contents) -> Markup:
    result = contents.result
    kind, verdict = kind_of(result), result.verdict.capitalize()
    said = _SAID[result.verdict]
    reached = round(result.p_value * (result.permutations + 1)) - 1
    chance = (
        f": {f'{reached:,}' if reached else 'none'} of {result.permutations:,} random permutations of the rows "
        f"gave a difference as large (p = {plain(result.p_value)}, level {plain(result.level)})."
    )
    if result.same_rows:
        chance += " Both samples have the same rows: perhaps one file was taken for two."
    low, high = result.interval
    facts = [
        ("p-value", plain(result.p_value), f"{result.permutations:,} permutations"),
        ("MMD²", plain(result.mmd2), f"95% interval: {plain(low)} to {plain(high)}" if low == low else ""),
        ("reference", f"{result.reference_rows:,}", "rows"),
        ("current", f"{result.current_rows:,}", "rows"),
    ]
    names = f"{contents.names[1]} against {contents.names[0]}"
    return headline(verdict, kind, names, said + chance, facts)


def _chance(result: MMDTestResult) -> Markup:
    low, high = result.p_value_interval
    said = (
        f"The bars show the statistic of {result.permutations:,} random permutations of the rows: what chance alone "
        f"gives. The p-value is the share of permutations with a statistic at least as large as that of these samples. "
        f"With this many permutations, its 95% interval is {plain(low, 2)} to {plain(high, 2)}."
    )
    return section("Could it be chance?", said, null_histogram(result))


def _kernels(result: MMDTestResult) -> Markup:
    said = "A kernel measures how similar two rows are. Its bandwidth is the distance at which rows count as similar."
    if len(result.kernels) > 1:
        said += (
            f" Each row of the table is one kernel alone. The p-value of the test, {plain(result.p_value)}, accounts "
            "for all kernels: do not pick the smallest p-value here."
        )
    return section("What each kernel detects", said, element("div", _kernel_table(result), class_="wide"))


def _both(drawn: Markup) -> Markup:
    said = (
        f"At most {POINTS:,} random rows of each sample. Rows of several numbers are shown along the two directions in "
        "which both samples together vary most. Samples can differ in directions that this chart does not show."
    )
    return section("Both samples", said, drawn)


def _rows(contents: Contents, extremes: Extremes) -> Markup:
    said = "Rows that are typical of one sample and rare in the other. Rows that say the same are shown once."
    if not contents.result.drift:
        said = "The test found no drift, so these rows differ by no more than chance explains."
    return section("The rows that differ most", said, witness_tables(contents.gone, contents.new, extremes))


def _history(tests: Sequence[PastTest]) -> Markup:
    said = (
        f"The last {len(tests)} tests" if len(tests) > 1 else "The first test"
    ) + " of these columns against this reference with this kernel. The dashed line is the threshold for drift."
    return section("Over time", said, over_time(tests))


def _settings(contents: Contents) -> Markup:
    result = contents.result
    permutations = f"{result.permutations:,}, of {result.reference_bins} + {result.current_bins} bins"
    return settings_table(contents, permutations, has_rows=contents.extremes is not None)


def settings_table(contents: Contents, permutations: str, *, has_rows: bool) -> Markup:
    """Draw the table of settings. ``permutations`` says how many there were."""
    result = contents.result
    shown = {
        "reference": contents.names[0],
        "current": contents.names[1],
        "permutations": permutations,
        "level": plain(result.level),
        "seed": str(result.seed),
        "precision": result.precision,
        **contents.settings,
    }
    return settings_section(shown, ("luminosity", "jax", "numpy"), "rows of the data" if has_rows else "")


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
