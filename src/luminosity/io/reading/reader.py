"""The interface of the readers, one for each format, and how much they read at once."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator

import pyarrow as pa

from luminosity.io.reading.byte_ranges import EVERYTHING, ByteRange

__all__ = ["BATCH_BYTES", "BATCH_ROWS", "PIECE_BYTES", "TEXT_BYTES", "Claim", "Reader", "bounded", "claim_whole"]


Claim = Callable[[int], int]
"""Claims everything that begins before a position in the file; returns the position up to which that is granted."""

# The most rows of a batch: enough that its overhead is negligible, few enough that workers can share the batches.
BATCH_ROWS = 65_536
# The most bytes of a batch: several batches fit into any worker, even if rows are images or long texts.
BATCH_BYTES = 32 << 20
# The size of a file's first pieces: some hundredths of a second of work, and small files already fill all cores.
PIECE_BYTES = 8 << 20
# The size of the chunks in which text is read; each chunk becomes a batch.
TEXT_BYTES = 4 << 20


class Reader(ABC):
    """An open file of a table. Opening it checks its columns against the table's schema."""

    def cuts(self) -> list[int] | None:
        """Return the positions at which the file may be cut before it is read; None means anywhere."""
        return None

    @abstractmethod
    def batches(self, byte_range: ByteRange, claim: Claim) -> Iterator[pa.RecordBatch]:
        """Yield the rows that begin in this range, with the loaded columns in any order.

        Rows are claimed before they are yielded. The end of the range only limits how far to read ahead: the range may
        have been split since, so only the rows that ``claim`` grants may be yielded.
        """

    @abstractmethod
    def close(self) -> None:
        """Close the file."""


def claim_whole(start: int, claim: Claim) -> bool:
    """Claim a file that can't be cut, and return whether that was granted: the range with its first byte owns it."""
    return start == 0 and claim(EVERYTHING) > 0


def bounded(batch: pa.RecordBatch, rows: int) -> Iterator[pa.RecordBatch]:
    """Yield the rows in batches within the limits; yield nothing for an empty batch.

    >>> import pyarrow as pa
    >>> [part.num_rows for part in bounded(pa.record_batch({"a": [1, 2, 3, 4, 5]}), 2)]
    [2, 2, 1]
    """
    if batch.nbytes > BATCH_BYTES:
        rows = min(rows, max(1, BATCH_BYTES * batch.num_rows // batch.nbytes))
    for start in range(0, batch.num_rows, rows):
        yield batch.slice(start, rows)
