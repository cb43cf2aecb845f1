"""The statistic and the p-value of past tests against the same reference."""

from __future__ import annotations

from collections.abc import Sequence
from datetime import datetime, timedelta

from luminosity.drift.history import PastTest
from luminosity.drift.report.axes import Frame, Scale, drawing
from luminosity.drift.report.markup import Markup, element, joined
from luminosity.drift.report.numbers import plain

__all__ = ["over_time"]

_WIDTH, _HEIGHT = 920.0, 470.0
_UPPER = Frame(left=64, top=44, right=896, bottom=230)
_LOWER = Frame(left=64, top=290, right=896, bottom=420)
_LABELS = 6


def over_time(tests: Sequence[PastTest]) -> Markup:
    """At least one, the oldest first."""
    times = [datetime.fromisoformat(test.time).timestamp() for test in tests]
    apart = (times[-1] - times[0]) or 1.0
    x = _UPPER.x(times[0] - 0.03 * apart, times[-1] + 0.03 * apart)
    heights = [value for test in tests for value in (test.statistic, test.threshold) if value is not None]
    spread = (max(heights) - min(0.0, *heights)) or 1.0
    y = _UPPER.y(min(0.0, *heights) - 0.06 * spread, max(heights) + 0.1 * spread)
    p = _LOWER.y(min(0.5 * min(test.p_value for test in tests), 0.01), 1, logarithmic=True)
    places = [x(time) for time in times]
    return drawing(
        _WIDTH,
        _HEIGHT,
        f"The statistic and the p-value of {len(tests)} tests over time",
        _UPPER.y_axis(y, "statistic", 4),
        _thresholds(places, y, tests),
        _line(places, [y(test.statistic) for test in tests], tests),
        _LOWER.y_axis(p, "p"),
        _level(p, tests[-1].level),
        _line(places, [p(test.p_value) for test in tests], tests),
        _dates(x, times),
        _legend(tests),
    )


def _line(places: Sequence[float], heights: Sequence[float], tests: Sequence[PastTest]) -> Markup:
    path = "M" + "L".join(f"{at:.1f} {height:.1f}" for at, height in zip(places, heights, strict=True))
    dots = [
        element("circle", element("title", _told(test)), cx=at, cy=height, r=4.5, class_=_kind(test))
        for at, height, test in zip(places, heights, tests, strict=True)
    ]
    return joined([element("path", d=path, class_="course"), *dots])


def _told(test: PastTest) -> str:
    verdict = "drift" if test.drift else "no drift"
    return f"{test.time[:16].replace('T', ' ')} UTC, {test.current}: {verdict}, p = {plain(test.p_value)}"


def _kind(test: PastTest) -> str:
    return "drifted mark" if test.drift else "steady mark"


def _thresholds(places: Sequence[float], y: Scale, tests: Sequence[PastTest]) -> Markup:
    """What each had to exceed: it depends on its rows."""
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


def _dates(x: Scale, times: Sequence[float]) -> Markup:
    """In the reader's words as far as they are needed: days, or minutes where all happened within two."""
    count = min(_LABELS, len(set(times)))
    step = (times[-1] - times[0]) / max(1, count - 1)
    form = "%d %b %H:%M" if timedelta(seconds=times[-1] - times[0]) < timedelta(days=2) else "%d %b %Y"
    if times[-1] - times[0] < 60 * count:
        form = "%d %b %H:%M:%S"
    labels: list[Markup] = []
    for at in range(count):
        place = x(times[0] + at * step)
        text = datetime.fromtimestamp(times[0] + at * step).strftime(form)
        anchor = "start" if at == 0 and count > 1 else "end" if at == count - 1 and count > 1 else "middle"
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
        parts += [element("text", text, x=at, y=20), element("circle", cx=at - 12, cy=16, r=4.5, class_=kind)]
        at -= 36
    return joined(parts)
