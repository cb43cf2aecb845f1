"""The interface of the readers, one for each format, and how much they read at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import pyarrow as pa

from luminosity.io.reading.byte_ranges import EVERYTHING

__all__ = ["BATCH_BYTES", "BATCH_ROWS", "PIECE_BYTES", "TEXT_BYTES", "Claim", "Reader", "bounded", "claim_whole"]


Claim = Callable[[int], int]
"""Claims what begins before a byte of the file; says up to where it was granted."""

# Enough that what a batch costs beside its rows is nothing, few enough that workers can share a table's batches.
BATCH_ROWS = 65_536
# Several of them fit into any worker, even where rows are images or long texts.
BATCH_BYTES = 32 << 20
# A file is first cut into pieces of this size: some hundredths of a second of work, and more pieces than cores soon.
PIECE_BYTES = 8 << 20
# Text is read in blocks of this size, and each becomes a batch.
TEXT_BYTES = 4 << 20


class Reader(ABC):
    """An open file of a table. It was checked against the table's schema when it was opened."""

    def cuts(self) -> list[int] | None:
        """Where it may be cut into pieces before it is read; None: anywhere."""
        return None

    @abstractmethod
    def batches(self, start: int, stop: int, claim: Claim) -> Iterator[pa.RecordBatch]:
        """What begins in this range: the columns that are loaded, in any order. Claimed before it is given.

        `stop` says how far reading ahead is of use; what counts is what `claim` grants.
        """

    @abstractmethod
    def close(self) -> None: ...


def claim_whole(start: int, claim: Claim) -> bool:
    """Whether to read a file that can't be cut: it belongs to the range that has its first byte."""
    return start == 0 and claim(EVERYTHING) > 0


def bounded(batch: pa.RecordBatch, rows: int) -> Iterator[pa.RecordBatch]:
    """Its rows, in batches that are not too large; nothing where there are none.

    >>> import pyarrow as pa
    >>> [part.num_rows for part in bounded(pa.record_batch({"a": [1, 2, 3, 4, 5]}), 2)]
    [2, 2, 1]
    """
    if batch.nbytes > BATCH_BYTES:
        rows = min(rows, max(1, BATCH_BYTES * batch.num_rows // batch.nbytes))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)
