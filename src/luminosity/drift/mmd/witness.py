"""Finds the rows that make the difference, with the witness function of MMD².

The witness of a row is its mean kernel with the rows of the current sample, less its mean kernel with the rows of the
reference. A high score marks a row that is typical of the current sample and not of the reference: something new. A low
score marks something that is gone. (The module is not called ``witness``: importing it would hide the function of that
name in ``luminosity.drift``.)
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, field
from functools import lru_cache
from typing import Any

import numpy as np

from luminosity.drift.kernels import RBF, BlockKernel, Kernel, Laplacian, Linear, Polynomial, one_kernel
from luminosity.drift.mmd.exact import Pair
from luminosity.drift.mmd.mmd_result import MMDTestResult
from luminosity.drift.result import Progress
from luminosity.drift.rows import Precision, check_precision, double_precision
from luminosity.errors import DriftError

__all__ = ["Extremes", "find_extremes", "strongest_kernel", "witness"]

_TILE = 1024  # rows: a tile of single precision takes 4 MB
_SMALLEST_TILE = 64  # rows
_FILLER = -1  # the number of rows that fill up the last tile
_SCORED = 20_000  # rows of each sample that get a score: their report is ready in seconds
_AGAINST = 5_000  # rows of each sample that the scored rows are compared with
_CANDIDATES = 30  # rows of each sample that are returned; a report shows those with equal contents once
_SAME = 1e-4  # numbers that differ by less, in standard deviations of all numbers, are rounded to the same


def witness(
    reference: Any,
    current: Any,
    kernel: Kernel | None = None,
    *,
    against: int | None = None,
    seed: int = 0,
    precision: Precision = "float32",
    progress: Progress | None = None,
) -> tuple[Any, Any]:
    """Return the scores of the reference's rows and of the current rows. No row is compared with itself.

    ``against`` bounds the work for large samples: each row is compared with that many random rows of either sample.

    >>> import numpy as np
    >>> x = np.random.default_rng(0).normal(size=(100, 3))
    >>> y = np.concatenate([x[:50], x[50:] + [9, 0, 0]])
    >>> gone, new = witness(x, y)
    >>> bool(new.argmax() >= 50), new.shape
    (True, (100,))
    """
    check_precision(precision)
    if against is not None and against < 2:
        raise DriftError(f"found against={against}, expected at least 2 rows to compare with, or None for all rows")
    pair = Pair.of(reference, current, one_kernel(kernel), seed, precision)
    return _Scores(pair, against, seed, progress).of_both()


@dataclass(frozen=True)
class Extremes:
    """The rows that differ most, as pairs of a row number and its score.

    ``gone`` are rows of the reference, most typical first; ``new`` are rows of the current sample. Of rows with equal
    numbers, only the first is there; ``gone_counts`` and ``new_counts`` say how many there are of each among the scored
    rows. ``scored`` and ``against`` are the numbers of rows of each sample that got a score, and that they were
    compared with.
    """

    gone: list[tuple[int, float]]
    new: list[tuple[int, float]]
    scored: tuple[int, int]
    against: tuple[int, int]
    kernel: str
    gone_counts: list[int] = field(default_factory=list[int])
    new_counts: list[int] = field(default_factory=list[int])


def find_extremes(
    reference: Any, current: Any, kernel: Kernel, seed: int = 0, progress: Progress | None = None
) -> Extremes:
    """Score at most 20,000 random rows of each sample by the witness function.

    Returns the 30 most extreme rows of each sample. Rows with equal numbers count as one.

    >>> x = np.random.default_rng(0).normal(size=(100, 3))
    >>> find_extremes(x, np.concatenate([x, [[9, 0, 0], [9, 0, 0]]]), RBF()).new[0][0] >= 100
    True
    """
    random = np.random.default_rng((seed, 7))
    chosen = [_scored_rows(len(rows), random) for rows in (reference, current)]
    samples = reference[chosen[0]], current[chosen[1]]
    of_reference, of_current = witness(*samples, kernel, against=_AGAINST, seed=seed, progress=progress)
    lowest, gone_counts = _first_distinct(samples[0], np.argsort(of_reference))
    highest, new_counts = _first_distinct(samples[1], np.argsort(-of_current))
    return Extremes(
        gone=[(int(chosen[0][at]), float(of_reference[at])) for at in lowest],
        new=[(int(chosen[1][at]), float(of_current[at])) for at in highest],
        scored=(len(samples[0]), len(samples[1])),
        against=(min(_AGAINST, len(samples[0])), min(_AGAINST, len(samples[1]))),
        kernel=kernel.name,
        gone_counts=gone_counts,
        new_counts=new_counts,
    )


def _first_distinct(rows: Any, order: Any) -> tuple[Any, list[int]]:
    """Return the first places in ``order`` whose rows differ, and how many rows are equal to each.

    Rows are equal up to rounding: projections of equal rows may differ in their last digits.
    """
    rounded = np.round(rows / (float(np.std(rows)) * _SAME or 1.0))
    _, kinds, counts = np.unique(rounded, axis=0, return_inverse=True, return_counts=True)
    kinds = kinds.reshape(-1)
    first = np.unique(kinds[order], return_index=True)[1]
    chosen = order[np.sort(first)[:_CANDIDATES]]
    return chosen, [int(counts[kinds[at]]) for at in chosen]


def strongest_kernel(result: MMDTestResult, given: Sequence[Kernel] = ()) -> Kernel:
    """Return the kernel with the smallest p-value, which the result's ``mmd2`` belongs to.

    A result holds the names of kernels. Kernels of your own are found by name in ``given``.
    """
    found = min(result.kernels, key=lambda each: (each.p_value, -each.mmd2 / (each.null_sd or 1)))
    for kernel in given:
        if kernel.name == found.kernel:
            return kernel
    kind, _, inside = found.kernel.partition("(")
    if kind == "RBF":
        return RBF(found.bandwidth)
    if kind == "Laplacian":
        return Laplacian(found.bandwidth)
    if kind == "Linear":
        return Linear()
    if kind == "Polynomial":
        return Polynomial(int(inside.rstrip(")")))
    raise DriftError(
        f"the result was made with a kernel of your own, {found.kernel}, and has only its name",
        fix="pass the kernel to the report, too",
    )


class _Scores:
    """Scores rows tile by tile. Rows are numbered across both samples, so that a row never meets itself."""

    def __init__(self, pair: Pair, against: int | None, seed: int, progress: Progress | None) -> None:
        self._pair = pair
        self._of_lists = isinstance(pair.kernels[0], BlockKernel)
        self._samples = (pair.reference, pair.current)
        self._firsts = (0, len(pair.reference))
        self._tile = _tile_rows(max(map(len, self._samples)))
        chosen = [_compared_rows(len(sample), against, seed, side) for side, sample in enumerate(self._samples)]
        self._compared = [self._tiles(side, numbers) for side, numbers in enumerate(chosen)]
        self._chosen = [numbers + first for numbers, first in zip(chosen, self._firsts, strict=True)]
        self._progress = progress
        self._done = 0
        self._all = sum(-(-len(sample) // self._tile) for sample in self._samples) * sum(map(len, self._compared))

    def of_both(self) -> tuple[Any, Any]:
        return self._of(0), self._of(1)

    def _of(self, side: int) -> Any:
        found = np.empty(len(self._samples[side]))
        for start in range(0, len(found), self._tile):
            inside = np.arange(start, min(start + self._tile, len(found)))
            ((rows, numbers),) = self._tiles(side, inside)
            of_reference, of_current = (self._mean(rows, numbers, other) for other in (0, 1))
            found[inside] = (of_current - of_reference)[: len(inside)]
        return found

    def _mean(self, rows: Any, numbers: Any, side: int) -> Any:
        """Return the mean kernel of each row with the rows of one sample."""
        total = np.zeros(len(numbers))
        for others, other_numbers in self._compared[side]:
            total += self._row_sums(rows, numbers, others, other_numbers)
            self._done += 1
            if self._progress is not None:
                self._progress(self._done, self._all)
        return total / (len(self._chosen[side]) - np.isin(numbers, self._chosen[side]))

    def _row_sums(self, rows: Any, numbers: Any, others: Any, other_numbers: Any) -> Any:
        (kernel,), (offset,) = self._pair.kernels, self._pair.offsets
        if self._of_lists:
            return np.where(numbers[:, None] == other_numbers, 0, kernel.values((), rows, others)).sum(axis=1)
        with double_precision(rows.dtype):
            parameters = tuple(rows.dtype.type(number) for number in kernel.parameters())
            return np.asarray(
                _compiled(kernel.form())(parameters, rows.dtype.type(offset), rows, numbers, others, other_numbers),
                dtype=np.float64,
            )

    def _tiles(self, side: int, chosen: Any) -> list[tuple[Any, Any]]:
        """Return rows and their numbers in pieces of one size, so that their code is compiled once."""
        found: list[tuple[Any, Any]] = []
        for start in range(0, len(chosen), self._tile):
            here = chosen[start : start + self._tile]
            if self._of_lists:
                found.append(([self._samples[side][at] for at in here], here + self._firsts[side]))
                continue
            missing = self._tile - len(here)
            rows = self._samples[side][np.pad(here, (0, missing), mode="edge")] - self._pair.centre
            numbers = np.pad(here + self._firsts[side], (0, missing), constant_values=_FILLER)
            found.append((rows.astype(self._pair.precision), numbers.astype(np.int32)))
        return found


@lru_cache(maxsize=64)
def _compiled(form: Kernel) -> Any:
    import jax
    import jax.numpy as jnp

    def row_sums(parameters: Any, offset: Any, x: Any, x_numbers: Any, y: Any, y_numbers: Any) -> Any:
        counts = (x_numbers[:, None] != y_numbers[None, :]) & (y_numbers[None, :] != _FILLER)
        return jnp.where(counts, form.values(parameters, x, y) - offset, 0).sum(axis=1)

    return jax.jit(row_sums)


def _scored_rows(rows: int, random: Any) -> Any:
    return np.arange(rows) if rows <= _SCORED else np.sort(random.choice(rows, _SCORED, replace=False))


def _compared_rows(rows: int, against: int | None, seed: int, side: int) -> Any:
    if against is None or against >= rows:
        return np.arange(rows)
    return np.sort(np.random.default_rng((seed, 4, side)).choice(rows, against, replace=False))


def _tile_rows(rows: int) -> int:
    return min(_TILE, max(_SMALLEST_TILE, 1 << (rows - 1).bit_length()))
