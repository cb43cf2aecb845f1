"""The maximum mean discrepancy (MMD) of two arrays, exact over all pairs of rows, and the test of it."""

from __future__ import annotations

import warnings
from collections.abc import Sequence
from concurrent.futures import ThreadPoolExecutor
from dataclasses import dataclass, replace
from functools import lru_cache
from typing import Any

import numpy as np

from luminosity.drift.distances import SAMPLE_ROWS
from luminosity.drift.kernels import Aggregate, BlockKernel, Kernel, as_kernels, one_kernel
from luminosity.drift.mmd.mmd_result import MMDTestResult
from luminosity.drift.mmd.permutations import Settings, conclude, estimates, observed_side
from luminosity.drift.result import Progress
from luminosity.drift.rows import (
    Precision,
    as_rows,
    check_precision,
    check_seed,
    double_precision,
    has_same_rows,
    same_width,
)
from luminosity.drift.sums.accelerated import accelerated_sums, can_accelerate, kept_on_device
from luminosity.drift.sums.bin_sums import bin_sums, bin_sums_of_lists
from luminosity.drift.sums.bins import BINS, BinCounts, balanced_bins, hash_ids, hashed_bins, most_rows, plan_bins
from luminosity.errors import DriftError, Fix

__all__ = ["Pair", "any_rows_apart", "centre_of", "kernel_offsets", "mmd2", "mmd_test"]

_OFFSET_ROWS = 256  # rows that a mean is estimated from: it need not be precise


@dataclass(frozen=True)
class Pair:
    """Two checked samples with resolved kernels. Rows are numbered across both samples, the reference's first."""

    reference: Any
    current: Any
    kernels: tuple[Kernel, ...]
    offsets: tuple[float, ...]
    centre: Any
    farthest: float  # the largest distance of a sampled row from the centre
    precision: Precision
    hashes: tuple[Any, Any] | None  # of the rows' ids, if there are ids

    @classmethod
    def of(
        cls,
        reference: Any,
        current: Any,
        kernels: Sequence[Kernel | Aggregate],
        seed: int,
        precision: Precision,
        ids: tuple[Any, Any] | None = None,
    ) -> Pair:
        """Check what a user passed, and choose everything that was left open from a sample of both sides."""
        if any(isinstance(kernel, BlockKernel) for kernel in kernels):
            return cls._of_lists(reference, current, kernels, seed, precision, ids)
        reference, current = _rows(reference, "the reference"), _rows(current, "the current sample")
        same_width(reference, current)
        hashes = None if ids is None else _hashes(ids, len(reference), len(current), seed)
        if hashes is None:
            rows = len(reference) + len(current)
            chosen = np.random.default_rng((seed, 3)).choice(rows, min(rows, SAMPLE_ROWS), replace=False)
        else:
            chosen = np.argsort(np.concatenate(hashes), kind="stable")[:SAMPLE_ROWS]
        sample = _numbered(reference, current, chosen).astype(np.float64)
        centre = centre_of(kernels, sample)
        apart = any_rows_apart(sample) if _all_equal(sample, reference, current) else sample - centre
        resolved = tuple(each for kernel in kernels for each in kernel.resolved_all(apart))
        offsets = kernel_offsets(resolved, sample - centre)
        farthest = float(np.linalg.norm(sample - centre, axis=1).max())
        return cls(reference, current, resolved, tuple(offsets), centre, farthest, precision, hashes)

    @classmethod
    def _of_lists(
        cls,
        reference: Any,
        current: Any,
        kernels: Sequence[Kernel | Aggregate],
        seed: int,
        precision: Precision,
        ids: tuple[Any, Any] | None,
    ) -> Pair:
        lists = [kernel for kernel in kernels if isinstance(kernel, BlockKernel)]
        if len(lists) < len(kernels):
            raise DriftError(
                "found a BlockKernel among other kernels, expected only BlockKernels: they compare objects, not rows"
            )
        for things, name in ((reference, "the reference"), (current, "the current sample")):
            if len(things) < 2:
                raise DriftError(f"{name} has {len(things)} examples, expected at least 2")
        hashes = None if ids is None else _hashes(ids, len(reference), len(current), seed)
        return cls(reference, current, tuple(lists), (0.0,) * len(lists), 0.0, 0.0, precision, hashes)

    def thinned(self, seed: int) -> Pair:
        """Return the pair with as many rows of the larger sample as bins allow, by smallest hash or at random."""
        samples = self.reference, self.current
        rows = len(samples[0]), len(samples[1])
        larger = int(rows[1] > rows[0])
        most = most_rows(min(rows))
        if max(rows) <= most:
            return self
        name = ("reference", "current sample")[larger]
        warnings.warn(
            f"The {name} has {rows[larger]:,} rows, the other sample {rows[1 - larger]:,}. Only {most:,} of them are "
            "compared: more would hardly improve the test, and would need bins larger than the other sample.",
            stacklevel=3,
        )
        if self.hashes is None:
            kept = np.random.default_rng((seed, 4)).permutation(rows[larger])[:most]
        else:
            kept = np.argsort(self.hashes[larger], kind="stable")[:most]
        reference, current = _with(samples, larger, _taken(samples[larger], kept))
        hashes = None if self.hashes is None else _with(self.hashes, larger, self.hashes[larger][kept])
        return replace(self, reference=reference, current=current, hashes=hashes)

    def bins(self, planned: BinCounts, seed: int) -> Any:
        """Return the bin of each row."""
        if self.hashes is None:
            with ThreadPoolExecutor(2) as threads:  # NumPy releases the GIL while it permutes rows
                first = threads.submit(balanced_bins, len(self.reference), planned.reference, seed, 0)
                current = balanced_bins(len(self.current), planned.current, seed, 1)
                reference = first.result()
        else:
            reference = hashed_bins(self.hashes[0], planned.reference)
            current = hashed_bins(self.hashes[1], planned.current)
        return np.concatenate([reference, current + planned.reference])

    def sums(self, bins: Any, planned: BinCounts, progress: Progress | None) -> Any:
        """Return, for each kernel, the matrix of its sums over pairs of bins."""
        if isinstance(self.kernels[0], BlockKernel):
            lists = [kernel for kernel in self.kernels if isinstance(kernel, BlockKernel)]
            return bin_sums_of_lists(lists, [*self.reference, *self.current], bins, planned.all, progress)

        if can_accelerate(self.kernels, self.reference.shape[1], self.farthest, self.precision):
            samples = self.reference, self.current
            return accelerated_sums(self.kernels, self.offsets, *samples, self.centre, bins, planned.all)

        def rows(numbers: Any) -> Any:
            with np.errstate(over="ignore"):
                found = (_numbered(self.reference, self.current, numbers) - self.centre).astype(self.precision)
            if not np.isfinite(found).all():
                raise DriftError(
                    "some numbers are too large for single precision",
                    fix=Fix("scale them, or pass precision='float64'", command="scale them"),
                )
            return found

        return bin_sums(self.kernels, self.offsets, rows, bins, planned.all, progress)


