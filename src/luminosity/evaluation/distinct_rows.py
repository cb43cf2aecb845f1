"""Counts of distinct rows of numbers: what every metric is computed from, mergeable and bounded."""

from __future__ import annotations

from collections.abc import Iterable
from typing import Any

import numpy as np

__all__ = ["DistinctRows"]

_FIRST_COMPACTION = 1 << 18  # rows that are collected before equal ones are counted together
_MOST_BITS = 62  # to drop from a number: then only its sign and the first bit of its exponent are left


class DistinctRows:
    """Distinct rows with their counts. A row is a whole number, its group, and ``width`` floating-point numbers.

    The result depends only on the rows, not on their order or on how they were distributed over merged parts. Up to
    ``limit`` distinct rows are kept exactly. With more, all numbers lose as many of their last bits as needed:
    ``dropped_bits`` is the least number of bits with which at most ``limit`` distinct rows remain. Numbers are cut
    towards zero, so their relative error is below ``2 ** (dropped_bits - 52)``.

    >>> found = DistinctRows(width=1, limit=10)
    >>> found.add([0, 1, 0], np.array([[0.5], [0.5], [0.5]]))
    >>> found.group.tolist(), found.values[:, 0].tolist(), found.counts.tolist()
    ([0, 1], [0.5, 0.5], [2, 1])
    """

    def __init__(self, width: int, limit: int) -> None:
        self.width = width
        self.limit = limit
        self.dropped_bits = 0
        self._parts: list[tuple[Any, Any, Any]] = []
        self._collected = 0
        self._compact_at = _FIRST_COMPACTION
        self._is_compact = True

    def add(self, group: Any, values: Any, counts: Any = None) -> None:
        """Add rows: their groups, a matrix of their numbers, and their counts (by default 1 each)."""
        group = np.asarray(group, dtype=np.int64)
        values = np.asarray(values, dtype=np.float64).reshape(len(group), self.width)
        if not len(group):
            return
        counts = np.ones(len(group), dtype=np.int64) if counts is None else counts
        self._parts.append((group, values + 0.0, counts))  # -0.0 becomes 0.0
        self._collected += len(group)
        self._is_compact = False
        if self._collected > self._compact_at:
            self._compact()

    def merge(self, other: DistinctRows) -> None:
        """Add the rows of another object, which stays as it is."""
        self.dropped_bits = max(self.dropped_bits, other.dropped_bits)
        for part in other._parts:
            self.add(*part)

    def regroup(self, groups: Any) -> None:
        """Replace the groups of all rows by ``groups(group)``, a function of arrays."""
        self._parts = [(groups(group), values, counts) for group, values, counts in self._parts]
        self._is_compact = False

    @property
    def rows(self) -> int:
        """The number of all rows, equal ones included."""
        return int(sum(int(counts.sum()) for _, _, counts in self._parts))

    @property
    def is_exact(self) -> bool:
        """Whether all distinct rows fitted into the limit."""
        self._compact()
        return self.dropped_bits == 0

    @property
    def group(self) -> Any:
        """The group of each distinct row, in ascending order."""
        return self._whole()[0]

    @property
    def values(self) -> Any:
        """The numbers of each distinct row, a matrix."""
        return self._whole()[1]

    @property
    def counts(self) -> Any:
        """How many rows are equal to each distinct row."""
        return self._whole()[2]

    def __getstate__(self) -> dict[str, Any]:
        self._compact()
        return self.__dict__

    def _whole(self) -> tuple[Any, Any, Any]:
        self._compact()
        if not self._parts:
            return np.empty(0, np.int64), np.empty((0, self.width)), np.empty(0, np.int64)
        return self._parts[0]

    def _compact(self) -> None:
        if self._is_compact:
            return
        group, values, counts = _joined(self._parts)
        found = _distinct(group, _cut(values, self.dropped_bits), counts)
        if len(found[0]) > self.limit:
            found = self._cut_to_limit(found)
        self._parts = [found]
        self._collected = len(found[0])
        self._compact_at = max(_FIRST_COMPACTION, 2 * self._collected)
        self._is_compact = True

    def _cut_to_limit(self, rows: tuple[Any, Any, Any]) -> tuple[Any, Any, Any]:
        """Find the least number of bits to drop by bisection: distinct rows never grow with it."""
        group, values, counts = rows
        too_few, enough = self.dropped_bits, _MOST_BITS
        best = _distinct(group, _cut(values, enough), counts)
        while enough - too_few > 1:
            middle = (too_few + enough) // 2
            found = _distinct(group, _cut(values, middle), counts)
            if len(found[0]) > self.limit:
                too_few = middle
            else:
                enough, best = middle, found
        self.dropped_bits = enough
        return best


def _joined(parts: Iterable[tuple[Any, Any, Any]]) -> tuple[Any, Any, Any]:
    groups, values, counts = zip(*parts, strict=True)
    if len(groups) == 1:
        return groups[0], values[0], counts[0]
    return np.concatenate(groups), np.concatenate(values), np.concatenate(counts)


def _cut(values: Any, bits: int) -> Any:
    """Set the last bits of each number to zero."""
    if not bits:
        return values
    mask = np.int64(-1) << np.int64(bits)
    return (np.ascontiguousarray(values).view(np.int64) & mask).view(np.float64) + 0.0


def _distinct(group: Any, values: Any, counts: Any) -> tuple[Any, Any, Any]:
    """Return the distinct rows in order, with the sums of their counts."""
    order = _order(group, values)
    group, values = group[order], values[order]
    is_new = np.empty(len(group), dtype=bool)
    is_new[:1] = True
    np.not_equal(group[1:], group[:-1], out=is_new[1:])
    for column in values.T:
        is_new[1:] |= column[1:] != column[:-1]
    starts = np.flatnonzero(is_new)
    return group[starts], values[starts], np.add.reduceat(counts[order], starts)


def _order(group: Any, values: Any) -> Any:
    """Return the order by group, then by each number."""
    if not values.shape[1]:
        return np.argsort(group, kind="stable")
    if not len(group) or group.min() == group.max():
        return np.argsort(values[:, 0]) if values.shape[1] == 1 else np.lexsort(tuple(values.T[::-1]))
    return np.lexsort((*values.T[::-1], group))
