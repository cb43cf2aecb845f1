"""Tests with many bandwidths at once."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from luminosity.drift import RBF, Aggregate, BlockKernel, Laplacian, Linear, mmd_test
from luminosity.drift.mmd.permutations import fused, p_value
from luminosity.errors import DriftError

_ROWS = np.random.default_rng(0).normal(size=(300, 4))


def _bandwidths(kernels: list[Any]) -> list[float]:
    return [kernel.bandwidth for kernel in kernels]


def test_bandwidths_reach_from_the_smallest_distances_to_the_largest() -> None:
    kernels = Aggregate(("rbf", "laplacian"), bandwidths=6).resolved_all(_ROWS)
    assert [type(kernel) for kernel in kernels] == [RBF] * 6 + [Laplacian] * 6
    found = np.array(_bandwidths(kernels[:6]))
    distances = np.linalg.norm(_ROWS[:, None] - _ROWS[None], axis=2)[np.triu_indices(300, 1)]
    assert found[0] == pytest.approx(np.quantile(distances, 0.05) / 2)
    assert found[-1] == pytest.approx(np.quantile(distances, 0.95) * 2)
    assert np.diff(np.log(found)) == pytest.approx(np.log(found[1] / found[0]))


def test_bandwidths_follow_the_data_and_not_its_order() -> None:
    found = _bandwidths(Aggregate().resolved_all(_ROWS))
    assert _bandwidths(Aggregate().resolved_all(_ROWS[::-1])) == pytest.approx(found)
    assert _bandwidths(Aggregate().resolved_all(3 * _ROWS + 7)) == pytest.approx([3 * each for each in found])


def test_the_result_has_each_kernel() -> None:
    result = mmd_test(_ROWS[:150], _ROWS[150:], [Aggregate(bandwidths=3), Linear()])
    assert [kernel.kernel.split("(")[0] for kernel in result.kernels] == ["RBF"] * 3 + ["Linear"]
    assert not result.drift
    assert mmd_test(_ROWS[:150], _ROWS[150:] + 0.5, Aggregate()).drift


@pytest.mark.parametrize(("precision", "off_by"), [("float64", 1e-12), ("float32", 1e-6)])
def test_kernels_that_share_distances_give_what_each_gives_alone(precision: Any, off_by: float) -> None:
    kernels = [RBF(0.5), Laplacian(2.0), RBF(30.0), Linear(), RBF(2.0), Laplacian(0.3)]
    x, y = _ROWS[:150], 1.2 * _ROWS[150:] + 7
    together = mmd_test(x, y, kernels, precision=precision)
    alone = [mmd_test(x, y, kernel, precision=precision).mmd2 for kernel in kernels]
    assert [each.mmd2 for each in together.kernels] == pytest.approx(alone, rel=off_by, abs=off_by)


@pytest.mark.parametrize("settings", [{"kinds": ()}, {"kinds": ("gauss",)}, {"kinds": ("rbf", "rbf")}])
def test_unknown_kinds_are_named(settings: dict[str, Any]) -> None:
    with pytest.raises(DriftError, match=r"expected some of \('rbf', 'laplacian'\), each once"):
        Aggregate(**settings)


def test_a_single_bandwidth_is_refused() -> None:
    with pytest.raises(DriftError, match="from 2 to 50"):
        Aggregate(bandwidths=1)


def test_block_kernels_can_not_be_aggregated() -> None:
    with pytest.raises(DriftError, match="expected only BlockKernels"):
        mmd_test(["a", "b"], ["c", "d"], [BlockKernel(lambda a, b: np.ones((len(a), len(b)))), Aggregate()])


def _estimates(seed: int = 0) -> tuple[Any, Any]:
    random = np.random.default_rng(seed)
    return random.normal(size=3), random.normal(size=(3, 400))


def test_the_order_and_the_units_of_kernels_change_nothing() -> None:
    observed, null = _estimates()
    statistic, of_null = fused(observed, null)
    again, of_null_again = fused(observed[::-1] * 7 + 1, null[::-1] * 7 + 1)
    assert again == pytest.approx(statistic)
    assert of_null_again == pytest.approx(of_null)


def test_the_order_of_permutations_changes_nothing() -> None:
    """The data's own order is treated like any other permutation."""
    observed, null = _estimates()
    statistic, of_null = fused(observed, null)
    swapped = null.copy()
    swapped[:, 5] = observed
    of_fifth, of_others = fused(null[:, 5], swapped)
    assert of_others[5] == pytest.approx(statistic)
    assert of_fifth == pytest.approx(of_null[5])


def test_a_constant_kernel_is_left_out() -> None:
    observed, null = _estimates()
    rounding = 1e-17 * np.random.default_rng(1).normal(size=(1, 400))
    with_constant = fused(np.append(observed, 5.0), np.concatenate([null, np.full((1, 400), 5.0)]))
    with_rounding = fused(np.append(observed, 1e-17), np.concatenate([null, rounding]), [0, 0, 0, 1e-12])
    expected = np.maximum(fused(observed, null)[1], 0)  # A constant is zero standard deviations from its mean.
    assert with_constant[1] == pytest.approx(expected)
    assert with_rounding[1] == pytest.approx(expected)


def test_a_single_kernel_keeps_its_ranks() -> None:
    observed, null = _estimates()
    for index in range(3):
        alone = fused(observed[index : index + 1], null[index : index + 1])
        assert p_value(*alone) == p_value(float(observed[index]), null[index])
