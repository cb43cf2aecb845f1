"""Short texts for people: shortened values, suggestions, sizes, durations, exit codes."""

from __future__ import annotations

import difflib
import os
import re
import signal
from collections.abc import Iterable
from datetime import timedelta
from typing import Any

__all__ = [
    "ENDED_WHILE_STOPPED",
    "LOST_WITH_FORK_SERVER",
    "LOST_WITH_NODE",
    "Private",
    "describe_exit",
    "did_you_mean",
    "duration",
    "first_line",
    "format_bytes",
    "format_size",
    "list_some",
    "parse_duration",
    "parse_size",
    "shorten",
    "shorten_middle",
    "shorten_repr",
]

ENDED_WHILE_STOPPED = -1001  # the exit code of a stopped worker that the run has ended; no signal has this number
LOST_WITH_NODE = -1000  # the exit code of a worker whose machine is gone: no signal has this number
LOST_WITH_FORK_SERVER = -1002  # the exit code of a worker that ended because the process that forked it has died
_NEAR = 0.6  # the least similarity of a suggestion: about one letter of three differs
_SIZE = re.compile(r"(\d+(?:\.\d+)?)\s*(?:([kmgt])(i?))?b?", re.IGNORECASE)
_POWERS = {letter: power for power, letter in enumerate("KMGT", start=1)}
_DURATION = re.compile(r"(\d+(?:\.\d+)?)\s*(s|m|min|h|d|w|seconds?|minutes?|hours?|days?|weeks?)")
_DAY_S = 86_400
_UNITS_S = {"s": 1, "m": 60, "h": 3600, "d": 86_400, "w": 7 * 86_400}  # by the first letter


class Private(str):
    """A text with data of the user, as an argument of a log message: handlers print it, records leave it out."""

    __slots__ = ()


def shorten(text: str, limit: int) -> str:
    """Return ``text`` cut to at most ``limit`` characters; a cut ends with an ellipsis.

    >>> shorten("abcdef", 6), shorten("abcdefg", 6)
    ('abcdef', 'abcde…')
    """
    return text if len(text) <= limit else text[: limit - 1] + "…"


