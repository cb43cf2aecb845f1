"""Describes the numbers of views next to their fields: the page's columns and Prometheus' metrics come from it."""

from __future__ import annotations

from dataclasses import dataclass, field, fields
from functools import cache
from typing import Any, Literal

__all__ = ["Number", "counter", "gauge", "number", "numbers_of"]


@dataclass(frozen=True)
class Number:
    """What a number of a view means, and how it is shown."""

    field: str
    meaning: str  # one sentence without a final period
    unit: Literal["count", "bytes", "seconds", "milliseconds", "share"] = "count"
    title: str = ""  # of its column in the page's table of stages or models; empty: it has no column
    dash: str = ""  # why the page shows a dash instead of 0; empty: it shows 0
    metric: str = ""  # the name of its Prometheus metric, without "luminosity_"; empty: it is not exported
    kind: Literal["counter", "gauge"] = "counter"  # of the metric
    exports_zero: bool = True  # False: 0 means that the value is not known


def number(default: Any, meaning: str, **more: Any) -> Any:
    """Return the field of a view that holds a number. ``more`` are fields of :class:`Number`."""
    return field(default=default, metadata={"meaning": meaning, **more})


def counter(default: Any, meaning: str, metric: str, unit: str = "count", **more: Any) -> Any:
    """Return the field of a number that only grows during a run, and is exported as ``metric``."""
    return number(default, meaning, metric=metric, unit=unit, **more)


def gauge(default: Any, meaning: str, metric: str, unit: str = "count", **more: Any) -> Any:
    """Return the field of a number that grows and shrinks, and is exported as ``metric``."""
    return number(default, meaning, metric=metric, unit=unit, kind="gauge", **more)


@cache
def numbers_of(view: type[Any]) -> tuple[Number, ...]:
    """Return the numbers of a view that are described, in the order of its fields.

    >>> from luminosity.events import PoolView
    >>> numbers_of(PoolView)[0].metric
    'pool_workers'
    """
    return tuple(Number(each.name, **each.metadata) for each in fields(view) if each.metadata)
