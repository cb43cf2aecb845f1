"""Bounded, mergeable summaries of many values: how many are distinct, which are most frequent, how numbers spread."""

from __future__ import annotations

import math
from hashlib import blake2b
from typing import Any

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from luminosity.evaluation.distinct_rows import DistinctRows
from luminosity.evaluation.metrics import quantile_of

__all__ = ["DistinctCount", "NumberSummary", "TopValues"]

_HASHES = 4096  # kept for distinct values: exact below, a standard error of 1.6% above
_VALUES = 1 << 15  # distinct numbers: exact below, a relative error of some thousandths above
_TOP = 1 << 14  # candidates for the most frequent values: exact below
_LONG_BYTES = 1000  # longer texts are hashed one by one
_LONGEST_TOP = 200  # characters of a text that is counted among the most frequent values
_GOLDEN = 0x9E3779B97F4A7C15


class DistinctCount:
    """Estimates how many values are distinct from their smallest hashes (Bar-Yossef et al. 2002).

    The estimate depends on the values only, not on their order or how they were distributed.

    >>> found = DistinctCount()
    >>> found.add(pa.array(["a", "b", "a", None]))
    >>> found.estimate, found.is_exact
    (2, True)
    """

    def __init__(self) -> None:
        self._hashes = np.empty(0, dtype=np.uint64)

    def add(self, values: Any) -> None:
        """Add the values of an Arrow array: texts, bytes, numbers, dates or booleans."""
        self._keep(_hashes(values.drop_null()))

    def merge(self, other: DistinctCount) -> None:
        """Add the values of another object."""
        self._keep(other._hashes)

    @property
    def is_exact(self) -> bool:
        """Whether all distinct values could be counted."""
        return len(self._hashes) < _HASHES

    @property
    def estimate(self) -> int:
        """The number of distinct values."""
        if self.is_exact:
            return len(self._hashes)
        return round((_HASHES - 1) / ((float(self._hashes[-1]) + 1) / 2.0**64))

    def _keep(self, hashes: Any) -> None:
        if not self.is_exact:
            hashes = hashes[hashes < self._hashes[-1]]
        if len(hashes):
            self._hashes = np.unique(np.concatenate([self._hashes, hashes]))[:_HASHES]


class TopValues:
    """Counts the most frequent values (Misra and Gries 1982). Exact up to 16,384 distinct values.

    With more, counts may be too low by at most ``error``.
    """

    def __init__(self) -> None:
        self.error = 0
        self._parts: list[tuple[Any, Any]] = []
        self._collected = 0

    def add(self, values: Any) -> None:
        """Add the values of an Arrow array. Texts longer than 200 characters are left out."""
        values = values.drop_null()
        if pa.types.is_string(values.type) or pa.types.is_large_string(values.type):
            values = values.cast(pa.large_string())
            length = pc.call_function("utf8_length", [values])
            values = values.filter(pc.call_function("less_equal", [length, pa.scalar(_LONGEST_TOP, length.type)]))
        if len(values):
            counts = values.value_counts()
            self._append(counts.field(0), counts.field(1).to_numpy(zero_copy_only=False))

    def merge(self, other: TopValues) -> None:
        """Add the values of another object."""
        self.error += other.error
        for part in other._parts:
            self._append(*part)

    def top(self, most: int) -> list[tuple[Any, int]]:
        """Return the most frequent values, and how often each occurs; of equal counts, the smaller value first."""
        values, counts = self._whole()
        if not len(values):
            return []
        last = np.sort(counts)[::-1][: most + 1][-1]
        at = np.flatnonzero(counts >= last)
        found = list(zip(values.take(pa.array(at)).to_pylist(), counts[at].tolist(), strict=True))
        return sorted(found, key=lambda each: (-each[1], str(each[0])))[:most]

    @property
    def counts(self) -> dict[Any, int]:
        """All values that are kept."""
        values, counts = self._whole()
        return dict(zip(values.to_pylist(), counts.tolist(), strict=True)) if len(values) else {}

    def __getstate__(self) -> dict[str, Any]:
        self._compact()
        return self.__dict__

    def _append(self, values: Any, counts: Any) -> None:
        self._parts.append((values, counts))
        self._collected += len(values)
        if self._collected > 4 * _TOP:
            self._compact()

    def _whole(self) -> tuple[Any, Any]:
        self._compact()
        return self._parts[0] if self._parts else (pa.nulls(0), np.empty(0, np.int64))

    def _compact(self) -> None:
        if not self._parts:
            return
        values, counts = self._parts[0]
        if len(self._parts) > 1:
            kind = max((part[0].type for part in self._parts), key=str)
            joined = pa.chunked_array([part[0].cast(kind) for part in self._parts])
            added = pa.table({"value": joined, "count": np.concatenate([part[1] for part in self._parts])})
            summed = added.group_by("value", use_threads=False).aggregate([("count", "sum")])
            values = summed["value"].combine_chunks()
            counts = summed["count_sum"].to_numpy()
        if len(values) > _TOP:
            taken = int(np.partition(counts, len(counts) - _TOP - 1)[len(counts) - _TOP - 1])
            is_kept = counts > taken
            values, counts = values.filter(pa.array(is_kept)), counts[is_kept] - taken
            self.error += taken
        self._parts = [(values, counts)]
        self._collected = len(values)