def shorten_middle(text: str, limit: int) -> str:
    """Return ``text`` without its middle if it has more than ``limit`` characters.

    >>> shorten_middle("abcdefghij", 10), shorten_middle("abcdefghijk", 5)
    ('abcdefghij', 'a\\n…\\nk')
    """
    if len(text) <= limit:
        return text
    mark = "\n…\n"
    kept = max(0, limit - len(mark))
    return text[: kept // 2] + mark + text[len(text) - (kept - kept // 2) :]


def printable(text: str) -> str:
    """Return ``text`` on one line, without characters that a terminal would obey.

    >>> printable("two\\nlines, \\x1b[31mred")
    'two lines,  [31mred'
    """
    return "".join(each if each.isprintable() else " " for each in text)


def shorten_repr(value: Any, limit: int) -> str:
    """Return the beginning of ``repr(value)``, also where that ``repr`` raises.

    >>> shorten_repr("a long example", 10)
    "'a long e…"
    """
    try:
        text = repr(value)
    except Exception as error:
        text = f"<{type(value).__name__} whose repr raises {type(error).__name__}>"
    return shorten(text, limit)


def first_line(text: str, limit: int) -> str:
    """Return the first line of ``text``, shortened.

    >>> first_line("ValueError: no\\n  more of it", 80)
    'ValueError: no'
    """
    return shorten(text.strip().partition("\n")[0], limit)


def list_some(names: Iterable[Any], limit: int) -> str:
    """Join the first ``limit`` names with commas and count the rest.

    >>> list_some(["a", "b", "c"], 3), list_some("abcdef", 2), list_some([], 2)
    ('a, b, c', 'a, b and 4 more', '')
    """
    every = [str(name) for name in names]
    hidden = len(every) - limit
    return ", ".join(every[:limit]) + (f" and {hidden} more" if hidden > 0 else "")


def did_you_mean(name: str, choices: Iterable[str], most: int = 1) -> str:
    """Return a question that suggests the nearest choices, or an empty string where none is near.

    What all names of a kind have in common, dashes in front and suffixes of files, makes no name near to another.

    >>> did_you_mean("texts", ["id", "text"]), did_you_mean("speed", ["id", "text"])
    ("did you mean 'text'?", '')
    >>> did_you_mean("nosuch.parquet", ["jan.parquet"]), did_you_mean("jan.csv", ["jan.parquet"])
    ('', "did you mean 'jan.parquet'?")
    """
    nearness = {choice: _nearness(name, choice) for choice in choices}
    near = sorted((choice for choice in nearness if nearness[choice] >= _NEAR), key=lambda each: -nearness[each])[:most]
    return f"did you mean {' or '.join(map(repr, near))}?" if near else ""


def _nearness(name: str, choice: str) -> float:
    """Return how similar two names are, from 0 to 1."""
    stem, suffix = os.path.splitext(name.lstrip("-"))
    other_stem, other_suffix = os.path.splitext(choice.lstrip("-"))
    if suffix != other_suffix and stem != other_stem:
        stem, other_stem = stem + suffix, other_stem + other_suffix
    return difflib.SequenceMatcher(None, other_stem, stem).ratio()


def describe_exit(code: int) -> str:
    """Say how a process ended, from the return code that :mod:`subprocess` reports, or one of the codes above.

    >>> describe_exit(-9), describe_exit(3)
    ('was killed by SIGKILL', 'exited with code 3')
    """
    if code == ENDED_WHILE_STOPPED:
        return "was stopped, as SIGSTOP or a debugger does, gave no sign of life and was ended"
    if code == LOST_WITH_NODE:
        return "was lost with its node or the run's agent there"
    if code == LOST_WITH_FORK_SERVER:
        return "was lost with the fork server, the process that starts workers"
    if code >= 0:
        return f"exited with code {code}"
    try:
        return f"was killed by {signal.Signals(-code).name}"
    except ValueError:
        return f"was killed by signal {-code}"


def parse_size(text: str) -> int | None:
    """Return the bytes that a size such as 512MB, 4GB or 2GiB means, or None if ``text`` is not a size.

    >>> parse_size("1.5 kB"), parse_size("2GiB"), parse_size("plenty")
    (1500, 2147483648, None)
    """
    match = _SIZE.fullmatch(text.strip())
    if match is None:
        return None
    base = 1024 if match[3] else 1000
    return int(float(match[1]) * base ** _POWERS.get((match[2] or "").upper(), 0))


def duration(seconds: float) -> str:
    """Return a duration in its two largest units.

    >>> duration(0.84), duration(42.3), duration(605), duration(7500), duration(200_000)
    ('0.8 s', '42 s', '10 min 5 s', '2 h 5 min', '2 d 7 h')
    """
    if seconds < 10:
        return f"{seconds:.1f} s"
    whole = round(seconds)
    if whole < 60:
        return f"{whole} s"
    if whole < 3600:
        return f"{whole // 60} min {whole % 60} s"
    if whole < 2 * _DAY_S:
        return f"{whole // 3600} h {whole % 3600 // 60} min"
    return f"{whole // _DAY_S} d {whole % _DAY_S // 3600} h"


def parse_duration(text: str) -> timedelta | None:
    """Return the time that a text such as ``90s``, ``15m``, ``1h`` or ``2 days`` means, or None.

    >>> parse_duration("1.5h"), parse_duration("2 days"), parse_duration("soon")
    (datetime.timedelta(seconds=5400), datetime.timedelta(days=2), None)
    """
    match = _DURATION.fullmatch(text.strip())
    if match is None or float(match[1]) * _UNITS_S[match[2][0]] > timedelta.max.total_seconds():
        return None
    return timedelta(seconds=float(match[1]) * _UNITS_S[match[2][0]])


def format_bytes(size: float) -> str:
    """Return a size in decimal units, for progress and messages.

    >>> format_bytes(999), format_bytes(512_000_000), format_bytes(1_500_000_000)
    ('999 B', '512 MB', '1.5 GB')
    """
    for unit in ("B", "kB", "MB", "GB"):
        if size < 999.5:
            return f"{size:.3g} {unit}" if unit != "B" else f"{size:.0f} B"
        size /= 1000
    return f"{size:.3g} TB"


def format_size(size: int) -> str:
    """Return a size in binary units, as resource hints spell it.

    >>> format_size(3 * 2**30)
    '3GiB'
    """
    for unit, name in ((1 << 30, "GiB"), (1 << 20, "MiB"), (1 << 10, "KiB")):
        if size >= unit:
            return f"{size / unit:.4g}{name}"
    return f"{size}B"
