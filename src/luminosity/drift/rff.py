"""The test in one pass over the rows, for samples whose pairs are too many: random Fourier features."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np

from luminosity.drift.kernels import RBF, Kernel, Laplacian
from luminosity.drift.pair import Pair
from luminosity.drift.permutation.conclude import Settings, conclude
from luminosity.drift.result import MMDTestResult
from luminosity.drift.rows import Precision, Rows, as_rows, check_precision, check_seed, double_precision, is_whole
from luminosity.drift.sums.bins import BINS, BinCounts, hash_ids, hashed_bins, most_rows, plan_bins
from luminosity.errors import DriftError

__all__ = ["FEATURES", "RFFSums", "check_kernel", "rff_mmd"]


FEATURES = 2048
_BLOCK = 1024  # rows whose features are held at a time: 8 MB
_SMALLEST_BLOCK = 64

Side: TypeAlias = Literal["reference", "current"]


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


@dataclass(eq=False)
class RFFSums:
    """Sums of features over each bin. Shards that are to be merged are told the same; rows know their bin by their id.

    ``kernel`` has its bandwidth already, from a sample of both sides. ``centre``, near the mean of all rows, changes
    nothing but rounding.

    >>> x = np.random.default_rng(0).normal(size=(500, 3))
    >>> first, second = (RFFSums.plan(RBF(2.0), 250, 250) for _ in range(2))
    >>> first.add(x[:250], "reference", ids=range(250))
    >>> second.add(x[250:] + 1, "current", ids=range(250))
    >>> first.merge(second)
    >>> first.result().drift
    True
    """

    kernel: Kernel
    bins: BinCounts
    features: int = FEATURES
    seed: int = 0
    centre: Any = 0.0
    precision: Precision = "float32"
    counts: Any = field(default=None, repr=False)  # rows of each bin
    totals: Any = field(default=None, repr=False)  # features of each bin
    width: int | None = None  # of the rows, once some were seen

    @classmethod
    def plan(
        cls,
        kernel: RBF | Laplacian,
        reference_rows: int,
        current_rows: int,
        *,
        features: int = FEATURES,
        bins: int = BINS,
        seed: int = 0,
        centre: Any = 0.0,
        precision: Precision = "float32",
    ) -> RFFSums:
        """For samples of about so many rows: only their ratio matters, unless they are very few."""
        smaller, larger = sorted((reference_rows, current_rows))
        if smaller < 2 or larger > most_rows(smaller):
            raise DriftError(
                f"Found {reference_rows:,} rows of the reference and {current_rows:,} of the current sample, expected "
                f"at least 2 of each, and no more of one than {most_rows(1):,} times those of the other."
            )
        return cls(kernel, plan_bins(reference_rows, current_rows, bins), features, seed, centre, precision)

    def __post_init__(self) -> None:
        check_precision(self.precision)
        if check_kernel(self.kernel).scale is None:
            raise DriftError(
                f"Found {self.kernel.name} without a bandwidth, expected one that all shards share: for example "
                "RBF().resolved(sample), with a sample of both sides."
            )
        check_seed(self.seed)
        if not is_whole(self.features) or self.features < 2 or self.features % 2:
            raise DriftError(f"Found features={self.features}, expected an even number: cosines and sines in pairs.")
        if self.counts is None:
            self.counts = np.zeros(self.bins.all, dtype=np.int64)
            self.totals = np.zeros((self.bins.all, self.features))

    def add(self, rows: Any, side: Side, ids: Any) -> None:
        """Rows of one side; their ids say which bins they belong to, whoever adds them."""
        if side not in ("reference", "current"):
            raise DriftError(f"Found side={side!r}, expected 'reference' or 'current'.")
        hashes = hash_ids(ids, 2 * self.seed + (side == "current"))
        if side == "reference":
            self.add_to_bins(rows, hashed_bins(hashes, self.bins.reference))
        else:
            self.add_to_bins(rows, hashed_bins(hashes, self.bins.current) + self.bins.reference)

    def add_to_bins(self, rows: Any, bins: Any) -> None:
        """The same for bins of your own: the reference's come first."""
        if len(rows) == 0:
            return
        rows = as_rows(rows, "The sample", least=1)
        if len(bins) != len(rows):
            raise DriftError(f"Found ids or bins of {len(bins):,} rows, but {len(rows):,} rows.")
        self._check_width(rows.shape[1])
        self.counts += np.bincount(bins, minlength=self.bins.all)
        with double_precision(self.precision):
            frequencies = _frequencies(self.kernel, rows.shape[1], self.features // 2, self.seed, self.precision)
            for block, of_block in _blocks(rows, np.asarray(bins), self.bins.all):
                self.totals += np.asarray(_compiled()(self.bins.all, frequencies, self._ready(block), of_block))

    def _ready(self, block: Rows) -> Rows:
        with np.errstate(over="ignore"):
            ready = (block - self.centre).astype(self.precision)
        if not np.isfinite(ready).all():
            raise DriftError("Some numbers are too large for single precision. Scale them, or try precision='float64'.")
        return ready

    def merge(self, other: RFFSums) -> None:
        mine, theirs = self._told(), other._told()
        if mine != theirs:
            raise DriftError(f"These sums are of different tests: {mine} and {theirs}. Expected the same for all.")
        if other.width is not None:
            self._check_width(other.width)
        self.counts += other.counts
        self.totals += other.totals

    def result(self, permutations: int = 1000, level: float = 0.05) -> MMDTestResult:
        settings = Settings(permutations, level, self.seed, self.precision)
        sides = self.counts[: self.bins.reference].sum(), self.counts[self.bins.reference :].sum()
        if min(sides) < 2:
            raise DriftError(
                f"Found {sides[0]:,} rows of the reference and {sides[1]:,} of the current sample, "
                "expected at least 2 of each: the estimate takes pairs of rows."
            )
        # A row's features have length 1 (cos² + sin²), which is its kernel with itself: that is left out.
        sums = self.totals @ self.totals.T / (self.features // 2) - np.diag(self.counts)
        return conclude(sums[None], self.counts, self.bins, [self.kernel], settings)

    def _check_width(self, width: int) -> None:
        if self.width not in (None, width):
            raise DriftError(f"Found rows of {width} numbers, expected {self.width} as before.")
        self.width = width

    def _told(self) -> tuple[Any, ...]:
        centre = tuple(np.atleast_1d(self.centre).tolist())
        return self.kernel, self.bins, self.features, self.seed, self.precision, centre


def check_kernel(kernel: Kernel) -> Kernel:
    if not isinstance(kernel, (RBF, Laplacian)):
        raise DriftError(
            f"Found the kernel {kernel!r}, expected RBF or Laplacian: random features are known for these. "
            "mmd_test takes any."
        )
    return kernel


@lru_cache(maxsize=8)
def _frequencies(kernel: Kernel, width: int, count: int, seed: int, precision: Precision) -> Any:
    """Drawn from the kernel's spectrum: from the seed alone, so that all shards have the same."""
    import jax

    random = np.random.default_rng((seed, 4))
    draw = random.standard_normal if isinstance(kernel, RBF) else random.standard_cauchy
    assert kernel.scale is not None
    return jax.device_put((draw((width, count)) / kernel.scale).astype(precision))


@cache
def _compiled() -> Any:
    import jax
    import jax.numpy as jnp

    def sums(bins: int, frequencies: Any, rows: Any, of_rows: Any) -> Any:
        angles = jnp.matmul(rows, frequencies, precision="highest")
        features = jnp.concatenate([jnp.cos(angles), jnp.sin(angles)], axis=1)
        return jax.ops.segment_sum(features, of_rows, bins + 1)[:bins]

    return jax.jit(sums, static_argnums=0)


def _blocks(rows: Rows, bins: Any, filler: int) -> Iterator[tuple[Rows, Any]]:
    """Rows and their bins, of sizes that are powers of two, so that samples of many sizes share compiled code."""
    size = min(_BLOCK, max(_SMALLEST_BLOCK, 1 << (len(rows) - 1).bit_length()))
    for start in range(0, len(rows), size):
        block, of_block = rows[start : start + size], bins[start : start + size]
        missing = size - len(block)
        yield np.pad(block, ((0, missing), (0, 0))), np.pad(of_block, (0, missing), constant_values=filler)
