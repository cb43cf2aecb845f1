"""The step that reads files: a splittable DoFn over ranges of their bytes."""

from __future__ import annotations

from collections.abc import Generator, Iterator
from typing import Any

import apache_beam as beam
from apache_beam import pvalue
from apache_beam.metrics import Metrics

from luminosity.io.reading.byte_ranges import EVERYTHING, ByteRange, ByteRangeTracker
from luminosity.io.reading.find_files import TableFile
from luminosity.io.reading.open_file import readable
from luminosity.io.reading.reader import PIECE_BYTES, Reader, bounded
from luminosity.io.reading.readers import Settings, open_reader
from luminosity.io.reading.text_lines import Unreadable, letters, raise_unreadable

__all__ = ["UNREADABLE", "ReadRanges"]

UNREADABLE = "unreadable"  # the tag of dead letters

_RANGE = beam.DoFn.RestrictionParam()  # The DoFn itself is the provider.
_ROWS = Metrics.counter("ReadTable", "rows_read")
_BYTES = Metrics.counter("ReadTable", "bytes_read")
_UNREADABLE = Metrics.counter("ReadTable", "lines_unreadable")
_FILES = Metrics.counter("ReadTable", "files_read")


class ReadRanges(beam.DoFn, beam.RestrictionProvider):
    """Reads ranges of a file's bytes; a row belongs to the range in which it begins.

    Lines that can't be read are dead letters if the settings say so; otherwise they end the run. The last file stays
    open, since the next range is often in the same file.
    """

    def __init__(self, settings: Settings) -> None:
        self._settings = settings
        self._open: tuple[TableFile, Reader] | None = None
        self._unreadable: list[Unreadable] = []

    def process(self, element: TableFile, tracker: Any = _RANGE) -> Iterator[Any]:
        """Read the rows that begin in the range, and count rows, bytes and files."""
        byte_range = tracker.current_restriction()
        reached = byte_range.start
        self._unreadable.clear()

        def claim(position: int) -> int:
            nonlocal reached
            granted = int(tracker.try_claim(position))
            if reached == 0 < granted:
                _FILES.inc()
            _BYTES.inc(granted - reached)
            reached = granted
            return granted

        is_read = False
        try:
            with readable(element):
                for batch in self._reader(element).batches(byte_range, claim):
                    finished = self._settings.selection.finish(batch, element.partition)
                    for part in bounded(finished, self._settings.rows_per_batch):
                        _ROWS.inc(part.num_rows)
                        yield part
                    yield from self._letters()
                yield from self._letters()
                claim(EVERYTHING)
            is_read = True
        finally:
            if not is_read:
                self.teardown()  # The reader may be anywhere in the file, so it can't be used again.

    def _letters(self) -> Iterator[Any]:
        """Yield the lines that could not be read since the last call."""
        if self._unreadable:
            _UNREADABLE.inc(len(self._unreadable))
            yield pvalue.TaggedOutput(UNREADABLE, letters(self._unreadable))
            self._unreadable.clear()

    def teardown(self) -> None:
        """Close the file that is still open."""
        if self._open is not None:
            self._open[1].close()
            self._open = None

    def initial_restriction(self, element: TableFile) -> ByteRange:
        """Return the range of the whole file; an empty file counts as one byte."""
        return ByteRange(0, max(1, element.size))

    def create_tracker(self, restriction: ByteRange) -> ByteRangeTracker:
        """Return a tracker that grants claims up to a byte."""
        return ByteRangeTracker(restriction)

    def split(self, element: TableFile, restriction: ByteRange) -> Generator[ByteRange, Any, None]:
        """Cut a large range where the file's format allows it."""
        if restriction.size <= PIECE_BYTES:
            yield restriction
            return
        with readable(element):
            cuts = self._reader(element).cuts()
        yield from restriction.pieces(PIECE_BYTES, cuts)

    def restriction_size(self, element: TableFile, restriction: ByteRange) -> int:
        """Return the bytes of the range."""
        return restriction.size

    def _reader(self, file: TableFile) -> Reader:
        if self._open is None or self._open[0] != file:
            self.teardown()
            report = self._unreadable.append if self._settings.keeps_unreadable else raise_unreadable
            self._open = file, open_reader(file, self._settings, report)
        return self._open[1]
