"""Distances against their definitions, especially of near and equal rows."""

from __future__ import annotations

from pathlib import Path
from typing import get_args

import numpy as np
import pytest
from scipy.spatial.distance import cdist

from luminosity.drift import distance_blocks, pairwise_distances
from luminosity.drift.distances import Metric
from luminosity.drift.rows import Precision
from luminosity.errors import DriftError

_THEIRS = {"manhattan": "cityblock"}


@pytest.mark.parametrize("metric", get_args(Metric))
@pytest.mark.parametrize(("precision", "error"), [("float32", 2e-6), ("float64", 1e-12)])
def test_distances_follow_their_definition(metric: Metric, precision: str, error: float) -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(1100, 7)), random.normal(1, 2, size=(600, 7))
    expected = cdist(x, y, _THEIRS.get(metric, metric))  # type: ignore[call-overload]
    found = pairwise_distances(x, y, metric, precision=precision)  # type: ignore[arg-type]
    assert found.dtype == precision
    np.testing.assert_allclose(found, expected, rtol=error, atol=error)
    blocks = list(distance_blocks(x, y, metric, precision=precision))  # type: ignore[arg-type]
    assert np.array_equal(np.concatenate([block for _, block in blocks]), found)
    assert [part.start for part, _ in blocks] == [0, 512, 1024]


@pytest.mark.parametrize("metric", get_args(Metric))
def test_a_sample_with_itself_is_symmetric_and_zero_on_the_diagonal(metric: Metric) -> None:
    x = np.random.default_rng(1).normal(1e4, 1, size=(700, 20)).astype(np.float32)
    found = pairwise_distances(x, metric=metric)
    assert np.array_equal(found, found.T)
    assert not found.diagonal().any()
    np.testing.assert_allclose(found, pairwise_distances(x, x.copy(), metric), rtol=1e-6, atol=1e-7)


def test_near_rows_keep_their_digits() -> None:
    random = np.random.default_rng(2)
    x = random.normal(size=(300, 50)).astype(np.float32)
    for apart in (1e-2, 1e-4, 1e-6):
        y = (x + apart * random.normal(size=x.shape)).astype(np.float32)
        expected = np.sqrt(((x.astype(np.float64) - y) ** 2).sum(axis=1))
        assert pairwise_distances(x, y).diagonal() == pytest.approx(expected, rel=1e-2 if apart == 1e-6 else 1e-3)


def test_distances_of_equal_rows_are_zero() -> None:
    assert not pairwise_distances(np.full((600, 3), 0.1)).any()
    assert not pairwise_distances([[1, 2], [1, 2]], [[2, 4]], "cosine").any()
    assert pairwise_distances([1, 2], [5]).tolist() == [[4], [3]]


def test_the_result_may_be_a_mapped_file(tmp_path: Path) -> None:
    x = np.random.default_rng(3).normal(size=(800, 4))
    file = np.lib.format.open_memmap(tmp_path / "distances.npy", "w+", np.float32, (800, 800))
    assert pairwise_distances(x, out=file) is file
    file.flush()
    assert np.array_equal(np.load(tmp_path / "distances.npy"), pairwise_distances(x))
    with pytest.raises(DriftError, match=r"out of float32 \(800, 800\), expected float32 \(800, 10\)"):
        pairwise_distances(x, x[:10], out=file)


def test_invalid_arguments_are_errors() -> None:
    x = np.ones((5, 3))
    with pytest.raises(DriftError, match="expected one of euclidean"):
        pairwise_distances(x, metric="hamming")  # type: ignore[arg-type]
    with pytest.raises(DriftError, match="rows of 3 numbers, y of 2"):
        pairwise_distances(x, x[:, :2])
    with pytest.raises(DriftError, match="1 rows of only zeros, the first at 2"):
        pairwise_distances(x, [[1, 1, 1], [1, 1, 1], [0, 0, 0]], "cosine")
    with pytest.raises(DriftError, match="NaN"):
        pairwise_distances(x * np.nan)
    with pytest.raises(DriftError, match="no rows"):
        pairwise_distances(x, x[:0])


@pytest.mark.parametrize("metric", ["euclidean", "manhattan", "cosine"])
@pytest.mark.parametrize("precision", ["float32", "float64"])
def test_distances_left_on_the_device_are_the_same(metric: Metric, precision: Precision) -> None:
    import jax

    rows = np.random.default_rng(0).normal(size=(1300, 5))
    for other in (None, rows[:700]):
        found = pairwise_distances(rows, other, metric, precision=precision, on_device=True)
        assert isinstance(found, jax.Array)
        expected = pairwise_distances(rows, other, metric, precision=precision)
        assert found.dtype == expected.dtype
        assert np.array_equal(np.asarray(found), expected)
    with pytest.raises(DriftError, match="out with on_device=True"):
        pairwise_distances(rows, out=np.empty((1300, 1300), np.float32), on_device=True)
