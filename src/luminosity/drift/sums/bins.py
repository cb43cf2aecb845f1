"""Random bins of rows, and the hashes of ids that bins are chosen by.

Permuting bins instead of rows makes a permutation cost next to nothing. All bins hold about equally many rows,
whichever sample they come from: under the null hypothesis they are exchangeable, so that the level of the test holds
(Domingo-Enrich, Dwivedi and Mackey 2023, arXiv 2301.05974). With few rows every row has its own bin, and the test is
the usual permutation test.
"""

from __future__ import annotations

from dataclasses import dataclass
from hashlib import blake2b
from typing import Any

import numpy as np

from luminosity.drift.rows import is_whole
from luminosity.errors import DriftError

__all__ = ["BINS", "BinCounts", "balanced_bins", "hash_ids", "hashed_bins", "most_rows", "plan_bins"]

BINS = 120  # bins of both samples together
_MOST_BINS = 1024  # bins if one sample is much larger: their matrix takes 8 MB
_FEWEST_BINS = 8  # bins of the smaller sample, as far as _MOST_BINS allows

_GOLDEN = np.uint64(0x9E3779B97F4A7C15)


@dataclass(frozen=True)
class BinCounts:
    """The number of bins of each sample. The reference's bins come first."""

    reference: int
    current: int

    @property
    def all(self) -> int:
        """The number of bins of both samples."""
        return self.reference + self.current


def plan_bins(reference_rows: int, current_rows: int, bins: int = BINS) -> BinCounts:
    """Choose the number of bins of each sample, so that all bins hold about equally many rows.

    >>> plan_bins(10_000, 10_000)
    BinCounts(reference=60, current=60)
    >>> plan_bins(100_000, 1_000)
    BinCounts(reference=800, current=8)
    >>> plan_bins(20, 30)
    BinCounts(reference=20, current=30)
    """
    if not is_whole(bins) or not 2 * _FEWEST_BINS <= bins <= _MOST_BINS:
        raise DriftError(f"found bins={bins}, expected a whole number from {2 * _FEWEST_BINS} to {_MOST_BINS}")
    smaller, larger = sorted((reference_rows, current_rows))
    wanted, most = (number * smaller // (smaller + larger) for number in (bins, _MOST_BINS))
    few = max(1, min(max(wanted, _FEWEST_BINS), most, smaller))
    many = few * larger // smaller  # rounded down: no bin is smaller than the bins of the other sample
    return BinCounts(few, many) if reference_rows <= current_rows else BinCounts(many, few)


def most_rows(smaller: int) -> int:
    """Return how many rows of the larger sample can be used. More need bins larger than the whole smaller sample."""
    return smaller * (_MOST_BINS - 1)


def balanced_bins(rows: int, bins: int, seed: int, side: int) -> Any:
    """Return a random bin for each row, as small integers. The sizes of bins differ by at most one.

    >>> balanced_bins(5, 2, seed=0, side=0)
    array([1, 1, 0, 0, 0], dtype=uint16)
    """
    order = np.random.default_rng((seed, side)).permutation(rows)
    starts = -(-np.arange(bins + 1) * rows // bins)
    found = np.empty(rows, dtype=np.uint16)
    found[order] = np.repeat(np.arange(bins, dtype=np.uint16), np.diff(starts))
    return found


def hashed_bins(hashes: Any, bins: int) -> Any:
    """Return a bin for each row from the hash of its id, independent of all other rows."""
    return (hashes >> np.uint64(11)).astype(np.int64) % bins


def hash_ids(ids: Any, seed: int) -> Any:
    """Return 64 bits for each id, which is a whole number of any size, a string or bytes.

    A hash depends on the id and the seed only, not on the machine, the order of rows or their shards.

    >>> hash_ids([7, 8], seed=0) == hash_ids([8, 7], seed=0)[::-1]
    array([ True,  True])
    """
    ids = _as_array(ids)
    if ids.ndim != 1:
        raise DriftError(f"found ids of shape {ids.shape}, expected one for each row")
    if ids.dtype.kind in "iub":
        return _mixed(ids.astype(np.int64).view(np.uint64), seed)
    if ids.dtype.kind in "USOT":
        return _mixed(np.fromiter((_digest(value) for value in ids), dtype=np.uint64, count=len(ids)), seed)
    raise DriftError(f"found ids of {ids.dtype}, expected whole numbers, strings or bytes, which are exact")


def _as_array(ids: Any) -> Any:
    """Keep the items of a list as they are: NumPy would drop zeros at the end of bytes, and digits of large numbers."""
    array = np.asarray(ids)
    if array.ndim == 1 and array is not ids and array.dtype.kind in "USf" and isinstance(ids, (list, tuple)):
        array = np.empty(len(array), dtype=object)
        array[:] = ids
    return array


def _digest(value: Any) -> int:
    if isinstance(value, (int, np.integer)):
        number = int(value)
        if -(2**63) <= number < 2**64:
            return number & 0xFFFFFFFFFFFFFFFF
        value = b"%d" % number  # such as a UUID's
    if not isinstance(value, (str, bytes)):
        raise DriftError(f"found the id {value!r}, expected a whole number, a string or bytes")
    data = value.encode() if isinstance(value, str) else value
    return int.from_bytes(blake2b(data, digest_size=8).digest(), "little")


def _mixed(numbers: Any, seed: int) -> Any:
    """Mix the bits with SplitMix64 (Steele, Lea and Flood 2014): the results of neighbouring numbers are unrelated."""
    with np.errstate(over="ignore"):
        mixed = numbers + np.uint64(seed % 2**64) * np.uint64(0xD1342543DE82EF95) + _GOLDEN
        for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
            mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
        return mixed ^ (mixed >> np.uint64(31))
