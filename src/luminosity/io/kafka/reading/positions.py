"""Where a read begins and where it stops, as users say it."""

from __future__ import annotations

import time
from collections.abc import Mapping, Sequence
from datetime import datetime
from typing import Any, NamedTuple

from apache_beam.utils.timestamp import Timestamp

from luminosity._shared.text import shorten_repr
from luminosity.errors import InvalidArgument

__all__ = ["Partition", "Position", "check_order", "parse_start", "parse_stop"]

Partition = tuple[str, int]
"""A topic and the number of one of its partitions."""

_STARTS = ("earliest", "latest", "committed")
_STOPS = ("now",)
_CLOCK_MS = 1_000  # "now" of another clock is not the future


class Position(NamedTuple):
    """A position in every partition.

    ``kind`` is ``"earliest"``, ``"latest"``, ``"committed"``, ``"now"``, ``"time"`` (then ``time_ms`` says when) or
    ``"offsets"`` (then ``offsets`` has one for each partition).
    """

    kind: str
    time_ms: int = 0
    offsets: Mapping[Partition, int] = {}


def parse_start(value: Any, topics: Sequence[str]) -> Position:
    """Return where to begin. Raises ``InvalidArgument`` for anything that is no position.

    >>> parse_start("latest", ["reviews"]).kind
    'latest'
    >>> parse_start({0: 100, 1: 0}, ["reviews"]).offsets
    {('reviews', 0): 100, ('reviews', 1): 0}
    >>> parse_start("erliest", ["reviews"])
    Traceback (most recent call last):
    luminosity.errors.InvalidArgument: found start='erliest', expected 'earliest', 'latest', 'committed', a datetime ...
    """
    return _parse("start", value, _STARTS, topics)


def parse_stop(value: Any, topics: Sequence[str]) -> Position | None:
    """Return where to stop, or None if the read has no end.

    >>> parse_stop("now", ["reviews"]).kind
    'now'
    """
    return None if value is None else _parse("stop", value, _STOPS, topics)


def check_order(start: Position, stop: Position | None) -> None:
    """Raise ``InvalidArgument`` if a read would begin in the future, or behind its own stop.

    Positions of different kinds are compared when the brokers have said which offsets they are.

    >>> check_order(Position("time", time_ms=2_000), Position("time", time_ms=1_000))
    Traceback (most recent call last):
    luminosity.errors.InvalidArgument: found stop= before start=: 1000 and 2000 ms since 1970, expected it after start=
    """
    if start.kind == "time" and start.time_ms > time.time() * 1000 + _CLOCK_MS:
        raise InvalidArgument(
            "found start= in the future, expected a time that has come",
            fix="pass start='latest' to read what comes from now on",
        )
    if stop is None or stop.kind != start.kind:
        return
    if stop.time_ms < start.time_ms:
        raise InvalidArgument(
            f"found stop= before start=: {stop.time_ms} and {start.time_ms} ms since 1970, expected it after start="
        )
    for (topic, number), at in start.offsets.items():
        if stop.offsets.get((topic, number), at) < at:
            raise InvalidArgument(
                f"found stop= before start= in {topic}[{number}]: {stop.offsets[topic, number]} and {at}, expected it "
                "after start="
            )


def _parse(name: str, value: Any, words: Sequence[str], topics: Sequence[str]) -> Position:
    if isinstance(value, str) and value in words:
        return Position(value)
    if isinstance(value, datetime):
        if value.tzinfo is None:
            raise InvalidArgument(
                f"found {name}={value!r} without a time zone, expected one with it",
                fix="pass a datetime such as datetime(2026, 1, 31, tzinfo=timezone.utc)",
            )
        return Position("time", time_ms=round(value.timestamp() * 1000))
    if isinstance(value, Timestamp):
        return Position("time", time_ms=value.micros // 1000)
    if isinstance(value, Mapping):
        return Position("offsets", offsets=_parse_offsets(name, value, topics))
    expected = ", ".join(map(repr, words))
    raise InvalidArgument(
        f"found {name}={shorten_repr(value, 80)}, expected {expected}, a datetime with a time zone, or offsets such as "
        "{('topic', 0): 100}"
    )


def _parse_offsets(name: str, given: Mapping[Any, Any], topics: Sequence[str]) -> dict[Partition, int]:
    offsets: dict[Partition, int] = {}
    for key, offset in given.items():
        if type(key) is int and len(topics) == 1:
            partition = topics[0], key
        elif isinstance(key, tuple) and len(key) == 2 and type(key[0]) is str and type(key[1]) is int:
            partition = key[0], key[1]
        else:
            raise InvalidArgument(
                f"found {shorten_repr(key, 80)} among the partitions of {name}=, expected pairs such as ('topic', 0)",
                fix="name the topic with the partition",
            )
        if type(offset) is not int or offset < 0:
            raise InvalidArgument(
                f"found the offset {shorten_repr(offset, 80)} of {partition[0]}[{partition[1]}] in {name}=, expected 0 "
                "or more"
            )
        offsets[partition] = offset
    if not offsets:
        raise InvalidArgument(f"found {name}={{}}, expected the offset of each partition")
    return offsets
