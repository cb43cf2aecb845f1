"""Numbers, labels and states as text."""

from __future__ import annotations

from collections.abc import Sequence

from luminosity.events import StageView

__all__ = ["duration", "milliseconds", "number", "percent", "rate", "shortened", "status"]


_SEPARATOR = " + "


def duration(seconds: float) -> str:
    """Return a duration in its two largest units.

    >>> duration(0.84), duration(42.3), duration(605), duration(7500)
    ('0.8 s', '42 s', '10 min 5 s', '2 h 5 min')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    return f"{whole // 3600} h {whole % 3600 // 60} min"


def milliseconds(seconds: float) -> str:
    """Return a duration in milliseconds, without the unit.

    >>> milliseconds(1.234), milliseconds(0.0123), milliseconds(0.0034), milliseconds(0.000042)
    ('1,234', '12', '3.4', '0.042')
    """
    count = 1000 * seconds
    return f"{count:,.0f}" if count >= 9.95 else f"{count:.2g}"


def number(count: int) -> str:
    """Return a count with separators, shortened from ten million.

    >>> number(12_345), number(123_456_789)
    ('12,345', '123.5M')
    """
    if count < 10_000_000:
        return f"{count:,}"
    return f"{count / 1e6:,.1f}M" if count < 10**9 else f"{count / 1e9:,.2f}G"


def rate(per_second: float) -> str:
    """Return a rate, or an empty string for 0.

    >>> rate(0), rate(0.04), rate(6120.4)
    ('', '0.04/s', '6,120/s')
    """
    if per_second <= 0:
        return ""
    return f"{number(round(per_second))}/s" if per_second >= 10 else f"{per_second:.2g}/s"


def percent(fraction: float) -> str:
    """Return a fraction as whole percent, rounded down.

    >>> percent(0.996), percent(0.87), percent(1.0)
    ('99%', '87%', '100%')
    """
    return f"{int(100 * fraction + 1e-9)}%"  # only 1.0 is 100%; but 100 * 0.87 is slightly less than 87


def shortened(label: str, width: int) -> str:
    """Return a label in at most ``width`` characters, cut in the middle.

    >>> shortened("Read + Parse + Copy", 15), shortened("CombineGlobally (UnKey)", 16), shortened("Embed long texts", 9)
    ('Read + … + Copy', 'Combine… (UnKey)', 'Embed …ts')
    """
    if len(label) <= width:
        return label
    whole, mark, inner = label.partition(" (")
    if mark and len(inner) + 5 <= width:  # the brackets tell stages with the same name apart
        return f"{whole[: width - len(inner) - 3]}… ({inner}"
    steps = label.split(_SEPARATOR)
    around = f"{steps[0]} + … + {steps[-1]}"
    if len(steps) > 2 and len(around) <= width:
        return around
    tail = (width - 1) // 3
    return f"{label[: max(0, width - tail - 1)]}…{label[len(label) - tail :]}"


def status(stage: StageView, width: int = 80) -> str:
    """Return what a stage does or waits for.

    >>> status(StageView("s1", "held back", ("Embed",)))
    'held back by Embed'
    """
    if stage.status == "busy":
        return "busy"
    if stage.status == "needs worker":
        return _with("needs worker:", stage.by, width)
    if stage.status == "waiting":
        return _with("waits for", stage.by, width) if stage.by else "waits for its time"
    return _with(f"{stage.status} by", stage.by, width) if stage.by else stage.status


def _with(beginning: str, names: Sequence[str], width: int) -> str:
    ending = f" +{len(names) - 1}" if len(names) > 1 else ""
    return f"{beginning} {shortened(names[0], max(1, width - len(beginning) - len(ending) - 1))}{ending}"
