"""Summaries of samples, from which a test is planned: small, and independent of how rows are distributed."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
import numpy as np

from luminosity.drift.distances import SAMPLE_ROWS
from luminosity.drift.pca import PCASums
from luminosity.drift.transforms.hashed_rows import HashedRows, first_fault, stacked
from luminosity.errors import DriftError

__all__ = ["Summarise", "Summary"]

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
