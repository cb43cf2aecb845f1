"""The estimate against its definition, and the test's verdicts."""

from __future__ import annotations

import numpy as np
import pytest

from luminosity.drift import RBF, mmd2, mmd_test


@pytest.mark.parametrize(("precision", "error"), [("float64", 1e-14), ("float32", 1e-7)])
def test_mmd2_is_its_definition(precision: str, error: float) -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(250, 5)), random.normal(0.1, 1, size=(200, 5))

    def kernel(a: np.ndarray, b: np.ndarray) -> np.ndarray:
        return np.exp(-((a[:, None] - b[None]) ** 2).sum(2) / (2 * 2.0**2))

    xx, yy, xy = kernel(x, x), kernel(y, y), kernel(x, y)
    expected = (xx.sum() - 250) / (250 * 249) + (yy.sum() - 200) / (200 * 199) - 2 * xy.mean()
    assert mmd2(x, y, RBF(2.0), precision=precision) == pytest.approx(expected, abs=error)  # type: ignore[arg-type]


def test_another_distribution_is_told_from_the_same() -> None:
    rows = np.random.default_rng(1).normal(size=(2000, 3))
    assert not mmd_test(rows[:1000], rows[1000:]).drift
    assert mmd_test(rows[:1000], rows[1000:] + 0.3).drift
