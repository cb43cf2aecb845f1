"""The interface of the readers, one for each format: the ranges of bytes that they claim and read."""

from __future__ import annotations

from abc import ABC, abstractmethod
from collections.abc import Callable, Iterator, Sequence
from typing import NamedTuple

import pyarrow as pa
from apache_beam.io.iobase import RestrictionProgress, RestrictionTracker

__all__ = [
    "BATCH_BYTES",
    "BATCH_ROWS",
    "EVERYTHING",
    "MAX_BYTES",
    "PIECE_BYTES",
    "TEXT_BYTES",
    "ByteRange",
    "ByteRangeTracker",
    "Claim",
    "Reader",
    "bounded",
    "claim_whole",
]

EVERYTHING = 1 << 62  # a position behind the end of any file


class ByteRange(NamedTuple):
    """A range of a file. A line, a record batch or a stretch of rows belongs to the range in which it begins."""

    start: int
    stop: int
    origin: int = 0
    """A position before ``start`` at which a row begins: rows of CSV can be found only from there."""

    @property
    def size(self) -> int:
        """The number of bytes."""
        return self.stop - self.start

    def pieces(self, size: int, cuts: Sequence[int] | None = None) -> Iterator[ByteRange]:
        """Yield parts of about ``size`` bytes, cut anywhere, or only at ``cuts``, which must be sorted.

        >>> list(ByteRange(0, 90).pieces(40))
        [bytes 0 to 40, bytes 40 to 90]
        >>> list(ByteRange(0, 90).pieces(40, [0, 30, 60, 80]))
        [bytes 0 to 60, bytes 60 to 90]
        """
        start = self.start
        for cut in range(self.start + size, self.stop, size) if cuts is None else cuts:
            if cut - start >= size and self.stop - cut >= size // 2:
                yield ByteRange(start, cut, start)
                start = cut
        yield ByteRange(start, self.stop, start)

    def __repr__(self) -> str:
        return f"bytes {self.start} to {self.stop}"


class ByteRangeTracker(RestrictionTracker):
    """Grants claims up to a byte, as far as the range goes.

    A reader of chunks of lines learns from one claim which lines are its own, even if the range was split inside the
    chunk in the meantime. Beam's tracker of offsets could only refuse the claim.
    """

    def __init__(self, byte_range: ByteRange) -> None:
        self._range = byte_range
        self._claimed = byte_range.start

    def try_claim(self, position: int) -> int:
        """Claim everything that begins before ``position``; return the position up to which that is granted."""
        self._claimed = max(self._claimed, min(position, self._range.stop))
        return self._claimed

    def try_split(self, fraction_of_remainder: float) -> tuple[ByteRange, ByteRange] | None:
        """Cut off a part of the bytes that are not claimed, or return None if nothing is left to cut off."""
        start, stop, origin = self._range
        cut = self._claimed + int((stop - self._claimed) * fraction_of_remainder)
        if cut >= stop:
            return None
        # What is claimed ends with a row.
        rest = ByteRange(cut, stop, self._claimed if self._claimed > start else origin)
        self._range = ByteRange(start, cut, origin)
        return self._range, rest

    def current_restriction(self) -> ByteRange:
        """Return the range, without the parts that were cut off."""
        return self._range

    def current_progress(self) -> RestrictionProgress:
        """Return how many bytes are claimed, and how many are left."""
        done = self._claimed - self._range.start
        return RestrictionProgress(completed=done, remaining=self._range.size - done)

    def check_done(self) -> bool:
        """Raise ``ValueError`` unless the whole range is claimed."""
        if self._claimed < self._range.stop:  # Beam's contract is a ValueError.
            raise ValueError(f"bytes {self._claimed} to {self._range.stop} were not read")
        return True

    def is_bounded(self) -> bool:
        """Return True: a file has an end."""
        return True


Claim = Callable[[int], int]
"""Claims everything that begins before a position in the file; returns the position up to which that is granted."""
# The most rows of a batch: enough that its overhead is negligible, few enough that workers can share the batches.
BATCH_ROWS = 65_536
# The most bytes of a batch: several batches fit into any worker, even if rows are images or long texts.
BATCH_BYTES = 32 << 20
# The most bytes of a file that is a value of a row, unless the user chooses: a photo or a PDF, not a film.
MAX_BYTES = 64 << 20
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
