"""Numbers as people read them."""

from __future__ import annotations

import math
from collections.abc import Sequence

__all__ = ["MISSING", "plain", "power_of", "times_power"]

MISSING = "\N{EN DASH}"

_RAISED = str.maketrans("-0123456789", "⁻⁰¹²³⁴⁵⁶⁷⁸⁹")  # of powers of ten


def plain(value: float, digits: int = 3) -> str:
    r"""
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
    """The power of ten to take out of an axis, so that its ticks are short."""
    largest = max((abs(value) for value in values if math.isfinite(value)), default=0.0)
    power = math.floor(math.log10(largest)) if largest else 0
    return power if power < -2 or power > 4 else 0


def times_power(power: int) -> str:
    return f" \N{MULTIPLICATION SIGN} 10{str(power).translate(_RAISED)}"


def _minus(text: str) -> str:
    return text.replace("-", "\N{MINUS SIGN}", 1) if text.startswith("-") else text
