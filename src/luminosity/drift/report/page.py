"""The HTML page of a report: one test, or a table of all keys and the tests of those that drifted."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from math import isfinite
from typing import Any

from luminosity.drift.history import PastTest
from luminosity.drift.report.over_time import over_time
from luminosity.drift.result import DriftResult
from luminosity.report_page.document import document, headline, section, settings_section
from luminosity.report_page.markup import MISSING, Markup, element, joined, plain

__all__ = ["Contents", "key_page", "page"]

_LIBRARIES = ("luminosity", "numpy")


@dataclass(frozen=True)
class Contents:
    """What a report on one test shows. ``holds`` says what it shows of the data, if anything."""

    result: DriftResult
    names: tuple[str, str]
    sections: Sequence[Markup] = ()
    history: Sequence[PastTest] = ()
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    holds: str = ""


def page(contents: Contents) -> str:
    """Return the page of one test as HTML."""
    result, names = contents.result, contents.names
    verdict = result.verdict.capitalize()
    top = headline(verdict, _kind_of(result), f"{names[1]} against {names[0]}", result.said(), result.facts())
    return document(f"{verdict}: {names[0]} and {names[1]}", [top, *_test_sections(contents), _settings(contents)])


def key_page(
    by: str, verdict: str, results: Mapping[str, DriftResult], detailed: Mapping[str, Contents], whole: Contents
) -> str:
    """Return the page of a comparison by key as HTML.

    ``results`` are those of all keys, in the order to show them. ``detailed`` are the contents for the keys whose test
    is shown, ``whole`` has the names and settings of the comparison.
    """
    title = f"{verdict.capitalize()}: {whole.names[0]} and {whole.names[1]}, by {by}"
    sections = [_headline_of_keys(by, verdict, list(results.values()), whole), _table(by, results, detailed)]
    sections += [_details(at, by, key, contents) for at, (key, contents) in enumerate(detailed.items())]
    return document(title, [*sections, _settings(whole)])


def _test_sections(contents: Contents) -> list[Markup]:
    """Return the sections on one test, without its headline and settings."""
    drawable = [test for test in contents.history if isfinite(test.statistic)]
    over = [_history(drawable)] if drawable else []
    return [*contents.result.sections(), *contents.sections, *over]


def _kind_of(result: DriftResult) -> str:
    """Return the style of a result: drift and its opposite are coloured, too few rows are not."""
    return "drifted" if result.drift else "unknown" if result.verdict == "too few rows" else "steady"


def _history(tests: Sequence[PastTest]) -> Markup:
    said = (
        f"The last {len(tests)} tests" if len(tests) > 1 else "The first test"
    ) + " of these columns against this reference with this setup."
    if any(test.threshold is not None for test in tests):
        said += " The dashed line is the threshold for drift."
    return section("Over time", said, over_time(tests))


def _settings(contents: Contents) -> Markup:
    shown = {
        "reference": contents.names[0],
        "current": contents.names[1],
        "test": contents.result.test,
        **{name: _as_text(value) for name, value in contents.result.settings().items()},
        **contents.settings,
    }
    libraries = (*_LIBRARIES, *contents.result.libraries)
    return settings_section(shown, libraries, contents.holds)


def _as_text(value: Any) -> str:
    return plain(value) if isinstance(value, float) else f"{value:,}" if isinstance(value, int) else str(value)


def _headline_of_keys(by: str, verdict: str, results: Sequence[DriftResult], whole: Contents) -> Markup:
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


def _table(by: str, results: Mapping[str, DriftResult], detailed: Mapping[str, Contents]) -> Markup:
    places = {key: at for at, key in enumerate(detailed)}
    first = next(iter(results.values()))
    numbers = ("p-value", first.effect_name, "rows of the reference", "current rows")
    heads = ("verdict", "p-value", first.effect_name, "details", "rows of the reference", "current rows")
    head = element(
        "tr",
        element("th", by),
        *(element("th", text, class_="number" if text in numbers else None) for text in heads),
    )
    rows = [_row(key, result, places.get(key)) for key, result in results.items()]
    said = (
        f"Each value has its own test, at a level of {plain(first.level)}: the level of the comparison, divided by the "
        "number of tests, so that more values do not give more false alarms. A value that only one sample has is drift."
    )
    table = element("table", element("thead", head), element("tbody", *rows))
    return section(f"Each {by}", said, element("div", table, class_="wide"))


def _row(key: str, result: DriftResult, place: int | None) -> Markup:
    name = key if place is None else element("a", key, href=f"#key-{place}")
    remark = next((remark for name, _, remark in result.facts() if name == result.effect_name), "")
    return element(
        "tr",
        element("td", name),
        element("td", result.verdict, class_=_kind_of(result)),
        element("td", plain(result.p_value) if result.is_compared else MISSING, class_="number"),
        element("td", plain(result.effect), class_="number"),
        element("td", remark if result.is_compared and remark else MISSING),
        element("td", f"{result.reference_rows:,}", class_="number"),
        element("td", f"{result.current_rows:,}", class_="number"),
    )


def _details(place: int, by: str, key: str, contents: Contents) -> Markup:
    heading = element("summary", element("h2", f"{by}: {key}"), id=f"key-{place}")
    shown = "open" if place == 0 else None
    said = element("p", str(contents.result), class_="muted")
    return element("details", heading, said, joined(_test_sections(contents)), open=shown)
