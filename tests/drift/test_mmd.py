"""The estimate against its definition, the test's verdicts, and samples of very different sizes."""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable
from typing import Any

import jax.numpy as jnp
import numpy as np
import pytest

from luminosity.drift import RBF, BlockKernel, Kernel, Laplacian, Linear, Polynomial, RowKernel, mmd2, mmd_test
from luminosity.drift.sums.bins import most_rows, plan_bins

Gram = Callable[[Any, Any], Any]


def differences(x: Any, y: Any) -> Any:
    return x[:, None] - y[None]


def cosines(x: Any, y: Any) -> Any:
    return x @ y.T / np.linalg.norm(x, axis=1)[:, None] / np.linalg.norm(y, axis=1)[None, :]


def cosine(x: Any, y: Any) -> Any:
    return x @ y / jnp.sqrt((x @ x) * (y @ y))


KERNELS: list[tuple[Kernel, Gram]] = [
    (RBF(2.0), lambda x, y: np.exp(-(differences(x, y) ** 2).sum(2) / (2 * 2.0**2))),
    (Laplacian(4.0), lambda x, y: np.exp(-np.abs(differences(x, y)).sum(2) / 4.0)),
    (Linear(), lambda x, y: x @ y.T),
    (Polynomial(3, 0.5), lambda x, y: (x @ y.T / x.shape[1] + 0.5) ** 3),
    (RowKernel(cosine), cosines),
    (BlockKernel(lambda x, y: cosines(np.array(x), np.array(y))), cosines),
]


def defined(gram: Gram, x: Any, y: Any) -> float:
    (m, n), xx, yy = (len(x), len(y)), gram(x, x), gram(y, y)
    within = (xx.sum() - np.trace(xx)) / (m * (m - 1)) + (yy.sum() - np.trace(yy)) / (n * (n - 1))
    return float(within - 2 * gram(x, y).mean())


def samples(rows: int, others: int) -> tuple[Any, Any]:
    random = np.random.default_rng(0)
    return random.normal(size=(rows, 5)), random.normal(0.1, 1.2, size=(others, 5))


@pytest.mark.parametrize(("kernel", "gram"), KERNELS, ids=lambda value: getattr(value, "name", ""))
def test_mmd2_follows_its_definition(kernel: Kernel, gram: Gram) -> None:
    x, y = samples(250, 1203)
    expected = defined(gram, x, y)
    assert mmd2(x, y, kernel) == pytest.approx(expected, rel=1e-4)
    assert mmd_test(x, y, kernel).mmd2 == pytest.approx(expected, rel=1e-4)
    assert mmd2(x, y, kernel, precision="float64") == pytest.approx(expected, abs=1e-12)
    assert mmd_test(x, y, kernel, precision="float64").mmd2 == pytest.approx(expected, abs=1e-12)


@pytest.mark.parametrize(("rows", "others", "bins"), [(2, 2, 16), (63, 66, 120), (2100, 2501, 120), (900, 400, 1024)])
def test_any_number_of_rows_and_bins_gives_the_same_estimate(rows: int, others: int, bins: int) -> None:
    x, y = samples(rows, others)
    expected = mmd2(x, y, RBF(2.0), precision="float64")
    for ids in (None, (np.arange(rows), np.arange(others))):
        exact = mmd_test(x, y, RBF(2.0), bins=bins, ids=ids, precision="float64")
        assert exact.mmd2 == pytest.approx(expected, abs=1e-12)
        assert (exact.reference_rows, exact.current_rows) == (rows, others)
        single = mmd_test(x, y, RBF(2.0), bins=bins, ids=ids)
        assert single.mmd2 == pytest.approx(expected, abs=1e-3 * single.null_sd + 1e-7)


def test_another_distribution_is_detected() -> None:
    rows = np.random.default_rng(1).normal(size=(2000, 3))
    assert not mmd_test(rows[:1000], rows[1000:]).drift
    assert mmd_test(rows[:1000], rows[1000:] + 0.3).drift


def test_a_result_within_a_pair_prints_few_lines() -> None:
    # beam.Map(print) prints such pairs, with a test for each key.
    random = np.random.default_rng(0)
    found = mmd_test(random.normal(size=(40, 2)), random.normal(size=(40, 2)), permutations=100)
    assert len(str(("key", found))) < 1500


