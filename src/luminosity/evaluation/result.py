"""What an evaluation returns: metrics with intervals, or the reason why a metric is not defined."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, Literal

__all__ = ["CalibrationBin", "ClassMetrics", "Confusion", "Curve", "Metric", "Outcomes", "Task"]

Task = Literal["classes", "numbers", "ranking", "texts"]


@dataclass(frozen=True)
class Metric:
    """A metric and its confidence interval.

    ``value`` is None if the metric is not defined; ``reason`` says why. ``low`` and ``high`` are None without an
    interval.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.value is None:
            return f"not defined ({self.reason})"
        interval = f" ({self.low:.4g} to {self.high:.4g})" if self.low is not None else ""
        return f"{self.value:.4g}{interval}"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that are there."""
        found = {"value": self.value, "low": self.low, "high": self.high, "reason": self.reason}
        return {name: value for name, value in found.items() if name == "value" or value not in (None, "")}


@dataclass(frozen=True)
class Outcomes:
    """In how many rows the second of two models has a higher value than the first, the same, or a lower one.

    ``win_rate`` is the share of rows in which the second is better; a tie counts as a half.
    """

    wins: int
    ties: int
    losses: int
    win_rate: Metric

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as plain values."""
        return {**vars(self), "win_rate": self.win_rate.as_dict()}


@dataclass(frozen=True)
class ClassMetrics:
    """The metrics of one class. ``rows`` have it as their label, ``predicted`` as their prediction."""

    label: Any
    precision: Metric
    recall: Metric
    f1: Metric
    rows: int
    predicted: int


@dataclass(frozen=True)
class Confusion:
    """The confusion matrix: ``counts[i][j]`` rows have the label ``labels[i]`` and the prediction ``labels[j]``."""

    labels: Sequence[Any]
    counts: Sequence[Sequence[int]]


@dataclass(frozen=True)
class CalibrationBin:
    """The rows whose score lies between ``low`` and ``high``: their mean score, and the share of events."""

    low: float
    high: float
    rows: int
    mean_score: float | None
    share: float | None


@dataclass(frozen=True)
class Curve:
    """Points of a curve for the report, at most some hundreds."""

    x: Sequence[float]
    y: Sequence[float]
