"""What is searched for in a store, and what is found."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any, cast

from luminosity.errors import InvalidArgument
from luminosity.io.stores.points import PointId

__all__ = ["Hit", "Query", "check_filter", "is_near"]

_BOUNDS = frozenset({"gt", "gte", "lt", "lte"})  # of a range in a filter


@dataclass(frozen=True)
class Query:
    """The settings that all vectors of a search share."""

    using: str | None
    limit: int
    payload: Sequence[str]
    score_threshold: float | None
    equal: Mapping[str, Any]
    """The value that each payload field must have, a list of values that it may have, or a range: ``{"gte": 4}``."""


@dataclass(frozen=True)
class Hit:
    """A point that a search found."""

    id: PointId
    score: float
    payload: Mapping[str, Any]


def check_filter(equal: Mapping[str, Any]) -> dict[str, Any]:
    """Return a filter as :class:`Query` takes it. Raises if a value is of a type that stores don't compare.

    >>> check_filter({"language": ["en", "de"], "rating": {"gte": 4}, "score": 0.5})["score"]
    {'gte': 0.5, 'lte': 0.5}
    """
    checked: dict[str, Any] = {}
    for name, value in equal.items():
        if isinstance(value, Mapping):
            bounds: dict[str, Any] = dict(cast("Mapping[str, Any]", value))
            numbers = all(isinstance(each, int | float) and not isinstance(each, bool) for each in bounds.values())
            if not bounds or not numbers or not bounds.keys() <= _BOUNDS:
                raise InvalidArgument(
                    f"found filter={{{name!r}: {bounds!r}}}, expected numbers for some of {', '.join(sorted(_BOUNDS))}"
                )
            checked[name] = bounds
            continue
        values = cast("list[Any]", value) if isinstance(value, list) else [value]
        if isinstance(value, float) and math.isfinite(value):
            checked[name] = {"gte": value, "lte": value}  # stores compare whole numbers only
            continue
        if not values or not all(isinstance(each, str | int | bool) for each in values):
            raise InvalidArgument(
                f"found filter={{{name!r}: {value!r}}}, expected a text, a number, a boolean, a list of texts or of "
                'integers, or bounds such as {"gte": 4}'
            )
        checked[name] = value
    return checked


def is_near(distance: str, score: float, threshold: float | None) -> bool:
    """Return whether a score is at least as good as a threshold; a distance is better if it is less."""
    if threshold is None:
        return True
    return score <= threshold if distance in ("euclid", "manhattan") else score >= threshold