def test_with_ids_the_order_of_rows_does_not_matter() -> None:
    x, y = samples(700, 500)
    order = np.random.default_rng(3).permutation(500)
    straight = mmd_test(x, y, ids=(np.arange(700), np.arange(500)), precision="float64")
    shuffled = mmd_test(x, y[order], ids=(np.arange(700), np.arange(500)[order]), precision="float64")
    assert shuffled.p_value == straight.p_value
    assert shuffled.mmd2 == pytest.approx(straight.mmd2, rel=1e-9)


def test_progress_is_reported() -> None:
    reports: list[tuple[int, int]] = []
    mmd2(*samples(6000, 6000), RBF(2.0), progress=lambda done, of: reports.append((done, of)))
    assert reports == [(64, 78), (78, 78)]


@pytest.mark.parametrize("with_ids", [False, True])
def test_rows_beyond_what_bins_allow_are_left_out(with_ids: bool) -> None:
    x, y = samples(3 * 1023 + 500, 3)
    ids = (np.arange(len(x)), np.arange(3)) if with_ids else None
    with pytest.warns(UserWarning, match=r"The reference has 3,569 rows, the other sample 3\. Only 3,069"):
        found = mmd_test(x, y, ids=ids)
    assert (found.reference_rows, found.current_rows) == (3069, 3)
    with pytest.warns(UserWarning, match="The current sample has 3,569 rows"):
        assert mmd_test(y, x + 100).drift


@pytest.mark.parametrize("smaller", [2, 3, 7, 50, 1000])
@pytest.mark.parametrize("ratio", [1, 1.5, 7.3, 20, 200, 601.5, 1023])
def test_bins_of_both_samples_have_one_size(smaller: int, ratio: float) -> None:
    larger = int(smaller * ratio)
    planned = plan_bins(larger, smaller)
    assert larger <= most_rows(smaller)
    assert planned.all <= 1024
    sizes = larger / planned.reference, smaller / planned.current
    assert sizes[0] == pytest.approx(sizes[1], rel=1 / planned.reference)
    assert sizes[0] >= sizes[1]


@pytest.mark.parametrize(("rows", "ratio", "trials", "most"), [(20, 20, 60, 8), (4, 200, 40, 6)])
def test_the_level_holds_for_samples_of_very_different_sizes(rows: int, ratio: int, trials: int, most: int) -> None:
    random = np.random.default_rng(5)

    def drifts(seed: int) -> bool:
        x, y = random.normal(size=(rows * ratio, 2)), random.normal(size=(rows, 2))
        return mmd_test(x, y, RBF(1.5), permutations=199, seed=seed).drift

    assert sum(map(drifts, range(trials))) <= most  # At a rate of .05, more happen once in 200 times.


ON_SEVERAL_DEVICES = """
import jax, numpy as np
from luminosity.drift import RBF, Laplacian, mmd_test
rows = np.random.default_rng(0).normal(size=(3600, 4))
found = mmd_test(rows[:1700], rows[1700:], [RBF(2.0), Laplacian(3.0)], precision="float64")
print(len(jax.local_devices()), repr(found.kernels[0].mmd2), repr(found.kernels[1].mmd2), found.p_value)
"""


def test_several_devices_give_the_same_result() -> None:
    rows = np.random.default_rng(0).normal(size=(3600, 4))
    expected = mmd_test(rows[:1700], rows[1700:], [RBF(2.0), Laplacian(3.0)], precision="float64")
    flags = {"XLA_FLAGS": "--xla_force_host_platform_device_count=4", "JAX_PLATFORMS": "cpu"}
    child = subprocess.run(
        [sys.executable, "-c", ON_SEVERAL_DEVICES],
        env={**os.environ, **flags},
        capture_output=True,
        text=True,
        timeout=300,
        check=False,
    )
    assert child.returncode == 0, child.stderr
    devices, *values, p_value = map(float, child.stdout.split())
    assert devices == 4
    assert values == pytest.approx([kernel.mmd2 for kernel in expected.kernels], abs=1e-12)
    assert p_value == expected.p_value
