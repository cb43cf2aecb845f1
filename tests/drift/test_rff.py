"""The test with random features: near the exact one, and independent of how sums are merged."""

from __future__ import annotations

import pickle
from typing import Any

import numpy as np
import pytest

from luminosity.drift import RBF, Laplacian, Linear, RFFSums, mmd2, mmd_test, rff_mmd
from luminosity.errors import DriftError


def samples(rows: int = 600, width: int = 4, shift: float = 0.5) -> tuple[np.ndarray, np.ndarray]:
    random = np.random.default_rng(0)
    return random.normal(size=(rows, width)), random.normal(shift, 1, size=(rows - 50, width))


@pytest.mark.parametrize("kernel", [RBF(2.0), Laplacian(4.0)])
def test_more_features_approach_the_exact_estimate(kernel: Any) -> None:
    reference, current = samples()
    exact = mmd2(reference, current, kernel)
    errors = [
        np.mean([abs(rff_mmd(reference, current, kernel, features=count, seed=s).mmd2 - exact) for s in range(4)])
        for count in (64, 4096)
    ]
    assert errors[1] < 0.05 * exact
    assert errors[1] < errors[0] / 3


def test_the_estimate_is_unbiased_over_pairs_of_different_rows() -> None:
    reference, current = samples()
    frequencies = np.random.default_rng((3, 4)).standard_normal((4, 32)) / 2.0

    def kernel(x: np.ndarray, y: np.ndarray) -> np.ndarray:
        return np.cos((x @ frequencies)[:, None] - (y @ frequencies)[None]).mean(axis=2)

    xx, yy = kernel(reference, reference), kernel(current, current)
    np.fill_diagonal(xx, 0)
    np.fill_diagonal(yy, 0)
    expected = xx.sum() / (600 * 599) + yy.sum() / (550 * 549) - 2 * kernel(reference, current).mean()
    found = rff_mmd(reference, current, RBF(2.0), features=64, seed=3, precision="float64")
    assert found.mmd2 == pytest.approx(expected, rel=1e-9)
    assert rff_mmd(reference, current, RBF(2.0), features=64, seed=3).mmd2 == pytest.approx(expected, rel=1e-4)


def test_bandwidth_bins_and_permutations_are_those_of_the_exact_test() -> None:
    reference, current = samples(shift=0.1)
    exact, found = mmd_test(reference, current, seed=5), rff_mmd(reference, current, seed=5, features=8192)
    assert found.kernels[0].bandwidth == exact.kernels[0].bandwidth
    assert (found.reference_bins, found.current_bins) == (exact.reference_bins, exact.current_bins)
    assert found.null_sd == pytest.approx(exact.null_sd, rel=0.1)
    assert found.p_value == pytest.approx(exact.p_value, abs=0.05)


def test_shards_and_order_do_not_matter() -> None:
    reference, current = samples(1300)
    ids = np.arange(1300), np.array([f"row {number}" for number in range(1250)])
    whole = rff_mmd(reference, current, RBF(2.0), ids=ids, features=256, precision="float64")
    merged = RFFSums.plan(RBF(2.0), 1300, 1250, features=256, precision="float64")
    for order in np.array_split(np.random.default_rng(1).permutation(1250), [0, 1, 70, 900]):
        shard = RFFSums.plan(RBF(2.0), 1300, 1250, features=256, precision="float64")
        shard.add(current[order], "current", ids=ids[1][order])
        shard.add(reference[order], "reference", ids=ids[0][order])
        merged.merge(pickle.loads(pickle.dumps(shard)))
    merged.add(reference[1250:], "reference", ids=ids[0][1250:])
    found = merged.result()
    assert found.mmd2 == pytest.approx(whole.mmd2, rel=1e-9)
    assert found.null_sd == pytest.approx(whole.null_sd, rel=1e-9)
    assert found.p_value == whole.p_value
    single = rff_mmd(reference[::-1], current, RBF(2.0), ids=(ids[0][::-1], ids[1]), features=256)
    assert abs(single.mmd2 - whole.mmd2) < 1e-3 * whole.null_sd


def test_the_level_holds_and_little_power_is_lost() -> None:
    random = np.random.default_rng(2)
    null, exact, found = 0, 0, 0
    for seed in range(40):
        x, y = random.normal(size=(100, 5)), random.normal(size=(100, 5))
        null += rff_mmd(x, y, RBF(3.0), permutations=199, seed=seed).drift
        exact += mmd_test(x, y + 0.2, RBF(3.0), permutations=199, seed=seed).drift
        found += rff_mmd(x, y + 0.2, RBF(3.0), permutations=199, seed=seed).drift
    assert null <= 6  # 2.9 standard deviations above 2
    assert found >= exact - 3


def test_invalid_arguments_are_errors() -> None:
    reference, current = samples(60)
    with pytest.raises(DriftError, match=r"kernel Linear\(\), expected RBF or Laplacian"):
        rff_mmd(reference, current, Linear())  # type: ignore[arg-type]
    with pytest.raises(DriftError, match="features=7, expected an even number"):
        rff_mmd(reference, current, features=7)
    with pytest.raises(DriftError, match="without a bandwidth"):
        RFFSums.plan(RBF(), 60, 10)
    sums = RFFSums.plan(RBF(1.0), 60, 10)
    with pytest.raises(DriftError, match="0 rows of the reference"):
        sums.result()
    with pytest.raises(DriftError, match="different tests"):
        sums.merge(RFFSums.plan(RBF(1.5), 60, 10))
    with pytest.raises(DriftError, match="ids or bins of 2 rows, but 60 rows"):
        sums.add(reference, "reference", ids=[1, 2])
    with pytest.raises(DriftError, match="side='left'"):
        sums.add(reference, "left", ids=range(60))  # type: ignore[arg-type]
    sums.add(reference, "reference", ids=range(60))
    with pytest.raises(DriftError, match="rows of 2 numbers, expected 4"):
        sums.add(current[:, :2], "current", ids=range(10))


def test_few_rows_are_compared_with_some_of_many() -> None:
    """As in the exact test: otherwise there would be as many bins as rows, and pairs of bins would fill the memory."""
    many, few = np.random.default_rng(0).normal(size=(5000, 2)), np.random.default_rng(1).normal(size=(2, 2))
    with pytest.warns(UserWarning, match="Only 2,046 of them"):
        found = rff_mmd(many, few, features=64)
    assert (found.reference_bins, found.reference_rows) == (1023, 2046)
    with pytest.raises(DriftError, match="no more of one than 1,023 times"):
        RFFSums.plan(RBF(1.0), 5000, 2)


@pytest.mark.parametrize(
    ("settings", "message"),
    [({"seed": -1}, "seed=-1"), ({"features": 64.0}, "features=64.0"), ({"kernel": [RBF()]}, "expected RBF or Lap")],
)
def test_invalid_settings_are_errors(settings: dict[str, Any], message: str) -> None:
    with pytest.raises(DriftError, match=message):
        rff_mmd(*samples(), **settings)


def test_numbers_too_large_for_single_precision_are_errors() -> None:
    reference, current = samples(shift=0)
    with pytest.raises(DriftError, match="too large for single precision"):
        rff_mmd(reference * 1e39, current * 1e39)
    assert not rff_mmd(reference * 1e39, current * 1e39, precision="float64").drift
