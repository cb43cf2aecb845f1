"""Prepares two samples for a test: random rows, columns on one scale, principal components of both samples together.

Everything that is fitted here (scales, components) is fitted to both samples together. Fitted to one sample alone it
would tell the samples apart, and the test would report drift too often.
"""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from mmap import mmap
from typing import Any

import numpy as np

from luminosity.drift.pca import PCA, PCASums
from luminosity.drift.rows import as_rows, check_seed, is_whole, same_width
from luminosity.errors import DriftError, Fix

__all__ = [
    "ColumnScale",
    "PreparedSamples",
    "RowSampler",
    "SampledRows",
    "fit_components",
    "prepare_samples",
    "sample_rows",
]

_COMPONENTS = 50  # most of an embedding's variance lies in fewer directions
_WIDEST = 8192  # numbers per row, or rows if these are fewer: the matrix to decompose takes half a gigabyte
_ROWS_PER_SELECTION = 1 << 16  # rows that wait before the sampler drops the rows it does not need


@dataclass(frozen=True)
class SampledRows:
    """Rows of one sample, and their positions in the source.

    ``numbers`` are the positions of the rows in the source, counted from 0. ``read`` is the number of rows that the
    source has, ``skipped`` the number of rows that were left out because a value was missing.
    """

    rows: Any
    numbers: Any
    read: int
    skipped: int = 0


class RowSampler:
    """Draws rows at random, all equally likely, from matrices that arrive one after the other.

    Every row gets a random key, and the rows with the smallest keys are kept: memory holds about three times ``most``
    rows, however many there are. The result depends on the order of rows and the seed, not on how the rows are cut
    into matrices. With ``most=None`` all rows are kept.

    >>> sampler = RowSampler(most=3)
    >>> for start in range(0, 1000, 100):
    ...     sampler.add(np.arange(start, start + 100)[:, None])
    >>> sample = sampler.sample()
    >>> sample.rows.shape, sample.read, bool((sample.rows[:, 0] == sample.numbers).all())
    ((3, 1), 1000, True)
    """

    def __init__(self, most: int | None, *, seed: int = 0) -> None:
        if most is not None and (not is_whole(most) or most < 1):
            raise DriftError(f"found {most!r} rows to draw, expected a whole number from 1 on, or None for all rows")
        check_seed(seed)
        self._most = most
        self._random = np.random.default_rng((seed, 5))
        self._held: list[tuple[Any, Any, Any]] = []  # rows, their numbers, their random keys
        self._waiting = 0
        self.read = 0
        self.skipped = 0

    def add(self, rows: Any, usable: Any = None) -> None:
        """Take the next rows of the source. Rows that the mask ``usable`` excludes are counted and left out."""
        chosen = np.arange(len(rows)) if usable is None else np.flatnonzero(usable)
        kept = rows if len(chosen) == len(rows) else rows[chosen]
        self._held.append((kept, chosen + self.read, self._random.random(len(chosen))))
        self.read += len(rows)
        self.skipped += len(rows) - len(chosen)
        self._waiting += len(chosen)
        if self._most is not None and self._waiting > 2 * self._most + _ROWS_PER_SELECTION:
            self._held = [_smallest_keys(self._held, self._most)]
            self._waiting = self._most

    def sample(self) -> SampledRows:
        """Return the drawn rows in the order of the source."""
        if not self._held:
            return SampledRows(np.empty((0, 1)), np.empty(0, np.int64), self.read, self.skipped)
        rows, numbers, _ = _joined(self._held) if self._most is None else _smallest_keys(self._held, self._most)
        return SampledRows(rows, numbers, self.read, self.skipped)


