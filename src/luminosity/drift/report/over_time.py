"""The chart of past tests against the same reference: their statistics and p-values."""

from __future__ import annotations

import itertools
from collections.abc import Sequence
from datetime import datetime, timedelta

from luminosity.drift.history import PastTest
from luminosity.report_page.axes import Frame, Scale, drawing
from luminosity.report_page.markup import Markup, element, joined, plain

__all__ = ["over_time"]

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
    entries = [("drifted mark", f"drift ({drifted})"), ("steady mark", f"no drift ({len(tests) - drifted})")]
    at, parts = _UPPER.right, list[Markup]()
    for kind, text in reversed(entries):
        at -= 7.2 * len(text)
        parts += [element("text", text, x=at, y=20), element("circle", cx=at - 12, cy=16, r=_RADIUS, class_=kind)]
        at -= 36
    return joined(parts)
