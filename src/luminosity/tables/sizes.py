"""How large rows are, roughly, before they are anywhere that could tell."""

from __future__ import annotations

import dataclasses
from collections.abc import Iterator
from typing import Any

__all__ = ["bytes_of_rows", "pieces"]

_SAMPLE = 64


def bytes_of_rows(rows: list[Any]) -> int:
    """As far as they tell: of many, some of them.

    >>> bytes_of_rows([{"text": "four", "stars": 5}] * 1000)
    12000
    """
    some = rows[:: -(-len(rows) // _SAMPLE)] if len(rows) > _SAMPLE else rows
    return sum(map(_size, some)) * len(rows) // max(len(some), 1)


def pieces(rows: list[Any], size: int, most_rows: int, most_bytes: int) -> Iterator[tuple[list[Any], int]]:
    """Rows in pieces that are within both limits, given their size together; and the size of each.

    >>> [(len(piece), size) for piece, size in pieces([{}] * 10, 1000, most_rows=4, most_bytes=10_000)]
    [(4, 400), (4, 400), (2, 200)]
    """
    count = max(1, min(most_rows, len(rows) * most_bytes // max(size, 1)))
    for start in range(0, len(rows), count):
        piece = rows[start : start + count]
        yield piece, size * len(piece) // len(rows)


def _size(value: Any) -> int:
    if isinstance(value, str | bytes):
        return len(value)
    if isinstance(value, dict):
        return sum(map(_size, value.values()))
    if isinstance(value, list | tuple | set | frozenset):
        # The items of one list are alike.
        first = next(iter(value), None)
        return len(value) * _size(first) if isinstance(first, int | float) else sum(map(_size, value))
    if dataclasses.is_dataclass(value) or hasattr(value, "as_dict"):
        return sum(map(_size, getattr(value, "__dict__", {}).values()))
    return int(getattr(value, "nbytes", 8))