def centre_of(kernels: Sequence[Kernel | Aggregate], sample: Any) -> Any:
    """Return what to subtract from all rows: the median of a sample of both; zero unless kernels are shift-invariant.

    The mean would not do: a single number that is far too large would move it, and all others would lose their digits.
    """
    if all(kernel.shift_invariant for kernel in kernels):
        return np.median(np.asarray(sample, dtype=np.float64), axis=0)
    return np.zeros(np.shape(sample)[1])


def any_rows_apart(sample: Any) -> Any:
    """Return two different rows to choose a bandwidth from if all rows are equal: any bandwidth then gives no drift."""
    return np.eye(2, sample.shape[1])


def _rows(values: Any, name: str) -> Any:
    return values if kept_on_device(values) else as_rows(values, name)


def _all_equal(sample: Any, reference: Any, current: Any) -> bool:
    """Return whether all rows of both samples are equal."""
    return all(bool((rows == sample[0]).all()) for rows in (sample, reference, current))


def _taken(things: Any, numbers: Any) -> Any:
    return [things[number] for number in numbers] if isinstance(things, Sequence) else things[numbers]


def _with(both: tuple[Any, Any], index: int, new: Any) -> tuple[Any, Any]:
    return (both[0], new) if index else (new, both[1])


def _numbered(reference: Any, current: Any, numbers: Any) -> Any:
    of_reference = numbers < len(reference)
    dtype = np.result_type(reference.dtype, current.dtype)
    found = np.empty((len(numbers), reference.shape[1]), dtype=dtype)
    found[of_reference] = _taken_rows(reference, numbers[of_reference])
    found[~of_reference] = _taken_rows(current, numbers[~of_reference] - len(reference))
    return found


def _taken_rows(rows: Any, numbers: Any) -> Any:
    if isinstance(rows, np.ndarray):
        return rows[numbers]
    filled = np.pad(numbers, (0, SAMPLE_ROWS - len(numbers) % SAMPLE_ROWS))  # One length: compiled once.
    return np.asarray(rows[filled])[: len(numbers)]


def _hashes(ids: tuple[Any, Any], reference_rows: int, current_rows: int, seed: int) -> tuple[Any, Any]:
    """Return hashes of the ids. The samples have different seeds: an id in both must not mean the same bin in both."""
    found = hash_ids(ids[0], 2 * seed), hash_ids(ids[1], 2 * seed + 1)
    if (len(found[0]), len(found[1])) != (reference_rows, current_rows):
        raise DriftError(
            f"found {len(found[0]):,} and {len(found[1]):,} ids for {reference_rows:,} and {current_rows:,} rows, "
            "expected one id per row"
        )
    return found


