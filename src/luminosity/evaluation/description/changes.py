"""How a table differs from a reference: tests on the summaries of both, without another pass over the rows."""

from __future__ import annotations

import math
from dataclasses import dataclass
from typing import Any

import numpy as np

from luminosity._shared.text import shorten_repr
from luminosity.evaluation.description.column_summary import ColumnSummary
from luminosity.evaluation.description.result import ColumnChange
from luminosity.evaluation.description.sketches import NumberSummary

__all__ = [
    "ColumnPart",
    "chi_squared_p_value",
    "column_change",
    "column_parts",
    "fisher_p_value",
    "ks_p_value",
    "ks_statistic",
]

_SHOWN_CHARACTERS = 40  # of the text whose share changed most
_TERMS = 100  # of the series of Kolmogorov's distribution, which converges fast
_EXACT_PAIRS = 100_000  # rows of one sample times rows of the other: up to here, KS is exact, in some milliseconds
_LEAST_EXPECTED = 5.0  # rows of a category in each sample, for the chi-squared distribution to hold (Cochran 1954)
_PRECISION = 1e-15  # relative, of the series and the continued fraction of the gamma function
_OTHERS = "all other values"


@dataclass(frozen=True)
class ColumnPart:
    """The comparison of one aspect of a column: its values, its missing values or its infinite ones.

    ``p_value`` is None if nothing was tested: then ``distance`` is 1 if the column itself is another one, otherwise 0.
    """

    method: str
    distance: float
    statistic: float
    p_value: float | None
    said: str


def column_change(
    name: str, reference: ColumnSummary | None, current: ColumnSummary | None, rows: tuple[int, int]
) -> ColumnChange:
    """Return how a column differs most. ``rows`` are those of the reference and of the current table."""
    part = max(column_parts(reference, current, rows), key=lambda each: each.distance)
    return ColumnChange(name, part.distance, part.p_value, part.said)


def column_parts(
    reference: ColumnSummary | None, current: ColumnSummary | None, rows: tuple[int, int]
) -> list[ColumnPart]:
    """Compare all aspects of a column, its values first. The arguments are those of ``column_change``."""
    if reference is None or current is None:
        return [_untested(1.0, "new column" if reference is None else "the column is gone")]
    if reference.kind != current.kind and reference.kind is not None and current.kind is not None:
        return [_untested(1.0, f"held {reference.kind}, now {current.kind}")]
    if not all(rows):
        return [_untested(0.0, "no rows to compare")]
    found = [_of_values(reference, current)]
    missing = [in_all - side.count for side, in_all in zip((reference, current), rows, strict=True)]
    for counts, what in ((missing, "missing values"), ([reference.infinite, current.infinite], "infinite values")):
        if any(counts):
            table = np.array([counts, np.subtract(rows, counts)], dtype=np.float64).T
            shares = [count / in_all for count, in_all in zip(counts, rows, strict=True)]
            found.append(_of_table(table, f"{what}: {shares[0]:.3g} of the rows, now {shares[1]:.3g}"))
    return found


def _untested(distance: float, said: str) -> ColumnPart:
    return ColumnPart("", distance, math.nan, None, said)


def _of_values(reference: ColumnSummary, current: ColumnSummary) -> ColumnPart:
    if not reference.count or not current.count:
        return _untested(0.0, "no values to compare")
    found = _of_counts(reference, current) if reference.kind in ("texts", "booleans") else None
    if found is not None:
        return found
    if not reference.numbers.count or not current.numbers.count:
        has_numbers = reference.kind == "numbers" and (reference.infinite or current.infinite)
        return _untested(0.0, "no finite values to compare" if has_numbers else "values of this kind are not compared")
    distance = ks_statistic(reference.numbers, current.numbers)
    middle = [side.numbers.quantile(0.5) for side in (reference, current)]
    what = {"numbers": "median", "times": "median", "vectors": "median norm"}.get(reference.kind or "", "median length")
    p_value = ks_p_value(distance, reference.numbers.count, current.numbers.count)
    said = "other times" if reference.kind == "times" else f"{what} {middle[0]:.4g}, now {middle[1]:.4g}"
    return ColumnPart("Kolmogorov-Smirnov", distance, distance, p_value, said)


def _of_counts(reference: ColumnSummary, current: ColumnSummary) -> ColumnPart | None:
    """Compare how often each value occurs. Return None if there are too many values, or all but one are rare.

    Rare values count as one, and so do long texts, which are not counted one by one. Which values are rare depends on
    both samples together: it does not tell them apart, and the test keeps its level.
    """
    sides = [side.top.counts for side in (reference, current)]
    if reference.top.error or current.top.error:  # known once the counts are
        return None
    values: list[Any] = sorted({*sides[0], *sides[1]}, key=str)
    long = [summary.count - sum(side.values()) for summary, side in zip((reference, current), sides, strict=True)]
    counts = np.array([[side.get(value, 0) for value in values] for side in sides], dtype=np.float64)
    if any(long):
        counts, values = np.c_[counts, long], [*values, "texts of more than 200 characters"]
    if counts.shape[1] > 2:
        counts, values = _pooled(counts, values)
    if counts.shape[1] < 2:
        return _untested(0.0, "always the same value") if len(values) == 1 and values[0] != _OTHERS else None
    shares = counts / counts.sum(axis=1, keepdims=True)
    at = int(np.abs(shares[1] - shares[0]).argmax())
    name = values[at] if values[at] == _OTHERS else shorten_repr(values[at], _SHOWN_CHARACTERS)
    return _of_table(counts, f"{name}: {shares[0, at]:.3g} of the rows, now {shares[1, at]:.3g}")


