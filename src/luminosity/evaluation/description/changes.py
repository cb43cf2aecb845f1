"""How a table differs from a reference: tests on the summaries of both, without another pass over the rows."""

from __future__ import annotations

import math
from statistics import NormalDist
from typing import Any

import numpy as np

from luminosity._shared.text import shorten_repr
from luminosity.evaluation.description.column_summary import ColumnSummary
from luminosity.evaluation.description.result import ColumnChange
from luminosity.evaluation.description.sketches import NumberSummary

__all__ = ["column_change", "ks_p_value", "ks_statistic"]

_SHOWN_CHARACTERS = 40  # of the text whose share changed most
_TERMS = 100  # of the series of Kolmogorov's distribution, which converges fast


def column_change(
    name: str, reference: ColumnSummary | None, current: ColumnSummary | None, rows: tuple[int, int]
) -> ColumnChange:
    """Return how a column differs. ``rows`` are those of the reference and of the current table."""
    if reference is None or current is None:
        return ColumnChange(name, 1.0, None, "new column" if reference is None else "the column is gone")
    if reference.kind != current.kind and reference.kind is not None and current.kind is not None:
        return ColumnChange(name, 1.0, None, f"held {reference.kind}, now {current.kind}")
    if not all(rows):
        return ColumnChange(name, 0.0, None, "no rows to compare")
    missing = [1 - side.count / in_all for side, in_all in zip((reference, current), rows, strict=True)]
    found = _of_values(name, reference, current)
    infinite = [side.infinite / in_all for side, in_all in zip((reference, current), rows, strict=True)]
    by_infinite = abs(infinite[1] - infinite[0])
    by_missing = abs(missing[1] - missing[0])
    if by_infinite > max(found.distance, by_missing):
        said = f"infinite values: {infinite[0]:.3g} of the rows, now {infinite[1]:.3g}"
        return ColumnChange(name, by_infinite, _share_p_value(infinite, rows), said)
    if by_missing > found.distance:
        said = f"missing values: {missing[0]:.3g} of the rows, now {missing[1]:.3g}"
        return ColumnChange(name, by_missing, _share_p_value(missing, rows), said)
    return found


def _of_values(name: str, reference: ColumnSummary, current: ColumnSummary) -> ColumnChange:
    if not reference.count or not current.count:
        return ColumnChange(name, 0.0, None, "no values to compare")
    is_counted = reference.kind in ("texts", "booleans")
    if is_counted and not reference.top.error and not current.top.error:
        counts = [side.top.counts for side in (reference, current)]
        if all(counts) and max(map(len, counts)) <= min(sum(each.values()) for each in counts) / 5:
            return _of_counts(name, *counts)
    if not reference.numbers.count or not current.numbers.count:
        has_numbers = reference.kind == "numbers" and (reference.infinite or current.infinite)
        what = "no finite values to compare" if has_numbers else "values of this kind are not compared"
        return ColumnChange(name, 0.0, None, what)
    distance = ks_statistic(reference.numbers, current.numbers)
    middle = [side.numbers.quantile(0.5) for side in (reference, current)]
    what = {"numbers": "median", "times": "median", "vectors": "median norm"}.get(reference.kind or "", "median length")
    p_value = ks_p_value(distance, reference.numbers.count, current.numbers.count)
    shown = ["", ""] if reference.kind == "times" else [f" {middle[0]:.4g}", f" {middle[1]:.4g}"]
    said = f"{what}{shown[0]}, now{shown[1]}" if reference.kind != "times" else "other times"
    return ColumnChange(name, distance, p_value, said)


def _of_counts(name: str, reference: dict[Any, int], current: dict[Any, int]) -> ColumnChange:
    keys = sorted({*reference, *current}, key=str)
    counts = np.array([[side.get(key, 0) for key in keys] for side in (reference, current)], dtype=np.float64)
    rows = counts.sum(axis=1, keepdims=True)
    shares = counts / rows
    apart = shares[1] - shares[0]
    at = int(np.abs(apart).argmax())
    expected = rows * counts.sum(axis=0) / counts.sum()
    statistic = float(((counts - expected) ** 2 / expected).sum())
    p_value = _chi_squared_p_value(statistic, len(keys) - 1)
    said = f"{shorten_repr(keys[at], _SHOWN_CHARACTERS)}: {shares[0, at]:.3g} of the rows, now {shares[1, at]:.3g}"
    return ColumnChange(name, float(np.abs(apart).sum() / 2), p_value, said)


def ks_statistic(reference: NumberSummary, current: NumberSummary) -> float:
    """Return the largest distance of both distribution functions."""
    sides: list[tuple[Any, Any]] = []
    bits = max(reference.values.dropped_bits, current.values.dropped_bits)
    for side in (reference, current):
        values = np.ascontiguousarray(side.values.values[:, 0])
        cut = (values.view(np.int64) & (np.int64(-1) << np.int64(bits))).view(np.float64) + 0.0
        sides.append((cut, np.cumsum(side.values.counts) / side.count))
    every = np.unique(np.concatenate([values for values, _ in sides]))
    functions = [np.r_[0.0, below][np.searchsorted(values, every, side="right")] for values, below in sides]
    return float(np.abs(functions[0] - functions[1]).max())


def ks_p_value(distance: float, first: int, second: int) -> float:
    """Return the chance of a distance at least this large between two samples of one distribution (asymptotic)."""
    root = math.sqrt(first * second / (first + second))
    x = (root + 0.12 + 0.11 / root) * distance
    if x < 0.2:  # the series converges slowly, and the result is 1 to many digits
        return 1.0
    series = sum((-1) ** (k - 1) * math.exp(-2 * k * k * x * x) for k in range(1, _TERMS + 1))
    return min(1.0, max(0.0, 2 * series))


def _chi_squared_p_value(statistic: float, freedom: int) -> float | None:
    """Return the chance of a larger statistic, by the approximation of Wilson and Hilferty (1931)."""
    if freedom < 1:
        return None
    spread = 2 / (9 * freedom)
    return 1 - NormalDist().cdf(((statistic / freedom) ** (1 / 3) - (1 - spread)) / math.sqrt(spread))


def _share_p_value(shares: list[float], rows: tuple[int, int]) -> float | None:
    """Return the p-value of the two-proportion z-test."""
    pooled = (shares[0] * rows[0] + shares[1] * rows[1]) / sum(rows)
    variance = pooled * (1 - pooled) * (1 / rows[0] + 1 / rows[1])
    return 2 * (1 - NormalDist().cdf(abs(shares[1] - shares[0]) / math.sqrt(variance))) if variance > 0 else None
