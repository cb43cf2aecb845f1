"""The reader of files that are rows: images, recordings, PDFs, texts. Their contents are read only if they are used."""

from __future__ import annotations

import bisect
import datetime
from collections.abc import Iterator, Sequence
from concurrent.futures import ThreadPoolExecutor
from itertools import accumulate

import pyarrow as pa
from apache_beam.io.filesystem import BeamIOError, CompressionTypes
from apache_beam.io.filesystems import FileSystems
from apache_beam.metrics import Metrics

from luminosity._shared.text import format_bytes
from luminosity.errors import Fix, TableError, may_pass
from luminosity.io.reading.find_files import Member, TableFile
from luminosity.io.reading.reader import BATCH_BYTES, ByteRange, Claim, Reader
from luminosity.io.reading.selection import Selection, columns_of
from luminosity.io.reading.text_lines import Report, Unreadable

__all__ = ["BYTES", "FILE_COLUMNS", "FilesReader", "too_large"]

BYTES = "bytes"
"""The column with the contents of files, which is read only if it is named."""
FILE_COLUMNS = pa.schema(
    {"path": pa.string(), "size": pa.int64(), "modified": pa.timestamp("us", "UTC"), BYTES: pa.binary()}
)
_REMOTE_READS = 8  # at once: most of the time of each is waiting
_FILES = Metrics.counter("ReadTable", "files_read")
_BYTES = Metrics.counter("ReadTable", "bytes_read")


class FilesReader(Reader):
    """Reads a group of files as rows. Positions are sums of the files' weights."""

    def __init__(
        self, file: TableFile, selection: Selection, rows_per_batch: int, max_bytes: int, report: Report
    ) -> None:
        self._members = file.members
        self._starts = list(accumulate((each.weight for each in file.members), initial=0))[:-1]
        self._selection = selection
        self._rows = rows_per_batch
        self._max_bytes = max_bytes
        self._report = report
        self._reads_bytes = BYTES in selection.loaded.names
        where = selection.where
        # Rows that the condition leaves out are not read if it needs no contents.
        is_early = where is not None and columns_of(where, selection.stored) <= {"path", "size", "modified"}
        self._where = where if is_early else None

    def cuts(self) -> list[int] | None:
        """Return the positions of the files."""
        return self._starts

    def batches(self, byte_range: ByteRange, claim: Claim) -> Iterator[pa.RecordBatch]:
        """Yield the files that begin in this range; those that can't be read are reported."""
        at = bisect.bisect_left(self._starts, byte_range.start)
        while at < len(self._members):
            stop = self._stop(at)
            granted = claim(self._starts[stop - 1] + 1)
            mine = self._members[at : max(at, min(stop, bisect.bisect_left(self._starts, granted)))]
            if not mine:
                return
            yield self._batch(mine)
            at += len(mine)

    def close(self) -> None:
        """Do nothing: no file stays open."""

    def _stop(self, at: int) -> int:
        """Return the end of the files that make a batch from ``at`` on: at least one."""
        stop, size = at + 1, self._members[at].size
        while stop < min(len(self._members), at + self._rows):
            size += self._members[stop].size
            if self._reads_bytes and size > BATCH_BYTES:
                break
            stop += 1
        return stop

    def _batch(self, members: Sequence[Member]) -> pa.RecordBatch:
        found = _described(members)
        if self._where is not None:
            kept = found.append_column("_", pa.array(range(len(members)))).filter(self._where)["_"].to_pylist()
            members, found = [members[place] for place in kept], found.take(kept)
        if self._reads_bytes:
            contents = self._contents(members)
            found = found.append_column(BYTES, pa.array(contents, pa.binary()))
            found = found.filter(pa.array([content is not None for content in contents], pa.bool_()))
        else:
            _FILES.inc(len(members))
        return found.select(self._selection.loaded.names)

    def _contents(self, members: Sequence[Member]) -> list[bytes | None]:
        """Return the contents of files, None for those that can't be read, which are reported."""
        if members and FileSystems.get_scheme(members[0].path) is not None:
            with ThreadPoolExecutor(min(_REMOTE_READS, len(members))) as pool:
                read = list(pool.map(self._content, members))
        else:
            read = list(map(self._content, members))
        contents: list[bytes | None] = []
        for each in read:
            contents.append(None if isinstance(each, Unreadable) else each)
            if isinstance(each, Unreadable):
                self._report(each)
            else:
                _FILES.inc()
                _BYTES.inc(len(each))
        return contents

    def _content(self, member: Member) -> bytes | Unreadable:
        path, size, _ = member
        if size > self._max_bytes:
            return too_large(path, None, size, self._max_bytes)
        try:
            with FileSystems.open(path, compression_type=CompressionTypes.UNCOMPRESSED) as file:
                content = file.read(size + 1)
        except (OSError, BeamIOError) as error:
            if FileSystems.get_scheme(path) is not None and may_pass(error, in_user_code=False):
                raise TableError(f"{path}: can't be read: {error}", may_pass=True) from error
            return Unreadable(path, None, None, None, f"can't be read: {error}")
        if len(content) != size:
            reason = f"has changed: it had {size:,} bytes when the pipeline was built"
            return Unreadable(path, None, None, None, reason)
        return content


def _described(members: Sequence[Member]) -> pa.RecordBatch:
    """Return all columns but the contents."""
    times = [datetime.datetime.fromtimestamp(each.modified, datetime.timezone.utc) for each in members]
    columns = [[each.path for each in members], [each.size for each in members], times]
    fields = [field for field in FILE_COLUMNS if field.name != BYTES]
    arrays = [pa.array(column, field.type) for column, field in zip(columns, fields, strict=True)]
    return pa.RecordBatch.from_arrays(arrays, schema=pa.schema(fields))


def too_large(path: str, key: str | None, size: int, limit: int) -> Unreadable:
    """Return what to say about a file that is too large to be a value of a row."""
    reason = f"has {format_bytes(size)}, expected at most {format_bytes(limit)}, because a worker holds it in memory"
    fix = Fix(
        "pass max_bytes=, or read the path and open the file yourself",
        command="take the column path instead of bytes: models of images open the files themselves",
    )
    return Unreadable(path, None, None, key, reason, fix)
