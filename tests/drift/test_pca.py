"""Components against scikit-learn's, and components of merged pieces against those of all rows."""

from __future__ import annotations

import pickle

import numpy as np
import pytest
from sklearn.decomposition import PCA as Theirs

from luminosity.drift import PCA, PCASums
from luminosity.errors import DriftError


def rows_of(count: int = 3000, width: int = 20, mean: float = 3.0) -> np.ndarray:
    random = np.random.default_rng(0)
    return random.normal(size=(count, width)) * np.linspace(5, 1, width) @ random.normal(size=(width, width)) + mean


def test_components_equal_those_of_scikit_learn() -> None:
    rows = rows_of()
    ours, theirs = PCA.fit(rows, 5), Theirs(5, svd_solver="full").fit(rows)
    signs = np.sign((ours.components * theirs.components_).sum(axis=1))
    assert ours.components == pytest.approx(theirs.components_ * signs[:, None], abs=1e-9)
    assert ours.mean == pytest.approx(theirs.mean_)
    assert ours.explained_variance == pytest.approx(theirs.explained_variance_)
    assert ours.explained_variance_ratio == pytest.approx(theirs.explained_variance_ratio_)
    assert ours.transform(rows, "float64") == pytest.approx(theirs.transform(rows) * signs, abs=1e-7)
    assert ours.transform(rows).dtype == np.float32
    assert ours.transform(rows) == pytest.approx(theirs.transform(rows) * signs, rel=1e-4, abs=1e-3)


@pytest.mark.parametrize("mean", [0.0, 1e6])
def test_pieces_and_their_order_do_not_matter(mean: float) -> None:
    rows = rows_of(mean=mean)
    whole = PCA.fit(rows, 20)
    merged = PCASums()
    for piece in np.array_split(rows[::-1], [1, 2, 500, 2000, 2000]):
        sums = PCASums()
        sums.add(piece)
        merged.merge(pickle.loads(pickle.dumps(sums)))
    found = merged.pca(20)
    assert merged.count == len(rows)
    assert found.components == pytest.approx(whole.components, abs=1e-7 if mean else 1e-9)
    assert found.explained_variance == pytest.approx(whole.explained_variance, rel=1e-9)
    assert whole.explained_variance == pytest.approx(PCA.fit(rows - mean, 20).explained_variance, rel=1e-8)


def test_more_rows_than_are_converted_at_once(monkeypatch: pytest.MonkeyPatch) -> None:
    rows = rows_of().astype(np.float32)
    whole = PCA.fit(rows, 5)
    monkeypatch.setattr("luminosity.drift.pca._AT_ONCE", 1000)
    in_blocks = PCA.fit(rows, 5)
    assert in_blocks.components == pytest.approx(whole.components, abs=1e-9)
    assert in_blocks.transform(rows) == pytest.approx(whole.transform(rows), abs=1e-4)


def test_plain_sums_give_the_same_components() -> None:
    rows = rows_of()
    found = PCA.from_sums(len(rows), rows.sum(axis=0), rows.T @ rows, 5)
    assert found.components == pytest.approx(PCA.fit(rows, 5).components, abs=1e-9)


def test_the_size_of_sums_is_fixed() -> None:
    sums = PCASums()
    sums.add(np.ones((10_000, 384), dtype=np.float16))
    assert len(pickle.dumps(sums)) < 1_200_000


def test_constant_rows() -> None:
    pca = PCA.fit(np.full((10, 3), 7.0), 2)
    assert not pca.explained_variance.any()
    assert not pca.explained_variance_ratio.any()
    assert not pca.transform(np.full((4, 3), 7.0)).any()
    assert PCA.fit([1, 2, 3], 1).explained_variance == pytest.approx([1.0])


def test_invalid_arguments_are_errors() -> None:
    rows = rows_of(10, 3)
    with pytest.raises(DriftError, match="components=4, expected 1 to 3"):
        PCA.fit(rows, 4)
    with pytest.raises(DriftError, match="components=3, expected 1 to 2"):
        PCA.fit(rows[:2], 3)
    with pytest.raises(DriftError, match="components=0"):
        PCA.fit(rows, 0)
    with pytest.raises(DriftError, match="found 1 rows to find components of, expected at least 2"):
        PCA.fit(rows[:1], 1)
    with pytest.raises(DriftError, match="found 0 rows to find components of, expected at least 2"):
        PCASums().pca(1)
    with pytest.raises(DriftError, match="NaN"):
        PCA.fit(np.where(rows > rows.max() - 1e-9, np.nan, rows), 1)
    with pytest.raises(DriftError, match="rows of 2 numbers, expected 3"):
        PCA.fit(rows, 1).transform(rows[:, :2])
    sums = PCASums()
    sums.add(rows)
    with pytest.raises(DriftError, match="rows of 2 numbers, expected 3"):
        sums.add(rows[:, :2])