class NumberSummary:
    """The count, mean, spread, ends and distribution of numbers."""

    def __init__(self) -> None:
        self.count = 0
        self.mean = 0.0
        self._squares = 0.0  # of the distances from the mean
        self.low = math.inf
        self.high = -math.inf
        self.values = DistinctRows(1, _VALUES)

    def add(self, numbers: Any) -> None:
        """Add finite numbers, as a NumPy array."""
        if not len(numbers):
            return
        mean = float(numbers.mean())
        with np.errstate(over="ignore"):  # of huge numbers: then there is no deviation
            self._add_moments(len(numbers), mean, float(((numbers - mean) ** 2).sum()))
        self.low, self.high = min(self.low, float(numbers.min())), max(self.high, float(numbers.max()))
        self.values.add(np.zeros(len(numbers), np.int64), numbers[:, None])

    def merge(self, other: NumberSummary) -> None:
        """Add the numbers of another object."""
        if other.count:
            self._add_moments(other.count, other.mean, other._squares)
            self.low, self.high = min(self.low, other.low), max(self.high, other.high)
            self.values.merge(other.values)

    @property
    def deviation(self) -> float | None:
        """The standard deviation of a sample, or None for fewer than two numbers, or huge ones."""
        return math.sqrt(self._squares / (self.count - 1)) if self.count > 1 and math.isfinite(self._squares) else None

    def quantile(self, share: float) -> float:
        """Return a quantile; not exact if there are more than 32,768 distinct numbers."""
        if share in (0, 1):
            return self.high if share else self.low
        order = self._ordered()
        return min(max(quantile_of(*order, share), self.low), self.high)

    def histogram(self, edges: Any) -> list[int]:
        """Return how many numbers lie between each two edges. The first and the last bin have what lies beyond."""
        values, counts = self._ordered()
        at = np.clip(np.searchsorted(edges, values, side="right") - 1, 0, len(edges) - 2)
        return np.bincount(at, weights=counts, minlength=len(edges) - 1).astype(np.int64).tolist()

    def _ordered(self) -> tuple[Any, Any]:
        return self.values.values[:, 0], self.values.counts

    def _add_moments(self, count: int, mean: float, squares: float) -> None:
        """Merge by the formula of Chan, Golub and LeVeque (1979)."""
        both = self.count + count
        apart = mean - self.mean
        self._squares += squares + apart * apart * self.count * count / both
        self.mean += apart * count / both
        self.count = both


def _hashes(values: Any) -> Any:
    """Return 64 bits for each value, which depend on the value only."""
    kind = values.type
    if pa.types.is_string(kind) or pa.types.is_binary(kind) or str(kind).endswith("_view"):
        is_text = pa.types.is_string(kind) or str(kind) == "string_view"
        values = values.cast(pa.large_string() if is_text else pa.large_binary())
    if pa.types.is_large_string(values.type) or pa.types.is_large_binary(values.type):
        return _hashes_of_bytes(values)
    if pa.types.is_boolean(kind):
        values = values.cast(pa.uint8())
    if pa.types.is_decimal(kind) or pa.types.is_float16(kind):
        values = values.cast(pa.float64())
    numbers = values.to_numpy(zero_copy_only=False)
    if numbers.dtype.kind == "f":
        return _mixed((numbers.astype(np.float64) + 0.0).view(np.uint64))
    return _mixed(numbers.astype(np.int64, copy=False).view(np.uint64))


def _hashes_of_bytes(values: Any) -> Any:
    """Multiply each byte by a random odd number that belongs to its position, add up, and mix (a universal hash)."""
    if not len(values):
        return np.empty(0, np.uint64)
    buffers = values.buffers()
    offsets = np.frombuffer(buffers[1], np.int64)[values.offset : values.offset + len(values) + 1]
    data = np.frombuffer(buffers[2], np.uint8) if buffers[2] is not None else np.empty(0, np.uint8)
    starts, lengths = offsets[:-1], np.diff(offsets)
    hashes = np.zeros(len(values), np.uint64)
    is_short = (lengths > 0) & (lengths <= _LONG_BYTES)
    if is_short.any():
        some = lengths[is_short]
        ends = np.cumsum(some)
        position = np.arange(int(ends[-1])) - np.repeat(ends - some, some)
        taken = data[np.repeat(starts[is_short], some) + position].astype(np.uint64) + np.uint64(1)
        hashes[is_short] = np.add.reduceat(taken * _FACTORS[position], ends - some)
    for at in np.flatnonzero(lengths > _LONG_BYTES).tolist():
        digest = blake2b(data[starts[at] : starts[at] + lengths[at]].tobytes(), digest_size=8).digest()
        hashes[at] = int.from_bytes(digest, "little")
    return _mixed(hashes + lengths.astype(np.uint64) * np.uint64(0xD1342543DE82EF95))


def _mixed(numbers: Any) -> Any:
    """Mix the bits with SplitMix64 (Steele, Lea and Flood 2014)."""
    mixed = numbers + np.uint64(_GOLDEN)
    for shift, factor in ((30, 0xBF58476D1CE4E5B9), (27, 0x94D049BB133111EB)):
        mixed = (mixed ^ (mixed >> np.uint64(shift))) * np.uint64(factor)
    return mixed ^ (mixed >> np.uint64(31))


_FACTORS = _mixed(np.arange(_LONG_BYTES, dtype=np.uint64)) | np.uint64(1)  # one for each position in a text
