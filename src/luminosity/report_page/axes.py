"""Scales from values to positions in a chart, and axes."""

from __future__ import annotations

import math
from collections.abc import Sequence
from dataclasses import dataclass

from luminosity.report_page.markup import Markup, element, joined, plain, power_of, times_power

__all__ = ["Frame", "Scale", "drawing", "with_room"]

_APART = 1e-12  # of a value: smaller differences come from rounding
_NOTHING = 1e-300  # below it, floating-point numbers lose digits
_CHARACTER = 7.2  # pixels of a character in a legend, about


@dataclass(frozen=True)
class Scale:
    """Maps values from ``low`` to ``high`` to positions between ``start`` and ``end``, linearly or logarithmically."""

    low: float
    high: float
    start: float
    end: float
    logarithmic: bool = False

    def __call__(self, value: float) -> float:
        low, high, here = self.low, self.high, value
        if self.logarithmic:
            low, high, here = math.log10(low), math.log10(high), math.log10(value)
        return self.start + (here - low) / (high - low or 1.0) * (self.end - self.start)

    def ticks(self, about: int) -> list[float]:
        """Return about this many round values."""
        if not self.logarithmic:
            return _ticks(self.low, self.high, about)
        return [10.0**power for power in range(math.ceil(math.log10(self.low)), math.floor(math.log10(self.high)) + 1)]


def _ticks(low: float, high: float, about: int = 6) -> list[float]:
    """Return about this many round numbers between ``low`` and ``high``.

    >>> _ticks(0.3, 9.7)
    [2.0, 4.0, 6.0, 8.0]
    """
    step = 10.0 ** math.floor(math.log10((high - low) / about)) if high > low else 1.0
    factor = next(each for each in (1, 2, 5, 10) if each * step * (about + 0.5) >= high - low)
    step *= factor
    first = math.ceil(low / step - 1e-9)
    return [number * step for number in range(first, math.floor(high / step + 1e-9) + 1)]


def with_room(low: float, high: float) -> tuple[float, float]:
    """Return both ends of an axis, moved apart if all values are equal.

    >>> with_room(1.0, 3.0), with_room(5.0, 5.0), with_room(0.0, 1e-310)
    ((1.0, 3.0), (2.5, 7.5), (-0.5, 0.5))
    """
    largest = max(abs(low), abs(high))
    if high - low > max(_APART * largest, _NOTHING):
        return low, high
    half = largest / 2 if largest > _NOTHING else 0.5
    return low - half, high + half


def _labels(at: Sequence[float], title: str) -> tuple[list[str], str]:
    """Return the labels of ticks and the axis' title, which has what they share: a power of ten, or a large number."""
    power = power_of(at)
    labels = [plain(value / 10**power) for value in at]
    if len(set(labels)) == len(at) or at[0] == 0:
        return labels, _with_unit(title, power)
    return _labels([value - at[0] for value in at], f"{title}, minus {at[0]:,.15g}")


@dataclass(frozen=True)
class Frame:
    """The area between the axes of a chart, in pixels."""

    left: float
    top: float
    right: float
    bottom: float

    def x(self, low: float, high: float) -> Scale:
        """Return the horizontal scale for values from ``low`` to ``high``."""
        return Scale(low, high, self.left, self.right)

    def y(self, low: float, high: float, logarithmic: bool = False) -> Scale:
        """Return the vertical scale for values from ``low`` to ``high``."""
        return Scale(low, high, self.bottom, self.top, logarithmic)

    def x_axis(self, scale: Scale, title: str, about: int = 8) -> Markup:
        """Draw the horizontal axis with about this many ticks."""
        at = scale.ticks(about)
        texts, title = _labels(at, title)
        labels = [
            element("text", label, x=scale(value), y=self.bottom + 18, text_anchor="middle")
            for value, label in zip(at, texts, strict=True)
        ]
        marks = [
            element("line", x1=scale(value), x2=scale(value), y1=self.bottom, y2=self.bottom + 5, class_="axis")
            for value in at
        ]
        line = element("line", x1=self.left, x2=self.right, y1=self.bottom, y2=self.bottom, class_="axis")
        return joined([line, *marks, *labels, self.x_title(title)])

    def x_title(self, title: str) -> Markup:
        """Draw the title of the horizontal axis."""
        middle = (self.left + self.right) / 2
        return element("text", title, x=middle, y=self.bottom + 40, text_anchor="middle", class_="title")

    def y_axis(self, scale: Scale, title: str, about: int = 5) -> Markup:
        """Draw the vertical axis and its grid with about this many lines."""
        at = scale.ticks(about)
        texts, title = ([plain(value) for value in at], title) if scale.logarithmic else _labels(at, title)
        parts = [
            joined(
                [
                    element("line", x1=self.left, x2=self.right, y1=scale(value), y2=scale(value), class_="grid"),
                    element("text", label, x=self.left - 8, y=scale(value) + 4, text_anchor="end"),
                ]
            )
            for value, label in zip(at, texts, strict=True)
        ]
        label = element("text", title, x=8, y=self.top - 12, class_="title")
        return joined([*parts, label])

    def legend(self, *entries: tuple[str, str, float]) -> Markup:
        """Draw a legend above the frame, at its right: the class of each mark, its meaning and its radius."""
        parts: list[Markup] = []
        at = self.right
        for kind, text, radius in reversed(entries):
            at -= _CHARACTER * len(text)
            parts += [element("text", text, x=at, y=20), element("circle", cx=at - 12, cy=16, r=radius, class_=kind)]
            at -= 36
        return joined(parts)


def drawing(width: float, height: float, label: str, *parts: Markup) -> Markup:
    """Return a chart of these parts. ``label`` describes it to screen readers."""
    box = f"0 0 {width:g} {height:g}"
    return element("svg", *parts, viewBox=box, role="img", aria_label=label, xmlns="http://www.w3.org/2000/svg")


def _with_unit(title: str, power: int) -> str:
    return f"{title} ({times_power(power).strip()})" if power else title