def kernel_offsets(kernels: Sequence[Kernel], sample: Any) -> list[float]:
    """Return a number near the mean of each kernel, to subtract from its values before they are summed.

    The means come from the first rows of the sample. They are rounded, so that results do not depend on the last digits
    of a machine's arithmetic.
    """
    with np.errstate(over="ignore", invalid="ignore"):
        rows = np.asarray(sample, dtype=np.float32)[:_OFFSET_ROWS]
        different = ~np.eye(len(rows), dtype=bool)
        widths = np.array([(0, _OFFSET_ROWS - len(rows)), (0, 0)])
        filled = np.pad(rows, widths, mode="edge")  # One size: compiled once.
        here = np.ix_(*[range(len(rows))] * 2)
        return [_rounded(_values(kernel, filled)[here][different].mean(dtype=np.float64)) for kernel in kernels]


def _rounded(mean: Any) -> float:
    """Round the mean; return zero if single precision is too small for the kernel. Any number gives a right result."""
    return float(f"{mean:.2g}") if np.isfinite(mean) else 0.0


def _values(kernel: Kernel, rows: Any) -> Any:
    with double_precision(rows.dtype):
        return np.asarray(_compiled(kernel.form())(kernel.parameters(), rows, rows))


@lru_cache(maxsize=64)
def _compiled(form: Kernel) -> Any:
    import jax

    return jax.jit(form.values)


def mmd2(
    reference: Any,
    current: Any,
    kernel: Kernel | None = None,
    *,
    seed: int = 0,
    ids: tuple[Any, Any] | None = None,
    precision: Precision = "float32",
    progress: Progress | None = None,
) -> float:
    """Return the unbiased estimate of MMD², exact over all pairs of rows.

    It is around zero, and negative half of the time, if both samples come from the same distribution. If the kernel has
    no bandwidth, ``seed`` decides which rows it is chosen from; with ``ids`` of the rows, their hashes decide, as in a
    pipeline. ``progress`` is called with the number of tiles done and of all tiles.

    >>> import numpy as np
    >>> x = np.random.default_rng(0).normal(size=(500, 3))
    >>> round(mmd2(x[:250], x[250:] + 1), 1)
    0.2
    """
    check_precision(precision)
    check_seed(seed)
    pair = Pair.of(reference, current, one_kernel(kernel), seed, precision, ids)
    bins = BinCounts(1, 1)
    counts = np.array([len(pair.reference), len(pair.current)])
    sums = pair.sums(np.repeat([0, 1], counts), bins, progress)
    return float(estimates(sums[0], counts.astype(np.float64), observed_side(bins)[None, :])[0])


def mmd_test(
    reference: Any,
    current: Any,
    kernel: Kernel | Aggregate | Sequence[Kernel | Aggregate] | None = None,
    *,
    permutations: int = 1000,
    level: float = 0.05,
    seed: int = 0,
    bins: int = BINS,
    ids: tuple[Any, Any] | None = None,
    precision: Precision = "float32",
    progress: Progress | None = None,
) -> MMDTestResult:
    """Test whether the two samples come from the same distribution.

    Rows are put into random bins, and the bins are permuted: one pass over the pairs of rows is enough for any number
    of permutations.

    Args:
      reference: a matrix with one row per example, or whatever NumPy takes as one.
      current: likewise; rows have as many numbers as the reference's.
      kernel: one kernel, or several, or an ``Aggregate`` of many bandwidths; all make one test that keeps its level.
        The default is ``RBF`` with the median distance.
      permutations: how many random permutations of the bins the statistic is compared with. With so few rows that
        there are no more permutations than this, each is tried once, and the p-value is exact.
      level: the false-alarm rate: how often drift is reported when there is none.
      seed: the seed of bins, permutations and of the rows that a bandwidth is chosen from.
      bins: the number of bins of both samples together.
      ids: the ids of the rows of both samples. Bins then come from hashes of the ids, as in a pipeline, and the order
        of rows does not matter.
      precision: the precision of the kernel's values; sums are always double.
      progress: called with the number of tiles done and of all tiles.

    If one sample has more than 1,023 times the rows of the other, random rows are left out, with a warning.

    >>> import numpy as np
    >>> x = np.random.default_rng(0).normal(size=(500, 3))
    >>> mmd_test(x[:250], x[250:]).drift, mmd_test(x[:250], x[250:] + 1).drift
    (False, True)
    """
    settings = Settings(permutations, level, seed, precision)
    pair = Pair.of(reference, current, as_kernels(kernel), seed, precision, ids).thinned(seed)
    planned = plan_bins(len(pair.reference), len(pair.current), bins)
    of_rows = pair.bins(planned, seed)
    counts = np.bincount(of_rows, minlength=planned.all)
    found = conclude(pair.sums(of_rows, planned, progress), counts, planned, pair.kernels, settings)
    return replace(found, same_rows=has_same_rows(pair.reference, pair.current))