def sample_rows(rows: Any, most: int | None, *, seed: int = 0, skip_missing: bool = False) -> SampledRows:
    """Draw ``most`` random rows from a matrix, or from an iterable of matrices that need not fit into memory together.

    Args:
      rows: a matrix with one row per example, or an iterable of such matrices.
      most: the number of rows to draw; None keeps all rows.
      seed: the seed of the random choice. Give the two samples of a test different seeds.
      skip_missing: leave out rows with NaN or infinity. By default they are an error.

    >>> sample_rows(np.zeros((1000, 3)), 10).rows.shape
    (10, 3)
    >>> pieces = (np.full((100, 3), number) for number in range(50))
    >>> sample_rows(pieces, 10).read
    5000
    """
    sampler = RowSampler(most, seed=seed)
    for piece in _pieces(rows):
        matrix = as_rows(piece, "the sample", least=0, finite=not skip_missing)
        sampler.add(matrix, np.isfinite(matrix).all(axis=1) if skip_missing else None)
    return sampler.sample()


@dataclass(frozen=True, eq=False)
class ColumnScale:
    """The mean and the standard deviation of each column, to put columns of different units on one scale.

    Without it, a column of incomes hides a column of ages, because its numbers are larger.

    >>> ages_and_incomes = np.array([[20.0, 30_000.0], [40.0, 50_000.0]])
    >>> ColumnScale.fit(ages_and_incomes).transform(ages_and_incomes)
    array([[-1., -1.],
           [ 1.,  1.]])
    """

    mean: Any
    deviation: Any

    @classmethod
    def fit(cls, *samples: Any) -> ColumnScale:
        """Fit one scale to all samples together. A constant column keeps its unit."""
        sums = PCASums()
        for rows in samples:
            sums.add(rows)
        if not sums.count:
            raise DriftError("found no rows to take the scale of columns from, expected at least one")
        deviation = (sums.scatter.diagonal() / sums.count) ** 0.5
        return cls(sums.mean, np.where(deviation == 0, 1, deviation))

    def transform(self, rows: Any) -> Any:
        """Return the rows with every column in standard deviations from its mean."""
        return (rows - self.mean) / self.deviation


def fit_components(reference: Any, current: Any, components: int) -> PCA:
    """Fit principal components to both samples together. With fewer rows than components, there are as many as rows.

    >>> rows = np.random.default_rng(0).normal(size=(200, 30))
    >>> fit_components(rows[:100], rows[100:], 5).components.shape
    (5, 30)
    """
    reference, current = as_rows(reference, "the reference", least=1), as_rows(current, "the current sample", least=1)
    same_width(reference, current)
    count, width = len(reference) + len(current), reference.shape[1]
    if min(count, width) > _WIDEST:
        raise DriftError(
            f"the rows have {width:,} numbers, too many to find principal components in reasonable time",
            fix=Fix(
                "pass components=0 to compare the rows as they are, or project fewer rows: rows=1000",
                command="add --components=0 to compare the rows as they are, or --rows=1000 to project fewer rows",
            ),
        )
    if count < width:  # PCASums would hold a matrix of width x width.
        return PCA.fit(np.concatenate([reference, current]), min(components, count))
    sums = PCASums()
    sums.add(reference)
    sums.add(current)
    return sums.pca(components)


@dataclass(frozen=True, eq=False)
class PreparedSamples:
    """Two samples that are ready for a test.

    ``reference`` and ``current`` are the rows to compare. ``given`` holds the same rows before they were scaled and
    projected, with their positions in the arrays or files that they come from. ``scale`` and ``pca`` say what was done
    to the rows; they are None if nothing was done.
    """

    reference: Any
    current: Any
    given: tuple[SampledRows, SampledRows]
    scale: ColumnScale | None
    pca: PCA | None

    def settings(self) -> dict[str, Any]:
        """Return how the rows were prepared, as plain values for a report, a history or JSON."""
        pca = self.pca
        return {
            "width": int(self.given[0].rows.shape[1]),
            "scaled": self.scale is not None,
            "components": None if pca is None else len(pca.components),
            "explained_variance": None if pca is None else round(float(pca.explained_variance_ratio.sum()), 4),
            "rows_read": [sample.read for sample in self.given],
            "rows_skipped": [sample.skipped for sample in self.given],
        }


