"""A part of a file as a range of its bytes, and how much of it has been claimed."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import NamedTuple

from apache_beam.io.iobase import RestrictionProgress, RestrictionTracker

__all__ = ["EVERYTHING", "ByteRange", "ByteRangeTracker"]

EVERYTHING = 1 << 62


class ByteRange(NamedTuple):
    """What begins in it belongs to it: a line, a record batch, some rows of a row group."""

    start: int
    stop: int

    @property
    def size(self) -> int:
        return self.stop - self.start

    def pieces(self, size: int, cuts: Sequence[int] | None = None) -> Iterator[ByteRange]:
        """Parts of about this size, cut anywhere, or only at `cuts`, which are in order.

        >>> list(ByteRange(0, 90).pieces(40))
        [ByteRange(start=0, stop=40), ByteRange(start=40, stop=90)]
        >>> list(ByteRange(0, 90).pieces(40, [0, 30, 60, 80]))
        [ByteRange(start=0, stop=60), ByteRange(start=60, stop=90)]
        """
        start = self.start
        for cut in range(self.start + size, self.stop, size) if cuts is None else cuts:
            if cut - start >= size and self.stop - cut >= size // 2:
                yield ByteRange(start, cut)
                start = cut
        yield ByteRange(start, self.stop)


class ByteRangeTracker(RestrictionTracker):
    """Claims go up to a byte, and are granted as far as the range goes.

    Whoever reads blocks of lines learns from one claim which of them are his, even if the range was cut
    meanwhile within the block. Beam's tracker of offsets would only say no.
    """

    def __init__(self, byte_range: ByteRange) -> None:
        self._range = byte_range
        self._claimed = byte_range.start

    def try_claim(self, position: int) -> int:
        """Claim what begins before `position`; up to where that was granted."""
        self._claimed = max(self._claimed, min(position, self._range.stop))
        return self._claimed

    def try_split(self, fraction_of_remainder: float) -> tuple[ByteRange, ByteRange] | None:
        start, stop = self._range
        cut = self._claimed + int((stop - self._claimed) * fraction_of_remainder)
        if cut >= stop:
            return None
        self._range, rest = ByteRange(start, cut), ByteRange(cut, stop)
        return self._range, rest

    def current_restriction(self) -> ByteRange:
        return self._range

    def current_progress(self) -> RestrictionProgress:
        done = self._claimed - self._range.start
        return RestrictionProgress(completed=done, remaining=self._range.size - done)

    def check_done(self) -> bool:
        if self._claimed < self._range.stop:
            raise ValueError(f"bytes {self._claimed} to {self._range.stop} were not read")
        return True

    def is_bounded(self) -> bool:
        return True
