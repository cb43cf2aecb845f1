"""How far predictions are apart."""

from __future__ import annotations

import math
from collections.abc import Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

import numpy as np

__all__ = ["Difference", "difference"]


@dataclass(frozen=True)
class Difference:
    """Between the predictions of two models for the same rows."""

    largest: float
    """Of two numbers at the same place."""
    changed: int
    """Rows where something that is no number differs: a label, a text, the form."""
    rows: int


def difference(first: Mapping[int, Any], second: Mapping[int, Any]) -> Difference:
    """Predictions by row; what only one side has does not count.

    >>> difference({0: {"label": "A", "score": 0.5}, 1: 1}, {0: {"label": "B", "score": 0.75}})
    Difference(largest=0.25, changed=1, rows=1)
    """
    largest, changed = 0.0, 0
    common = first.keys() & second.keys()
    for row in common:
        is_same = True
        for one, other in _pairs(first[row], second[row]):
            apart = _apart(one, other)
            is_same = is_same and apart is not None
            largest = max(largest, apart or 0.0)
        changed += not is_same
    return Difference(largest, changed, len(common))


def _pairs(first: Any, second: Any) -> Iterator[tuple[Any, Any]]:
    """The innermost values, place by place."""
    first, second = getattr(first, "inference", first), getattr(second, "inference", second)
    if isinstance(first, dict) and isinstance(second, dict) and first.keys() == second.keys():
        named = cast("dict[Any, Any]", first)
        for name in named:
            yield from _pairs(named[name], second[name])
    elif isinstance(first, list | tuple) and isinstance(second, list | tuple):
        ours, theirs = cast("list[Any]", first), cast("list[Any]", second)
        if len(ours) != len(theirs):
            yield None, theirs
        else:
            for one, other in zip(ours, theirs, strict=True):
                yield from _pairs(one, other)
    else:
        yield first, second


def _apart(first: Any, second: Any) -> float | None:
    """None where they differ and can't be subtracted."""
    try:
        one, other = np.asarray(first, np.float64), np.asarray(second, np.float64)
    except (TypeError, ValueError):
        return 0.0 if _is_equal(first, second) else None
    if one.shape != other.shape:
        return None
    apart = np.abs(one - other)
    # What is no number, on one side alone, is as far away as can be.
    return float(np.where(np.isnan(one) & np.isnan(other), 0.0, np.nan_to_num(apart, nan=math.inf)).max(initial=0.0))


def _is_equal(first: Any, second: Any) -> bool:
    return bool(np.all(first == second))
