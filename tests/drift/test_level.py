"""How often tests report drift when there is none, with fixed seeds; benchmarks/drift_power.py runs more trials.

A right test reports drift in 4 to 23 of 250 trials at the level .05 (99.8% of the time).
"""

from __future__ import annotations

import json
from collections.abc import Iterable
from typing import Any

import numpy as np
import pytest

from luminosity.drift import RBF, Aggregate, Kernel, Laplacian, Linear, MMDTestResult, Polynomial, mmd_test

pytestmark = pytest.mark.thorough

_TRIALS = 250
_RIGHT = range(4, 24)


def _without_drift(
    kernel: Kernel | Aggregate | list[Kernel | Aggregate] | None = None,
    rows: tuple[int, int] = (40, 40),
    bins: int = 20,
    with_ids: bool = False,
) -> Iterable[MMDTestResult]:
    for trial in range(_TRIALS):
        random = np.random.default_rng((trial, 77))
        x, y = (random.normal(size=(count, 3)) for count in rows)
        ids = (np.arange(len(x)), np.arange(len(y))) if with_ids else None
        yield mmd_test(x, y, kernel, bins=bins, ids=ids, permutations=99, seed=trial)


@pytest.mark.parametrize(
    "settings",
    [
        {},
        {"with_ids": True},
        {"rows": (15, 45), "with_ids": True},
        {"rows": (10, 12), "bins": 120, "with_ids": True},
        {"kernel": Laplacian()},
        {"kernel": [RBF(), Linear()]},
    ],
    ids=repr,
)
def test_the_level_holds(settings: dict[str, Any]) -> None:
    assert sum(result.drift for result in _without_drift(**settings)) in _RIGHT


def test_the_level_holds_for_many_bandwidths_but_not_for_the_smallest_p_value() -> None:
    results = list(_without_drift(Aggregate()))
    assert sum(result.drift for result in results) in _RIGHT
    assert sum(min(kernel.p_value for kernel in result.kernels) <= result.level for result in results) > 30


def test_a_handful_of_rows_in_hashed_bins_is_no_drift() -> None:
    """Many permutations leave one side empty: they must not count as evidence."""
    for rows in ((3, 3), (8, 4)):
        assert sum(result.drift for result in _without_drift(rows=rows, with_ids=True)) < max(_RIGHT)


def test_three_rows_against_three_never_show_drift() -> None:
    """Two of the 20 ways to divide six rows are the data's own, one of them swapped: both count."""
    result = mmd_test([0.0, 0.1, 0.2], [100.0, 100.1, 100.2], permutations=999)
    assert result.p_value == pytest.approx(0.1, abs=0.03)
    assert not result.drift


@pytest.mark.parametrize(("rows", "shift"), [((120, 120), 0.4), ((40, 160), 0.5), ((6, 6), 1.5), ((6, 60), 1.0)])
def test_the_interval_holds_the_truth_in_19_of_20_samples(rows: tuple[int, int], shift: float) -> None:
    """It also holds with few rows, whose spread is not well known."""
    width, bandwidth = 3, 2.0
    truth = 2 * _mean_of_kernel(width, bandwidth, 0.0) - 2 * _mean_of_kernel(width, bandwidth, shift)
    holds = 0
    for trial in range(150):
        random = np.random.default_rng((trial, 78))
        x, y = random.normal(size=(rows[0], width)), random.normal(shift, 1, size=(rows[1], width))
        low, high = mmd_test(x, y, RBF(bandwidth), permutations=19, seed=trial).interval
        holds += low <= truth <= high
    assert holds >= 135  # 142.5 are expected


def _mean_of_kernel(width: int, bandwidth: float, shift: float) -> float:
    """Return the expected kernel of a normal row with another whose mean is moved in each column."""
    spread = bandwidth**2 + 2
    return float((bandwidth**2 / spread) ** (width / 2) * np.exp(-width * shift**2 / (2 * spread)))


def test_two_rows_have_no_interval() -> None:
    result = mmd_test([1.0, 2.0], [3.0, 4.0])
    assert all(np.isnan(result.interval))
    assert "nan" not in str(result)
    assert json.loads(json.dumps(result.as_dict(), allow_nan=False))["interval"] is None


def test_the_interval_of_the_p_value_reaches_zero_when_no_permutation_came_near() -> None:
    x = np.random.default_rng(0).normal(size=(200, 3))
    result = mmd_test(x[:100], x[100:] + 2)
    assert result.p_value == 1 / 1001
    assert result.p_value_interval[0] == 0
    assert result.p_value < result.p_value_interval[1] < 0.005
    low, high = mmd_test(x[:100], x[100:]).p_value_interval
    assert low < mmd_test(x[:100], x[100:]).p_value < high


def test_equal_rows_are_no_drift() -> None:
    """Permutations then differ only by rounding."""
    ones = np.full((50, 3), 0.1)
    for kernel in (Polynomial(), RBF(1.0), Linear(), [Polynomial(), RBF(1.0), Linear()]):
        assert mmd_test(ones, ones[:30], kernel).p_value == 1
