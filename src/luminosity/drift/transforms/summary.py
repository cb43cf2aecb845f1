"""Rows with the hashes of their ids, and the summaries of samples from which a test is planned."""

from __future__ import annotations

from collections.abc import Iterable, Iterator, Sequence
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import numpy as np

from luminosity.drift.distances import SAMPLE_ROWS
from luminosity.drift.pca import PCASums
from luminosity.errors import DriftError

__all__ = ["HashedRows", "Summarise", "Summary", "by_width"]


@dataclass(frozen=True)
class HashedRows:
    """Rows and their hashes. ``bad`` counts rows that were left out; ``fault`` says what is wrong with one of them."""

    hashes: Any
    rows: Any
    bad: int = 0
    fault: str = ""

    def __len__(self) -> int:
        return len(self.hashes)

    @property
    def width(self) -> int:
        """The numbers of a row."""
        return self.rows.shape[1]

    def take(self, which: Any) -> HashedRows:
        """Return the rows with these numbers, or the rows that this mask selects."""
        return HashedRows(self.hashes[which], self.rows[which])

    def pieces(self, most_bytes: int) -> Iterator[HashedRows]:
        """Yield the rows in pieces of at most ``most_bytes``; a piece has at least one row."""
        count = max(1, int(most_bytes // max(1, self.width * self.rows.itemsize)))
        if len(self) <= count:
            yield self
            return
        if self.bad:
            yield HashedRows(self.hashes[:0], self.rows[:0], self.bad, self.fault)
        for start in range(0, len(self), count):
            yield self.take(slice(start, start + count))


def stacked(pieces: Sequence[HashedRows]) -> HashedRows:
    """Return all rows in one piece. They have the same width."""
    if len(pieces) == 1:
        return pieces[0]
    return HashedRows(
        np.concatenate([piece.hashes for piece in pieces]),
        np.concatenate([piece.rows for piece in pieces]),
        sum(piece.bad for piece in pieces),
        first_fault(piece.fault for piece in pieces),
    )


def by_width(pieces: Iterable[HashedRows]) -> list[HashedRows]:
    """Return the rows of each width in one piece. The summary of all rows reports different widths as an error."""
    found: dict[int, list[HashedRows]] = {}
    for piece in pieces:
        found.setdefault(piece.width, []).append(piece)
    return [stacked(alike) for alike in found.values()]


def first_fault(faults: Iterable[str]) -> str:
    """Return one of the faults, the same in whatever order they come."""
    return min(filter(None, faults), default="")


_WAITING = 8  # elements whose smallest hashes are found together


@dataclass(frozen=True)
class Summary:
    """The summary of a sample.

    ``sample`` holds the rows of smallest hash, ``sums`` what PCA needs (or None). ``low`` and ``high`` are the smallest
    and the largest number of each column. ``bad`` rows can't be compared; ``fault`` says what is wrong with one of
    them.
    """

    rows: int = 0
    widths: frozenset[int] = frozenset()
    bytes_per_row: int = 0
    sample: HashedRows | None = None
    sums: PCASums | None = None
    low: Any = None
    high: Any = None
    bad: int = 0
    fault: str = ""

    def check(self, name: str) -> None:
        """Raise an error unless the rows can be compared. ``name`` is what errors call the sample."""
        if self.bad:
            rows = "one row that" if self.bad == 1 else f"{self.bad:,} rows that"
            raise DriftError(
                f"{name} has {rows} can't be compared: {self.fault}", fix="leave these rows out, or fill them in"
            )
        if len(self.widths) > 1:
            raise DriftError(
                f"{name} has rows of {' and of '.join(map(str, sorted(self.widths)))} numbers, expected one width; "
                "perhaps they come from different models"
            )
        if self.rows < 2:
            found = "no rows" if self.rows == 0 else "one row"
            raise DriftError(f"{name} has {found}, expected at least 2")
        if 0 in self.widths:
            raise DriftError(f"{name} has rows without numbers, expected at least one number per row")


class Summarise(beam.CombineFn):
    """Combines rows into the summary of a sample."""

    def __init__(self, with_sums: bool) -> None:
        self._with_sums = with_sums

    def create_accumulator(self) -> list[Any]:  # type: ignore[override]
        """Return an empty summary, and an empty list for rows of small hash."""
        return [Summary(), []]  # and rows whose smallest hashes are not yet found

    def add_input(self, mutable_accumulator: list[Any], element: HashedRows) -> list[Any]:  # type: ignore[override]
        """Add the counts, ranges and sums of some rows, and keep their smallest hashes."""
        summary, waiting = mutable_accumulator
        mutable_accumulator[0] = _merged([summary, self._of(element)])
        if len(element):
            waiting.append(_smallest([element]))
            if len(waiting) > _WAITING:
                waiting[:] = _smallest_by_width(waiting)
        return mutable_accumulator

    def merge_accumulators(self, accumulators: Iterable[list[Any]]) -> list[Any]:  # type: ignore[override]
        """Merge the summaries, and keep the rows of smallest hash among all."""
        found = list(accumulators)
        merged = _merged([summary for summary, _ in found])
        return [merged, _smallest_by_width([rows for _, waiting in found for rows in waiting])]

    def extract_output(self, accumulator: list[Any]) -> Summary:  # type: ignore[override]
        """Return the summary, with the rows of smallest hash as its sample."""
        summary, waiting = accumulator
        smallest = _smallest_by_width(waiting)
        return _merged([summary, Summary(sample=smallest[0] if smallest else None)])

    def _of(self, rows: HashedRows) -> Summary:
        sums = None
        if self._with_sums and len(rows):
            sums = PCASums()
            sums.add(rows.rows)
        widths = frozenset([rows.width] if len(rows) else [])
        row_bytes = rows.width * rows.rows.itemsize
        low, high = (rows.rows.min(axis=0), rows.rows.max(axis=0)) if len(rows) else (None, None)
        return Summary(len(rows), widths, row_bytes, None, sums, low, high, rows.bad, rows.fault)


def _merged(summaries: list[Summary]) -> Summary:
    sums: PCASums | None = None
    widths = frozenset[int]().union(*(summary.widths for summary in summaries))
    low = high = None
    if len(widths) == 1:  # check() reports several widths.
        parts = [summary.sums for summary in summaries if summary.sums is not None]
        if parts:
            sums = PCASums()
            for part in parts:
                sums.merge(part)
        low = np.min([summary.low for summary in summaries if summary.low is not None], axis=0)
        high = np.max([summary.high for summary in summaries if summary.high is not None], axis=0)
    return Summary(
        rows=sum(summary.rows for summary in summaries),
        widths=widths,
        bytes_per_row=max(summary.bytes_per_row for summary in summaries),
        sample=next((summary.sample for summary in summaries if summary.sample is not None), None),
        sums=sums,
        low=low,
        high=high,
        bad=sum(summary.bad for summary in summaries),
        fault=first_fault(summary.fault for summary in summaries),
    )


def _smallest_by_width(pieces: list[HashedRows]) -> list[HashedRows]:
    found: dict[int, list[HashedRows]] = {}
    for piece in pieces:
        found.setdefault(piece.width, []).append(piece)
    return [_smallest(alike) for alike in found.values()]


def _smallest(pieces: list[HashedRows]) -> HashedRows:
    """Return the rows of smallest hash, in that order. Equal hashes, of equal ids, are ordered by the first number."""
    rows = stacked(pieces)
    if len(rows) > SAMPLE_ROWS:
        last = np.partition(rows.hashes, SAMPLE_ROWS - 1)[SAMPLE_ROWS - 1]
        rows = rows.take(rows.hashes <= last)
    return rows.take(np.lexsort((*rows.rows.T[:1], rows.hashes))[:SAMPLE_ROWS])
