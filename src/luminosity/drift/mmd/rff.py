"""The test in one pass over the rows, with random Fourier features, for samples with too many pairs of rows.

A kernel of differences is a mean of cosines, ``k(x, y) = E cos(w · (x - y))``. It is nearly a product of short vectors
of cosines and sines (Rahimi and Recht 2007). Sums of these vectors are all the test needs: their size is fixed, and
they merge by addition.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass, field
from functools import cache, lru_cache
from typing import Any, Literal, TypeAlias

import numpy as np

from luminosity.drift.kernels import RBF, Kernel, Laplacian
from luminosity.drift.mmd.exact import Pair
from luminosity.drift.mmd.mmd_result import MMDTestResult
from luminosity.drift.mmd.permutations import Settings, conclude
from luminosity.drift.rows import Precision, Rows, as_rows, check_precision, check_seed, double_precision, is_whole
from luminosity.drift.sums.bins import BINS, BinCounts, hash_ids, hashed_bins, most_rows, plan_bins
from luminosity.errors import DriftError

__all__ = ["RFFSums", "rff_mmd"]

_FEATURES = 2048  # they keep at least 95% of the exact test's power
_STRIP_ROWS = 1024  # rows whose features are held at a time: 8 MB
_SMALLEST_STRIP_ROWS = 64

Side: TypeAlias = Literal["reference", "current"]


def rff_mmd(
    reference: Any,
    current: Any,
    kernel: RBF | Laplacian | None = None,
    *,
    features: int = _FEATURES,
    permutations: int = 1000,
    level: float = 0.05,
    seed: int = 0,
    bins: int = BINS,
    ids: tuple[Any, Any] | None = None,
    precision: Precision = "float32",
) -> MMDTestResult:
    """Test as ``mmd_test`` does, with an approximate kernel: time grows with the rows, not with their pairs.

    The false-alarm rate is exact, whatever the number of ``features``; with few features the test detects less.
    Bandwidth, bins and permutations are those of ``mmd_test`` with the same arguments.

    >>> import numpy as np
    >>> x = np.random.default_rng(0).normal(size=(500, 3))
    >>> rff_mmd(x[:250], x[250:]).drift, rff_mmd(x[:250], x[250:] + 1).drift
    (False, True)
    """
    settings = Settings(permutations, level, seed, precision)
    pair = Pair.of(reference, current, [_check_kernel(kernel or RBF())], seed, precision, ids).thinned(seed)
    planned = plan_bins(len(pair.reference), len(pair.current), bins)
    sums = RFFSums(pair.kernels[0], planned, features, seed, pair.centre, precision)
    of_rows = pair.bins(planned, seed)
    sums.add_to_bins(pair.reference, of_rows[: len(pair.reference)])
    sums.add_to_bins(pair.current, of_rows[len(pair.reference) :])
    return sums.result(settings.permutations, settings.level)


@dataclass(eq=False)
class RFFSums:
    """Sums of random Fourier features over each bin, which merge by addition.

    Create the sums of all shards with the same arguments. A row's id decides its bin, so that any shard may add it.
    ``kernel`` has its bandwidth, chosen from a sample of both sides. ``centre`` is near the mean of all rows; it
    changes nothing but rounding.

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
    features: int = _FEATURES
    seed: int = 0
    centre: Any = 0.0
    precision: Precision = "float32"
    counts: Any = field(default=None, repr=False)  # rows of each bin
    totals: Any = field(default=None, repr=False)  # features of each bin
    width: int | None = None  # numbers per row, once rows were added

    @classmethod
    def plan(
        cls,
        kernel: RBF | Laplacian,
        reference_rows: int,
        current_rows: int,
        *,
        features: int = _FEATURES,
        bins: int = BINS,
        seed: int = 0,
        centre: Any = 0.0,
        precision: Precision = "float32",
    ) -> RFFSums:
        """Return empty sums for samples of about these sizes. Only their ratio matters, unless there are few rows."""
        smaller, larger = sorted((reference_rows, current_rows))
        if smaller < 2 or larger > most_rows(smaller):
            raise DriftError(
                f"found {reference_rows:,} rows of the reference and {current_rows:,} of the current sample, expected "
                f"at least 2 of each, and no more of one than {most_rows(1):,} times those of the other"
            )
        return cls(kernel, plan_bins(reference_rows, current_rows, bins), features, seed, centre, precision)

    def __post_init__(self) -> None:
        check_precision(self.precision)
        if _check_kernel(self.kernel).scale is None:
            raise DriftError(
                f"found {self.kernel.name} without a bandwidth, expected one that all shards share",
                fix="choose it from a sample of both sides: RBF().resolved(sample)",
            )
        check_seed(self.seed)
        if not is_whole(self.features) or self.features < 2 or self.features % 2:
            raise DriftError(
                f"found features={self.features}, expected an even number: cosines and sines come in pairs"
            )
        if self.counts is None:
            self.counts = np.zeros(self.bins.all, dtype=np.int64)
            self.totals = np.zeros((self.bins.all, self.features))

    def add(self, rows: Any, side: Side, ids: Any) -> None:
        """Add rows of one side. Their ids decide which bins they belong to."""
        if side not in ("reference", "current"):
            raise DriftError(f"found side={side!r}, expected 'reference' or 'current'")
        hashes = hash_ids(ids, 2 * self.seed + (side == "current"))
        if side == "reference":
            self.add_to_bins(rows, hashed_bins(hashes, self.bins.reference))
        else:
            self.add_to_bins(rows, hashed_bins(hashes, self.bins.current) + self.bins.reference)

    def add_to_bins(self, rows: Any, bins: Any) -> None:
        """Add rows whose bins you know. The reference's bins come first."""
        if len(rows) == 0:
            return
        rows = as_rows(rows, "the sample", least=1)
        if len(bins) != len(rows):
            raise DriftError(f"found ids or bins of {len(bins):,} rows, but {len(rows):,} rows, expected one per row")
        self._check_width(rows.shape[1])
        self.counts += np.bincount(bins, minlength=self.bins.all)
        with double_precision(self.precision):
            frequencies = _frequencies(self.kernel, rows.shape[1], self.features // 2, self.seed, self.precision)
            for strip, of_strip in _strips(rows, np.asarray(bins), self.bins.all):
                self.totals += np.asarray(_compiled()(self.bins.all, frequencies, self._ready(strip), of_strip))

    def _ready(self, strip: Rows) -> Rows:
        with np.errstate(over="ignore"):
            ready = (strip - self.centre).astype(self.precision)
        if not np.isfinite(ready).all():
            raise DriftError(
                "some numbers are too large for single precision", fix="scale them, or pass precision='float64'"
            )
        return ready

    def merge(self, other: RFFSums) -> None:
        """Add the sums of another shard, which was created with the same arguments."""
        mine, theirs = self._arguments(), other._arguments()
        if mine != theirs:
            raise DriftError(f"found sums of different tests, {mine} and {theirs}, expected equal arguments")
        if other.width is not None:
            self._check_width(other.width)
        self.counts += other.counts
        self.totals += other.totals

    def result(self, permutations: int = 1000, level: float = 0.05) -> MMDTestResult:
        """Return the result of the test over all rows that were added."""
        settings = Settings(permutations, level, self.seed, self.precision)
        sides = self.counts[: self.bins.reference].sum(), self.counts[self.bins.reference :].sum()
        if min(sides) < 2:
            raise DriftError(
                f"found {sides[0]:,} rows of the reference and {sides[1]:,} of the current sample, "
                "expected at least 2 of each: the estimate takes pairs of rows"
            )
        # A row's features have length 1 (cos² + sin²), which is its kernel with itself; leave it out.
        sums = self.totals @ self.totals.T / (self.features // 2) - np.diag(self.counts)
        return conclude(sums[None], self.counts, self.bins, [self.kernel], settings)

    def _check_width(self, width: int) -> None:
        if self.width not in (None, width):
            raise DriftError(f"found rows of {width} numbers, expected {self.width} as before")
        self.width = width

    def _arguments(self) -> tuple[Any, ...]:
        centre = tuple(np.atleast_1d(self.centre).tolist())
        return self.kernel, self.bins, self.features, self.seed, self.precision, centre


def _check_kernel(kernel: Kernel) -> Kernel:
    """Return the kernel; raise an error if it has no random features."""
    if not isinstance(kernel, (RBF, Laplacian)):
        raise DriftError(
            f"found the kernel {kernel!r}, expected RBF or Laplacian, which have random features",
            fix="use mmd_test, which takes any kernel",
        )
    return kernel


@lru_cache(maxsize=8)
def _frequencies(kernel: Kernel, width: int, count: int, seed: int, precision: Precision) -> Any:
    """Draw frequencies from the kernel's spectrum. They depend on the seed only, so that all shards have the same."""
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


def _strips(rows: Rows, bins: Any, filler: int) -> Iterator[tuple[Rows, Any]]:
    """Yield rows and their bins in sizes that are powers of two, so that samples of many sizes share compiled code."""
    size = min(_STRIP_ROWS, max(_SMALLEST_STRIP_ROWS, 1 << (len(rows) - 1).bit_length()))
    for start in range(0, len(rows), size):
        strip, of_strip = rows[start : start + size], bins[start : start + size]
        missing = size - len(strip)
        yield np.pad(strip, np.array([(0, missing), (0, 0)])), np.pad(of_strip, (0, missing), constant_values=filler)
