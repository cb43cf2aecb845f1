"""The test in one pass over the rows, for samples whose pairs are too many: random Fourier features."""

from __future__ import annotations

from typing import Any

from luminosity.drift.bins import BINS, plan_bins
from luminosity.drift.conclude import Settings
from luminosity.drift.kernels import RBF, Laplacian
from luminosity.drift.pair import Pair
from luminosity.drift.result import MMDTestResult
from luminosity.drift.rff_sums import FEATURES, RFFSums, check_kernel
from luminosity.drift.rows import Precision

__all__ = ["rff_mmd"]


def rff_mmd(
    reference: Any,
    current: Any,
    kernel: RBF | Laplacian | None = None,
    *,
    features: int = FEATURES,
    permutations: int = 1000,
    level: float = 0.05,
    seed: int = 0,
    bins: int = BINS,
    ids: tuple[Any, Any] | None = None,
    precision: Precision = "float32",
) -> MMDTestResult:
    """``mmd_test`` with an approximate kernel: time grows with the rows, not with their pairs.

    The level is exact as well, whatever the number of features; few of them cost power. Bandwidth, bins and
    permutations are those of ``mmd_test`` with the same arguments.

    >>> import numpy as np
    >>> x = np.random.default_rng(0).normal(size=(500, 3))
    >>> rff_mmd(x[:250], x[250:]).drift, rff_mmd(x[:250], x[250:] + 1).drift
    (False, True)
    """
    settings = Settings(permutations, level, seed, precision)
    pair = Pair.of(reference, current, [check_kernel(kernel or RBF())], seed, precision, ids).thinned(seed)
    planned = plan_bins(len(pair.reference), len(pair.current), bins)
    sums = RFFSums(pair.kernels[0], planned, features, seed, pair.centre, precision)
    of_rows = pair.bins(planned, seed)
    sums.add_to_bins(pair.reference, of_rows[: len(pair.reference)])
    sums.add_to_bins(pair.current, of_rows[len(pair.reference) :])
    return sums.result(settings.permutations, settings.level)
