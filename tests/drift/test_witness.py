"""The witness function against its definition, over all pairs of rows."""

from __future__ import annotations

from typing import Any

import numpy as np
import pytest

from luminosity.drift import RBF, BlockKernel, Kernel, Laplacian, Polynomial, mmd2, witness
from luminosity.errors import DriftError

_RANDOM = np.random.default_rng(0)
_X, _Y = _RANDOM.normal(size=(1500, 4)), _RANDOM.normal(0.2, 1.2, size=(700, 4))


def rbf(a: Any, b: Any) -> Any:
    return np.exp(-((a[:, None] - b[None]) ** 2).sum(2) / (2 * 1.5**2))


def laplacian(a: Any, b: Any) -> Any:
    return np.exp(-np.abs(a[:, None] - b[None]).sum(2) / 3)


def polynomial(a: Any, b: Any) -> Any:
    return (a @ b.T / a.shape[1] + 1) ** 2


def expected(values: Any, rows: Any, own: Any, other: Any, sign: float) -> Any:
    """Return the scores by definition; a row is not compared with itself."""
    with_own = values(rows, own)
    np.fill_diagonal(with_own, 0)
    return sign * (values(rows, other).mean(1) - with_own.sum(1) / (len(own) - 1))


@pytest.mark.parametrize(
    ("kernel", "values"),
    [(RBF(1.5), rbf), (Laplacian(3.0), laplacian), (Polynomial(2), polynomial)],
    ids=["rbf", "laplacian", "polynomial"],
)
@pytest.mark.parametrize(("precision", "error"), [("float64", 1e-12), ("float32", 2e-5)])
def test_scores_follow_their_definition(kernel: Kernel, values: Any, precision: Any, error: float) -> None:
    gone, new = witness(_X, _Y, kernel, precision=precision)
    np.testing.assert_allclose(gone, expected(values, _X, _X, _Y, 1), atol=error)
    np.testing.assert_allclose(new, expected(values, _Y, _Y, _X, -1), atol=error)


def test_the_means_of_scores_give_mmd2() -> None:
    gone, new = witness(_X, _Y, RBF(1.5), precision="float64")
    assert new.mean() - gone.mean() == pytest.approx(mmd2(_X, _Y, RBF(1.5), precision="float64"), abs=1e-12)


def test_fewer_rows_to_compare_with_keep_the_ranks() -> None:
    new = np.concatenate([_Y, _Y[:50] + 4])
    exact = witness(_X, new, RBF(1.5))[1]
    calls: list[tuple[int, int]] = []
    bounded = witness(_X, new, RBF(1.5), against=200, progress=lambda *done: calls.append(done))[1]
    assert np.corrcoef(exact, bounded)[0, 1] > 0.9
    assert not np.array_equal(exact, bounded)
    assert calls[-1] == (len(calls), len(calls))
    with pytest.raises(DriftError, match="against=1"):
        witness(_X, new, against=1)


def test_a_row_is_not_compared_with_itself() -> None:
    """All rows are far from each other: a row compared with itself would have another score."""
    rows = np.arange(200.0)[:, None] * 100
    gone, new = witness(rows[:100], rows[100:], RBF(1.0), against=50)
    assert np.abs(gone).max() < 1e-6
    assert np.abs(new).max() < 1e-6


def test_objects_of_any_type() -> None:
    shared = BlockKernel(lambda a, b: [[len(set(x) & set(y)) for y in b] for x in a])
    gone, new = witness(["abc", "abd", "abe"], ["xyz", "xya", "xyb"], shared)
    assert gone.tolist() == pytest.approx([2 / 3 - 2, 2 / 3 - 2, 2 / 3 - 2])
    assert new.tolist() == pytest.approx([2, 2 - 1, 2 - 1])
