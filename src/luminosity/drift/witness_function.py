"""Which rows make the difference: the witness function, that MMD² is the mean of.

For a row it is how alike it is, on average, to rows of the current sample, less how alike to rows of the reference.
High means typical of the current sample and not of the reference: something new. Low means something gone.
"""

from __future__ import annotations

from functools import lru_cache
from typing import Any

import numpy as np

from luminosity.drift.aggregate import one_kernel
from luminosity.drift.kernels import BlockKernel, Kernel
from luminosity.drift.pair import Pair
from luminosity.drift.rows import Precision, check_precision, double_precision
from luminosity.drift.sums.bin_sums import Progress
from luminosity.errors import DriftError

__all__ = ["witness"]

_TILE = 1024
_SMALLEST_TILE = 64
_FILLER = -1  # the number of rows that fill up the last tile


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
    """The scores of the reference's rows and of the current ones; no row is compared with itself.

    ``against`` bounds the work where samples are large: each row is compared with so many random rows of either sample.

    >>> import numpy as np
    >>> x = np.random.default_rng(0).normal(size=(100, 3))
    >>> y = np.concatenate([x[:50], x[50:] + [9, 0, 0]])
    >>> gone, new = witness(x, y)
    >>> bool(new.argmax() >= 50), new.shape
    (True, (100,))
    """
    check_precision(precision)
    if against is not None and against < 2:
        raise DriftError(f"Found against={against}, expected at least 2 rows to compare with, or None for all.")
    pair = Pair.of(reference, current, one_kernel(kernel), seed, precision)
    return _Scores(pair, against, seed, progress).of_both()


class _Scores:
    """Rows are numbered through, so that each is left out where it meets itself."""

    def __init__(self, pair: Pair, against: int | None, seed: int, progress: Progress | None) -> None:
        self._pair = pair
        self._of_lists = isinstance(pair.kernels[0], BlockKernel)
        self._samples = (pair.reference, pair.current)
        self._firsts = (0, len(pair.reference))
        self._tile = _tile_rows(max(map(len, self._samples)))
        chosen = [_chosen(len(sample), against, seed, side) for side, sample in enumerate(self._samples)]
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
        """The kernel with the rows of that sample, on average."""
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
        """Rows and their numbers, in pieces of one size, so that the code for them is compiled once."""
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


def _chosen(rows: int, against: int | None, seed: int, side: int) -> Any:
    if against is None or against >= rows:
        return np.arange(rows)
    return np.sort(np.random.default_rng((seed, 4, side)).choice(rows, against, replace=False))


def _tile_rows(rows: int) -> int:
    return min(_TILE, max(_SMALLEST_TILE, 1 << (rows - 1).bit_length()))
