"""Principal components, from sums that can be computed in pieces and merged.

A test on projected rows needs components of both samples together. Components of the reference alone describe its own
spread best, which tells the samples apart, and the test would report drift too often.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from luminosity.drift.rows import Precision, Rows, as_rows, check_precision, is_whole
from luminosity.errors import DriftError

__all__ = ["PCA", "PCASums"]

_AT_ONCE = 1 << 20  # numbers converted at a time: 8 MB


@dataclass(frozen=True, eq=False)
class PCA:
    """The directions in which rows vary most, one per row of ``components``.

    The largest entry of each component is positive, so that signs do not depend on how the rows were merged.

    >>> rows = np.random.default_rng(0).normal(size=(500, 3)) * [1, 10, 1]
    >>> pca = PCA.fit(rows, 2)
    >>> pca.components[0].round() + 0.0, pca.transform(rows).shape
    (array([0., 1., 0.]), (500, 2))
    """

    mean: Any
    components: Any
    explained_variance: Any  # the variance along each component
    explained_variance_ratio: Any  # its share of the rows' variance

    @classmethod
    def fit(cls, rows: Any, components: int) -> PCA:
        """Return the exact components of the rows. For rows that come in pieces, see ``PCASums``."""
        rows = as_rows(rows, "the sample", least=0)
        if 1 < len(rows) < rows.shape[1]:
            return _of_few(rows, components)
        sums = PCASums()
        sums.add(rows)
        return sums.pca(components)

    @classmethod
    def from_sums(cls, count: int, total: Any, products: Any, components: int) -> PCA:
        """Return components from the number of rows, their sum and the sum of their outer products.

        A database can compute these. If rows are far from zero, they lose digits that ``PCASums`` keeps.
        """
        if count < 2:
            raise DriftError(f"found sums over {count} rows, expected at least 2: a single row has no variance")
        mean = np.asarray(total, dtype=np.float64) / count
        scatter = np.asarray(products, dtype=np.float64) - count * np.outer(mean, mean)
        return PCASums(count, mean, scatter).pca(components)

    def transform(self, rows: Any, precision: Precision = "float32") -> Any:
        """Return the rows' coordinates along the components, relative to the mean."""
        check_precision(precision)
        rows = as_rows(rows, "the sample", least=0)
        _check_width(len(self.mean), rows)
        projected = np.empty((len(rows), len(self.components)), dtype=precision)
        directions = self.components.T.astype(precision)
        for some, part in _parts(rows):
            # Centred before they are rounded: rounding rows that are far from zero would leave few digits.
            projected[part] = (some - self.mean).astype(precision, copy=False) @ directions
        return projected


@dataclass
class PCASums:
    """Sums over rows from which components are computed. Their size is fixed, and they merge.

    They are the mean and the scatter about it, in double precision (Chan, Golub and LeVeque 1983): a large mean costs
    no digits, and how the rows were divided changes the result by no more than rounding.

    >>> rows = np.random.default_rng(0).normal(size=(500, 3))
    >>> first, second = PCASums(), PCASums()
    >>> first.add(rows[:100])
    >>> second.add(rows[100:])
    >>> first.merge(second)
    >>> np.allclose(first.pca(2).components, PCA.fit(rows, 2).components)
    True
    """

    count: int = 0
    mean: Any = None
    scatter: Any = None

    def add(self, rows: Any) -> None:
        """Add rows of numbers."""
        if len(rows) == 0:
            return
        for some, _ in _parts(as_rows(rows, "the sample", least=1)):
            mean = some.mean(axis=0, dtype=np.float64)
            centred = some - mean
            with np.errstate(over="ignore", invalid="ignore"):
                scatter = centred.T @ centred
            self.merge(PCASums(len(some), mean, scatter))

    def merge(self, other: PCASums) -> None:
        """Add the sums of other rows."""
        if other.count == 0:
            return
        if self.count == 0:
            self.count, self.mean, self.scatter = other.count, other.mean.copy(), other.scatter.copy()
            return
        _check_width(len(self.mean), other.mean[None])
        count = self.count + other.count
        apart = other.mean - self.mean
        with np.errstate(over="ignore", invalid="ignore"):  # pca() raises an error for it.
            self.scatter += other.scatter
            self.scatter += np.outer(apart, apart * (self.count * other.count / count))
        self.mean += apart * (other.count / count)
        self.count = count

    def pca(self, components: int) -> PCA:
        """Return the principal components of all rows that were added."""
        if self.count < 2:
            raise DriftError(
                f"found {self.count} rows to find components of, expected at least 2: a single row has no variance"
            )
        _check_components(components, self.count, len(self.mean))
        if not np.isfinite(self.scatter).all():
            raise DriftError(
                "some numbers are too large for principal components: their squares overflow", fix="scale them"
            )
        covariance = self.scatter / (self.count - 1)
        variances, vectors = np.linalg.eigh(covariance)
        variances = np.maximum(variances[::-1][:components], 0)
        directions = _with_signs(np.ascontiguousarray(vectors.T[::-1][:components]))
        whole = float(np.trace(covariance))
        return PCA(self.mean.copy(), directions, variances, variances / (whole or 1.0))


def _of_few(rows: Rows, components: int) -> PCA:
    """Return components of fewer rows than columns, without the covariance matrix of all columns."""
    _check_components(components, *rows.shape)
    mean = rows.mean(axis=0, dtype=np.float64)
    _, lengths, directions = np.linalg.svd(rows - mean, full_matrices=False)
    variances = lengths**2 / (len(rows) - 1)
    whole = float(variances.sum())
    chosen = variances[:components]
    return PCA(mean, _with_signs(directions[:components]), chosen, chosen / (whole or 1.0))


def _with_signs(directions: Any) -> Any:
    largest = np.take_along_axis(directions, np.abs(directions).argmax(axis=1)[:, None], axis=1)
    return directions * np.sign(largest)


def _check_components(components: int, count: int, width: int) -> None:
    most = min(count, width)
    if not is_whole(components) or not 1 <= components <= most:
        raise DriftError(
            f"found components={components}, expected 1 to {most}: there are {count:,} rows of {width} numbers, and no "
            "more directions than either"
        )


def _parts(rows: Rows) -> Iterator[tuple[Rows, slice]]:
    """Yield some rows at a time: in double precision, all rows together may take twice the memory."""
    step = max(1, _AT_ONCE // rows.shape[1])
    for start in range(0, len(rows), step):
        part = slice(start, start + step)
        yield rows[part], part


def _check_width(expected: int, rows: Rows) -> None:
    if rows.shape[1] != expected:
        raise DriftError(
            f"found rows of {rows.shape[1]} numbers, expected {expected} as before; perhaps they come from "
            "different models"
        )
