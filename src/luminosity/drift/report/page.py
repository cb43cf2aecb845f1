"""The HTML page of a report: one test, or a table of all keys and the tests of those that drifted."""

from __future__ import annotations

import contextlib
import hashlib
import itertools
import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, field
from datetime import datetime, timedelta
from math import isfinite
from typing import Any

from luminosity.drift.result import DriftResult, PastTest
from luminosity.errors import DriftError
from luminosity.report_page.axes import Frame, Scale, drawing
from luminosity.report_page.document import document, headline, section, settings_section
from luminosity.report_page.markup import MISSING, Markup, element, joined, plain

__all__ = ["Contents", "key_page", "over_time", "page", "write_report_of_point"]

_WIDTH, _HEIGHT = 920.0, 470.0
_UPPER = Frame(left=64, top=44, right=896, bottom=230)
_LOWER = Frame(left=64, top=290, right=896, bottom=420)
_LABELS = 6  # dates below the axis
_RADIUS = 4.5  # pixels
_FORMS = ("%d %b %Y", "%d %b %H:%M", "%d %b %H:%M:%S")


def over_time(tests: Sequence[PastTest]) -> Markup:
    """Draw the tests, of which there is at least one, the oldest first."""
    times = [datetime.fromisoformat(test.time).timestamp() for test in tests]
    by_time = _placed(times)
    in_order = _overlap(by_time)
    places = _placed(range(len(tests))) if in_order else by_time
    heights = [value for test in tests for value in (test.statistic, test.threshold) if value is not None]
    spread = (max(heights) - min(0.0, *heights)) or 1.0
    y = _UPPER.y(min(0.0, *heights) - 0.06 * spread, max(heights) + 0.1 * spread)
    p = _LOWER.y(min(0.5 * min(test.p_value for test in tests), 0.01), 1, logarithmic=True)
    return drawing(
        _WIDTH,
        _HEIGHT,
        f"The statistic and the p-value of {len(tests)} tests over time",
        _UPPER.y_axis(y, "statistic", 4),
        _thresholds(places, y, tests),
        _line(places, [y(test.statistic) for test in tests], tests),
        _LOWER.y_axis(p, "p-value"),
        _level(p, tests[-1].level),
        _line(places, [p(test.p_value) for test in tests], tests),
        _dates_of_tests(places, times) if in_order else _dates(times),
        _legend(tests),
    )


def _placed(numbers: Sequence[float]) -> list[float]:
    x = _scale(numbers)
    return [x(number) for number in numbers]


def _scale(numbers: Sequence[float]) -> Scale:
    beyond = 0.03 * (numbers[-1] - numbers[0]) or 1.0
    return _UPPER.x(numbers[0] - beyond, numbers[-1] + beyond)


def _overlap(places: Sequence[float]) -> bool:
    """Return whether dots of tests overlap because they follow each other closely; equal steps would separate them."""
    gaps = [later - earlier for earlier, later in itertools.pairwise(places)]
    return bool(gaps) and min(gaps) < min(2 * _RADIUS, 0.5 * sum(gaps) / len(gaps))


def _line(places: Sequence[float], heights: Sequence[float], tests: Sequence[PastTest]) -> Markup:
    path = "M" + "L".join(f"{at:.1f} {height:.1f}" for at, height in zip(places, heights, strict=True))
    dots = [
        element("circle", element("title", _tip(test)), cx=at, cy=height, r=_RADIUS, class_=_kind(test))
        for at, height, test in zip(places, heights, tests, strict=True)
    ]
    return joined([element("path", d=path, class_="course"), *dots])


def _tip(test: PastTest) -> str:
    return f"{test.time[:16].replace('T', ' ')} UTC, {test.current}: {test.verdict}, p = {plain(test.p_value)}"


def _kind(test: PastTest) -> str:
    return "drifted mark" if test.drift else "steady mark"


def _thresholds(places: Sequence[float], y: Scale, tests: Sequence[PastTest]) -> Markup:
    """Draw the threshold of each test, which depends on its rows."""
    known = [(at, y(test.threshold)) for at, test in zip(places, tests, strict=True) if test.threshold is not None]
    if not known:
        return Markup()
    if len(known) == 1:
        known = [(_UPPER.left, known[0][1]), (_UPPER.right, known[0][1])]
    path = "M" + "L".join(f"{at:.1f} {height:.1f}" for at, height in known)
    return element("path", d=path, class_="threshold")