def _pooled(counts: Any, values: list[Any]) -> tuple[Any, list[Any]]:
    """Put all values that are rare in a sample of this size together."""
    expected = counts.sum(axis=0) * counts.sum(axis=1).min() / counts.sum()
    order = np.argsort(expected, kind="stable")
    rare = int((expected < _LEAST_EXPECTED).sum())
    if not rare:
        return counts, values
    while rare < len(values) and expected[order[:rare]].sum() < _LEAST_EXPECTED:
        rare += 1  # The rare values together are rare as well: the next one joins them.
    kept = np.sort(order[rare:])
    pooled = np.c_[counts[:, kept], counts[:, order[:rare]].sum(axis=1)]
    return pooled, [*(values[at] for at in kept), _OTHERS]


def _of_table(counts: Any, said: str) -> ColumnPart:
    """Test a table with a row for each sample and a column for each category.

    The distance is the total variation. Two categories, one of them rare, have Fisher's exact test.
    """
    rows = counts.sum(axis=1, keepdims=True)
    expected = rows * counts.sum(axis=0) / counts.sum()
    is_used = expected[0] > 0
    statistic = float(((counts - expected)[:, is_used] ** 2 / expected[:, is_used]).sum())
    shares = counts / rows
    distance = float(np.abs(shares[1] - shares[0]).sum() / 2)
    if counts.shape[1] == 2 and expected.min() < _LEAST_EXPECTED:
        return ColumnPart("Fisher", distance, statistic, fisher_p_value(counts), said)
    return ColumnPart("chi-squared", distance, statistic, chi_squared_p_value(statistic, int(is_used.sum()) - 1), said)


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
    """Return the chance of a distance at least this large between two samples of one distribution.

    It is exact for small samples without equal values, which make it larger. For others it is the asymptotic one, with
    the correction of Stephens (1970).
    """
    if first * second <= _EXACT_PAIRS:
        return _exact_ks_p_value(distance, first, second)
    root = math.sqrt(first * second / (first + second))
    x = (root + 0.12 + 0.11 / root) * distance
    if x < 0.2:  # the series converges slowly, and the result is 1 to many digits
        return 1.0
    series = sum((-1) ** (k - 1) * math.exp(-2 * k * k * x * x) for k in range(1, _TERMS + 1))
    return min(1.0, max(0.0, 2 * series))


def _exact_ks_p_value(distance: float, first: int, second: int) -> float:
    """Add up the chances of all orders of the values in which the distance is reached (Hodges 1957).

    ``inside[i]`` is the chance that of the values so far, i are of the first sample, and no distance was as large.
    """
    reach = round(distance * first * second)
    if reach <= 0:
        return 1.0
    at = np.arange(first + 1)
    inside = np.zeros(first + 1)
    inside[0] = 1.0
    reached = 0.0
    for done in range(first + second):
        left = first + second - done
        to_first = inside * ((first - at) / left)
        inside *= np.maximum(second - (done - at), 0) / left
        inside[1:] += to_first[:-1]
        is_far = np.abs(at * second - (done + 1 - at) * first) >= reach
        reached += float(inside[is_far].sum())
        inside[is_far] = 0.0
    return min(1.0, reached)


def chi_squared_p_value(statistic: float, freedom: int) -> float | None:
    """Return the chance of a statistic at least this large, or None without a degree of freedom.

    It is the incomplete gamma function: a series for small statistics, a continued fraction for large ones.

    >>> round(chi_squared_p_value(3.841458820694124, 1), 9)
    0.05
    """
    if freedom < 1:
        return None
    a, x = freedom / 2, statistic / 2
    if x <= 0:
        return 1.0
    scale = math.exp(a * math.log(x) - x - math.lgamma(a))
    if x < a + 1:
        term = total = 1 / a
        at = a
        while term > _PRECISION * total:
            at += 1
            term *= x / at
            total += term
        return max(0.0, 1 - total * scale)
    below = x + 1 - a
    upper, lower = 1e300, 1 / below
    total, step, count = lower, 0.0, 0
    while abs(step - 1) > _PRECISION:  # Lentz's method
        count += 1
        factor = -count * (count - a)
        below += 2
        lower = 1 / (factor * lower + below)
        upper = below + factor / upper
        step = lower * upper
        total *= step
    return total * scale


def fisher_p_value(counts: Any) -> float:
    """Return the two-sided p-value of Fisher's exact test for a table of two samples and two categories.

    >>> round(fisher_p_value([[8, 2], [1, 5]]), 6)
    0.034965
    """
    (a, b), (c, d) = np.asarray(counts, dtype=np.int64).tolist()
    if a + b > c + d:
        a, b, c, d = c, d, a, b
    if a + c > b + d:
        a, b, c, d = b, a, d, c
    few, rare, rows = a + b, a + c, a + b + c + d
    possible = range(max(0, few + rare - rows), min(few, rare) + 1)
    logs = [_log_choose(rare, each) + _log_choose(rows - rare, few - each) for each in possible]
    most = max(logs)
    chances = [math.exp(each - most) for each in logs]
    observed = chances[a - possible[0]] * (1 + 1e-9)  # equal chances may differ in their last digits
    return min(1.0, sum(each for each in chances if each <= observed) / sum(chances))


def _log_choose(among: int, chosen: int) -> float:
    return math.lgamma(among + 1) - math.lgamma(chosen + 1) - math.lgamma(among - chosen + 1)
