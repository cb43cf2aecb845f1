"""What the plan of a test needs to know of a sample: small, and the same however its rows are spread."""

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

_WAITING = 8  # blocks that are looked at together


@dataclass(frozen=True)
class Summary:
    """``sample`` holds the rows of smallest hash; ``sums`` what PCA needs, if it is wanted.

    ``low`` and ``high`` are the least and the greatest number of each column.
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
        """An error unless its rows can be compared."""
        if self.bad:
            rows = "one row that" if self.bad == 1 else f"{self.bad:,} rows that"
            raise DriftError(
                f"{name} has {rows} can't be compared: {self.fault}. Leave such rows out, or fill them in, before."
            )
        if len(self.widths) > 1:
            raise DriftError(
                f"{name} has rows of {' and of '.join(map(str, sorted(self.widths)))} numbers. Expected one width; "
                "perhaps they come from different models."
            )
        if self.rows < 2:
            found = "no rows" if self.rows == 0 else "one row"
            raise DriftError(f"{name} has {found}, expected at least 2.")
        if 0 in self.widths:
            raise DriftError(f"{name} has rows without any numbers in them.")


class Summarise(beam.CombineFn):
    """Of blocks."""

    def __init__(self, with_sums: bool) -> None:
        self._with_sums = with_sums

    def create_accumulator(self) -> list[Any]:  # type: ignore[override]
        return [Summary(), []]  # and blocks whose smallest hashes are not yet found

    def add_input(self, mutable_accumulator: list[Any], element: HashedRows) -> list[Any]:  # type: ignore[override]
        summary, waiting = mutable_accumulator
        mutable_accumulator[0] = _merged([summary, self._of(element)])
        if len(element):
            waiting.append(_smallest([element]))
            if len(waiting) > _WAITING:
                waiting[:] = _smallest_by_width(waiting)
        return mutable_accumulator

    def merge_accumulators(self, accumulators: Iterable[list[Any]]) -> list[Any]:  # type: ignore[override]
        found = list(accumulators)
        merged = _merged([summary for summary, _ in found])
        return [merged, _smallest_by_width([block for _, waiting in found for block in waiting])]

    def extract_output(self, accumulator: list[Any]) -> Summary:  # type: ignore[override]
        summary, waiting = accumulator
        smallest = _smallest_by_width(waiting)
        return _merged([summary, Summary(sample=smallest[0] if smallest else None)])

    def _of(self, block: HashedRows) -> Summary:
        sums = None
        if self._with_sums and len(block):
            sums = PCASums()
            sums.add(block.rows)
        widths = frozenset([block.width] if len(block) else [])
        row_bytes = block.width * block.rows.itemsize
        low, high = (block.rows.min(axis=0), block.rows.max(axis=0)) if len(block) else (None, None)
        return Summary(len(block), widths, row_bytes, None, sums, low, high, block.bad, block.fault)


def _merged(summaries: list[Summary]) -> Summary:
    sums: PCASums | None = None
    widths = frozenset[int]().union(*(summary.widths for summary in summaries))
    low = high = None
    if len(widths) == 1:  # With several there will be an error.
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


def _smallest_by_width(blocks: list[HashedRows]) -> list[HashedRows]:
    found: dict[int, list[HashedRows]] = {}
    for block in blocks:
        found.setdefault(block.width, []).append(block)
    return [_smallest(alike) for alike in found.values()]


def _smallest(blocks: list[HashedRows]) -> HashedRows:
    """The rows of smallest hash, in its order; equal ones, of ids that are not unique, by their first number."""
    block = stacked(blocks)
    if len(block) > SAMPLE_ROWS:
        last = np.partition(block.hashes, SAMPLE_ROWS - 1)[SAMPLE_ROWS - 1]
        block = block.take(block.hashes <= last)
    return block.take(np.lexsort((*block.rows.T[:1], block.hashes))[:SAMPLE_ROWS])
