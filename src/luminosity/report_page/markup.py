"""HTML and SVG elements, and numbers as text. Text is escaped, so that no table can inject markup into the report."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from html import escape

__all__ = ["MISSING", "Markup", "element", "joined", "plain", "power_of", "times_power"]

MISSING = "\N{EN DASH}"  # shown for values that do not exist

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")  # for powers of ten


class Markup(str):
    """Text that is HTML already, and is not escaped again."""


def element(tag: str, *children: str, **attributes: str | float | None) -> Markup:
    """Return an element. Attributes named like Python's keywords end in ``_``; other underscores become hyphens.

    >>> element("td", "a < b", class_="number")
    '<td class="number">a &lt; b</td>'
    >>> element("line", x1=1.0, x2=2.25, stroke_width=2)
    '<line x1="1" x2="2.2" stroke-width="2"></line>'
    """
    written = "".join(
        f' {name.removesuffix("_").replace("_", "-")}="{escape(_value(value))}"'
        for name, value in attributes.items()
        if value is not None
    )
    return Markup(f"<{tag}{written}>{joined(children)}</{tag}>")


def joined(parts: Iterable[str]) -> Markup:
    """Join markup and text; text is escaped."""
    return Markup("".join(part if isinstance(part, Markup) else escape(part) for part in parts))


def _value(value: str | float) -> str:
    """Round numbers to a tenth of a pixel."""
    return value if isinstance(value, str) else f"{value:.1f}".removesuffix(".0")


def plain(value: float, digits: int = 3) -> str:
    r"""Return a number as people write it: few digits, thousands separated, powers of ten if it is tiny or huge.

    >>> plain(0.0004995), plain(0.25), plain(12345.6), plain(-1) == "\N{MINUS SIGN}1", plain(float("nan")) == MISSING
    ('0.0005', '0.25', '12,346', True, True)
    """
    if not math.isfinite(value):
        return MISSING
    if value and (abs(value) < 1e-4 or abs(value) >= 1e7):
        power = math.floor(math.log10(abs(value)))
        return _minus(f"{float(f'{value / 10**power:.{digits}g}'):g}{times_power(power)}")
    if abs(value) >= 1000:
        return _minus(f"{value:,.0f}")
    return _minus(f"{float(f'{value:.{digits}g}'):.12g}")


def power_of(values: Sequence[float]) -> int:
    """Return the power of ten to move into an axis' title, so that its labels are short."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    power = math.floor(math.log10(largest)) if largest else 0
    return power if power < -2 or power > 4 else 0


def times_power(power: int) -> str:
    """Return a power of ten as a factor."""
    return f" \N{MULTIPLICATION SIGN} 10{str(power).translate(_RAISED)}"


def _minus(text: str) -> str:
    return text.replace("-", "\N{MINUS SIGN}", 1) if text.startswith("-") else text