def prepare_samples(
    reference: Any,
    current: Any,
    *,
    rows: int | None = None,
    skip_missing: bool = False,
    scale: bool = False,
    components: int | None = None,
    seed: int = 0,
    names: tuple[str, str] = ("the reference", "the current sample"),
) -> PreparedSamples:
    """Draw random rows, put columns on one scale, and project the rows of both samples, as ``lum drift`` does.

    Args:
      reference: a matrix with one row per example, or ``SampledRows`` that were drawn before.
      current: likewise.
      rows: compare only this many random rows of each sample.
      skip_missing: leave out rows with NaN or infinity. By default they are an error.
      scale: put columns on one scale, for columns that have different units (``ColumnScale``). ``lum drift`` does it
        for several columns of numbers, not for a column of vectors.
      components: compare this many principal components of both samples together; 0 compares rows as they are.
        By default, rows with more than 50 numbers are projected onto 50 components.
      seed: the seed of the random choice of rows.
      names: what errors call the two samples.

    >>> rows = np.random.default_rng(0).normal(size=(400, 384))
    >>> samples = prepare_samples(rows[:200], rows[200:], rows=150)
    >>> samples.reference.shape, samples.pca.components.shape
    ((150, 50), (50, 384))
    """
    if components is not None and (not is_whole(components) or components < 0):
        raise DriftError(f"found components={components!r}, expected a whole number, or 0 to compare rows as they are")
    given = (
        _sampled(reference, rows, 2 * seed, skip_missing, names[0]),
        _sampled(current, rows, 2 * seed + 1, skip_missing, names[1]),  # Another seed: rows are drawn independently.
    )
    reference, current = (as_rows(each.rows, name) for each, name in zip(given, names, strict=True))
    same_width(reference, current)
    column_scale = None
    if scale:
        column_scale = ColumnScale.fit(reference, current)
        reference, current = column_scale.transform(reference), column_scale.transform(current)
    wanted = _wanted_components(components, reference.shape[1])
    if not wanted:
        return PreparedSamples(_in_memory(reference), _in_memory(current), given, column_scale, None)
    pca = fit_components(reference, current, wanted)
    return PreparedSamples(pca.transform(reference), pca.transform(current), given, column_scale, pca)


def _sampled(rows: Any, most: int | None, seed: int, skip_missing: bool, name: str) -> SampledRows:
    if isinstance(rows, SampledRows):
        return rows
    matrix = as_rows(rows, name, finite=not skip_missing)
    if most is None and not skip_missing:
        return SampledRows(matrix, np.arange(len(matrix)), len(matrix))
    found = sample_rows(matrix, most, seed=seed, skip_missing=skip_missing)
    if len(found.rows) < 2:
        raise DriftError(f"{name} has {len(found.rows)} rows without missing values, expected at least 2")
    return found


def _wanted_components(components: int | None, width: int) -> int:
    if components is None:
        return _COMPONENTS if width > _COMPONENTS else 0
    if components > width:
        raise DriftError(
            f"found {components} components to compare, expected at most {width}: the rows have {width} numbers",
            fix=Fix("pass fewer components", command="lower --components"),
        )
    return components


def _pieces(rows: Any) -> Iterable[Any]:
    return [rows] if hasattr(rows, "ndim") or isinstance(rows, (list, tuple)) else rows


def _smallest_keys(held: list[tuple[Any, Any, Any]], most: int) -> tuple[Any, Any, Any]:
    rows, numbers, keys = _joined(held)
    if len(keys) <= most:
        return rows, numbers, keys
    chosen = np.sort(np.argpartition(keys, most)[:most])
    return rows[chosen], numbers[chosen], keys[chosen]


def _joined(held: list[tuple[Any, Any, Any]]) -> tuple[Any, Any, Any]:
    if len(held) == 1:
        return held[0]
    filled = [each for each in held if len(each[1])] or held[:1]  # An empty matrix may have any width.
    rows, numbers, keys = (np.concatenate(parts) for parts in zip(*filled, strict=True))
    return rows, numbers, keys


def _in_memory(rows: Any) -> Any:
    """Copy rows that are mapped from a file: if the file is overwritten meanwhile, the system kills the process."""
    return rows.copy() if _is_mapped(rows) else rows


def _is_mapped(rows: Any) -> bool:
    while isinstance(rows, np.ndarray):
        rows = rows.base
    return isinstance(rows, mmap)
