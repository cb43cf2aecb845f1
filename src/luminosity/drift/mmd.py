"""The maximum mean discrepancy of two samples, and the test whether it is more than chance."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

from luminosity.drift.aggregate import Aggregate, as_kernels, one_kernel
from luminosity.drift.kernels import Kernel
from luminosity.drift.pair import Pair
from luminosity.drift.permutation.conclude import Settings, conclude
from luminosity.drift.permutation.permute import estimates, observed_side
from luminosity.drift.result import MMDTestResult
from luminosity.drift.rows import Precision, check_precision, check_seed
from luminosity.drift.sums.bin_sums import Progress
from luminosity.drift.sums.bins import BINS, BinCounts, plan_bins

__all__ = ["mmd2", "mmd_test"]


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
    """The unbiased estimate, exact over all pairs of rows. Around zero for one distribution, it can be negative.

    Where the bandwidth is left open, ``seed``, or ``ids`` of the rows as in a pipeline, tell which rows it is from.

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
    """Whether the two samples come from one distribution.

    Rows are put into random bins, and bins are permuted: one pass over the pairs of rows, however many permutations.
    Several kernels, or an ``Aggregate`` of many bandwidths, make one test that keeps its level.
    With ``ids`` of the rows, bins come from their hashes, as in a pipeline: the order of rows then changes nothing.
    Where one sample has more than 1,023 times the rows of the other, the rest is left out, with a warning.

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
    return conclude(pair.sums(of_rows, planned, progress), counts, planned, pair.kernels, settings)