def _level(p: Scale, level: float) -> Markup:
    line = element("line", x1=_LOWER.left, x2=_LOWER.right, y1=p(level), y2=p(level), class_="threshold")
    text = f"level {plain(level)}"
    return joined([line, element("text", text, x=_LOWER.right, y=p(level) - 6, text_anchor="end", class_="muted")])


def _dates(times: Sequence[float]) -> Markup:
    """Draw dates at equal distances: days, or minutes if all tests happened within two days."""
    count = min(_LABELS, len(set(times)))
    step = (times[-1] - times[0]) / max(1, count - 1)
    form = _FORMS[1] if timedelta(seconds=times[-1] - times[0]) < timedelta(days=2) else _FORMS[0]
    if times[-1] - times[0] < 60 * count:
        form = _FORMS[2]
    shown, x = [times[0] + at * step for at in range(count)], _scale(times)
    return _axis([x(time) for time in shown], [datetime.fromtimestamp(time).strftime(form) for time in shown])


def _dates_of_tests(places: Sequence[float], times: Sequence[float]) -> Markup:
    """Draw the dates of some tests, in the shortest form that distinguishes them."""
    count = min(_LABELS, len(times))
    shown = [round(at * (len(times) - 1) / max(1, count - 1)) for at in range(count)]
    written = [[datetime.fromtimestamp(times[at]).strftime(form) for at in shown] for form in _FORMS]
    texts = next((each for each in written if len(set(each)) == count), written[-1])
    return joined(
        [
            _axis([places[at] for at in shown], texts),
            _LOWER.x_title("one step per test; distances are not proportional to time"),
        ]
    )


def _axis(places: Sequence[float], texts: Sequence[str]) -> Markup:
    labels: list[Markup] = []
    for at, (place, text) in enumerate(zip(places, texts, strict=True)):
        anchor = "middle" if len(texts) == 1 else "start" if at == 0 else "end" if at == len(texts) - 1 else "middle"
        labels.append(element("text", text, x=place, y=_LOWER.bottom + 22, text_anchor=anchor))
        labels.append(element("line", x1=place, x2=place, y1=_LOWER.bottom, y2=_LOWER.bottom + 5, class_="axis"))
    line = element("line", x1=_LOWER.left, x2=_LOWER.right, y1=_LOWER.bottom, y2=_LOWER.bottom, class_="axis")
    return joined([line, *labels])


def _legend(tests: Sequence[PastTest]) -> Markup:
    drifted = sum(test.drift for test in tests)
    steady = len(tests) - drifted
    return _UPPER.legend(
        ("drifted mark", f"drift ({drifted})", _RADIUS), ("steady mark", f"no drift ({steady})", _RADIUS)
    )


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


MOST_REPORTS = 1000  # files in a folder of reports, the newest: about 100 MB
_PREFIX = "drift-"


def write_report_of_point(folder: str, identity: str, write: Callable[[str], None]) -> str:
    """Write a report and return its path. The same identity gives the same file; the oldest reports are deleted.

    ``write`` is called with the path. It must replace a file that is there, or leave it whole.
    """
    try:
        os.makedirs(folder, exist_ok=True)
    except OSError as error:
        raise DriftError(f"{folder}: can't write reports there; {error}") from None
    name = f"{_PREFIX}{hashlib.sha256(identity.encode()).hexdigest()[:24]}.html"
    path = os.path.join(os.path.abspath(folder), name)
    write(path)
    _prune(folder)
    return path


def _prune(folder: str) -> None:
    with os.scandir(folder) as entries:
        names = [each.name for each in entries if each.name.startswith(_PREFIX) and each.name.endswith(".html")]
    if len(names) <= MOST_REPORTS:
        return
    ages: dict[str, float] = {}
    for name in names:
        with contextlib.suppress(FileNotFoundError):  # Another process prunes, too.
            ages[name] = os.stat(os.path.join(folder, name)).st_mtime
    for name in sorted(ages, key=ages.__getitem__)[: len(names) - MOST_REPORTS]:
        with contextlib.suppress(FileNotFoundError):
            os.remove(os.path.join(folder, name))
