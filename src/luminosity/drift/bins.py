"""Rows in random bins: permuting bins instead of rows makes a permutation cost next to nothing.

All bins hold about as many rows, whichever sample they come from: under the null hypothesis one is then as good as
another, which is what the level of the test rests on (Domingo-Enrich, Dwivedi and Mackey 2023, arXiv 2301.05974).
With few rows each has a bin of its own, and the test is the usual permutation test.
"""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from luminosity.drift.rows import is_whole
from luminosity.errors import DriftError

__all__ = ["BINS", "MOST_BINS", "BinCounts", "balanced_bins", "hashed_bins", "most_rows", "plan_bins"]

BINS = 120  # of both samples together
MOST_BINS = 1024  # where one sample is much larger: a matrix of 8 MB
_FEWEST_BINS = 8  # of the smaller sample, as long as that is within the above


@dataclass(frozen=True)
class BinCounts:
    """How many bins each sample has. The reference's come first."""

    reference: int
    current: int

    @property
    def all(self) -> int:
        return self.reference + self.current


def plan_bins(reference_rows: int, current_rows: int, bins: int = BINS) -> BinCounts:
    """
    >>> plan_bins(10_000, 10_000)
    BinCounts(reference=60, current=60)
    >>> plan_bins(100_000, 1_000)
    BinCounts(reference=800, current=8)
    >>> plan_bins(20, 30)
    BinCounts(reference=20, current=30)
    """
    if not is_whole(bins) or not 2 * _FEWEST_BINS <= bins <= MOST_BINS:
        raise DriftError(f"Found bins={bins}, expected a whole number from {2 * _FEWEST_BINS} to {MOST_BINS}.")
    smaller, larger = sorted((reference_rows, current_rows))
    wanted, most = (number * smaller // (smaller + larger) for number in (bins, MOST_BINS))
    few = max(1, min(max(wanted, _FEWEST_BINS), most, smaller))
    many = few * larger // smaller  # rounded down: none is smaller than those of the other sample
    return BinCounts(few, many) if reference_rows <= current_rows else BinCounts(many, few)


def most_rows(smaller: int) -> int:
    """How many rows of the larger sample can be used: more would need bins larger than the whole smaller sample."""
    return smaller * (MOST_BINS - 1)


def balanced_bins(rows: int, bins: int, seed: int, side: int) -> Any:
    """A bin for each row, at random, all of the same size or one apart."""
    order = np.random.default_rng((seed, side)).permutation(rows)
    found = np.empty(rows, dtype=np.int64)
    found[order] = np.arange(rows) * bins // rows
    return found


def hashed_bins(hashes: Any, bins: int) -> Any:
    """A bin for each row from the hash of its id, so that no row needs to know of the others."""
    return (hashes >> np.uint64(11)).astype(np.int64) % bins
