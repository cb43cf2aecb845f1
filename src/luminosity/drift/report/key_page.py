"""The HTML page of a comparison by key: a table of all keys, and the tests of the keys that drifted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence

from luminosity.drift.report.page import Contents, kind_of, settings_table, test_sections
from luminosity.drift.result import MMDTestResult
from luminosity.report_page.document import document, section
from luminosity.report_page.markup import MISSING, Markup, element, joined, plain

__all__ = ["key_page"]

_HEADS = ("verdict", "p-value", "MMD²", "95% interval", "rows of the reference", "current rows")
_NUMBERS = _HEADS[1:3] + _HEADS[4:]


def key_page(
    by: str, verdict: str, results: Mapping[str, MMDTestResult], detailed: Mapping[str, Contents], whole: Contents
) -> str:
    """Return the page as HTML.

    ``results`` are those of all keys, in the order to show them. ``detailed`` are the contents for the keys whose test
    is shown, ``whole`` has the names and settings of the comparison.
    """
    title = f"{verdict.capitalize()}: {whole.names[0]} and {whole.names[1]}, by {by}"
    sections = [_headline(by, verdict, list(results.values()), whole), _table(by, results, detailed)]
    sections += [_details(at, by, key, contents) for at, (key, contents) in enumerate(detailed.items())]
    result = whole.result
    sections.append(settings_table(whole, f"{result.permutations:,} for each key", has_rows=True))
    return document(title, sections)


def _headline(by: str, verdict: str, results: Sequence[MMDTestResult], whole: Contents) -> Markup:
    kind = "drifted" if verdict == "drift" else "unknown" if verdict == "too few rows" else "steady"
    drifted = sum(result.drift for result in results)
    kinds = ("drift", "gone", "new", "too few rows", "no drift")
    counts = {each: sum(result.verdict == each for result in results) for each in kinds}
    listed = ", ".join(f"{each}: {count:,}" for each, count in counts.items() if count)
    said = f"{drifted:,} of {len(results):,} values of {by} drifted ({listed})"
    names = element("p", f"{whole.names[1]} against {whole.names[0]}, by {by}", class_="muted")
    return element(
        "div", element("h1", verdict.capitalize()), names, element("p", f"{said}."), class_=f"verdict {kind}"
    )


def _table(by: str, results: Mapping[str, MMDTestResult], detailed: Mapping[str, Contents]) -> Markup:
    places = {key: at for at, key in enumerate(detailed)}
    head = element(
        "tr",
        element("th", by),
        *(element("th", text, class_="number" if text in _NUMBERS else None) for text in _HEADS),
    )
    rows = [_row(key, result, places.get(key)) for key, result in results.items()]
    level = plain(next(iter(results.values())).level)
    said = (
        f"Each value has its own test, at a level of {level}: the level of the comparison, divided by the number of "
        "tests, so that more values do not give more false alarms. A value that only one sample has is drift."
    )
    table = element("table", element("thead", head), element("tbody", *rows))
    return section(f"Each {by}", said, element("div", table, class_="wide"))


def _row(key: str, result: MMDTestResult, place: int | None) -> Markup:
    low, high = result.interval
    is_tested = bool(result.kernels)
    name = key if place is None else element("a", key, href=f"#key-{place}")
    return element(
        "tr",
        element("td", name),
        element("td", result.verdict, class_=kind_of(result)),
        element("td", plain(result.p_value) if is_tested else MISSING, class_="number"),
        element("td", plain(result.mmd2), class_="number"),
        element("td", f"{plain(low)} to {plain(high)}" if low == low else MISSING),
        element("td", f"{result.reference_rows:,}", class_="number"),
        element("td", f"{result.current_rows:,}", class_="number"),
    )


def _details(place: int, by: str, key: str, contents: Contents) -> Markup:
    heading = element("summary", element("h2", f"{by}: {key}"), id=f"key-{place}")
    shown = "open" if place == 0 else None
    said = element("p", str(contents.result), class_="muted")
    return element("details", heading, said, joined(test_sections(contents)), open=shown)
