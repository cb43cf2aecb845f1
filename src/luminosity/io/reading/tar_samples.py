"""The reader of WebDataset shards: tar files in which members with one key, one after the other, are a row."""

from __future__ import annotations

import posixpath
import tarfile
from collections.abc import Generator, Iterator
from contextlib import contextmanager
from dataclasses import dataclass, field
from itertools import islice
from typing import Any

import pyarrow as pa

from luminosity.errors import Fix
from luminosity.io.reading.file_rows import too_large
from luminosity.io.reading.find_files import TableFile, open_text
from luminosity.io.reading.reader import BATCH_BYTES, ByteRange, Claim, Reader, claim_whole
from luminosity.io.reading.selection import Selection
from luminosity.io.reading.text_lines import Report, Unreadable

__all__ = ["KEY", "SamplesReader", "samples_schema"]

KEY = "__key__"
"""The column of keys, as WebDataset calls it."""
_TEXTS = ("caption", "csv", "htm", "html", "json", "jsonl", "md", "text", "tsv", "txt", "xml")
_NUMBERS = ("class", "cls", "count", "id", "index")  # of these extensions, if all values are
_SEEN = 1_000  # samples that columns are guessed from
_MOST_GUESSED_BYTES = 64  # of a value that may be a number


@dataclass
class _Sample:
    """The members of a row; ``values`` has their contents, None for a column that is not read."""

    key: str
    values: dict[str, bytes | None] = field(default_factory=dict[str, bytes | None])
    problem: Unreadable | None = None

    @property
    def size(self) -> int:
        return sum(len(value) for value in self.values.values() if value is not None)


class SamplesReader(Reader):
    """Reads a shard in one piece: a tar file has no index."""

    def __init__(
        self, file: TableFile, selection: Selection, rows_per_batch: int, max_bytes: int, report: Report
    ) -> None:
        self._file = file
        self._selection = selection
        self._rows = rows_per_batch
        self._max_bytes = max_bytes
        self._report = report

    def cuts(self) -> list[int] | None:
        """Return no cuts."""
        return []

    def batches(self, byte_range: ByteRange, claim: Claim) -> Iterator[pa.RecordBatch]:
        """Yield the rows of the shard; those that can't be read are reported."""
        if not claim_whole(byte_range.start, claim):
            return
        rows: list[dict[str, Any]] = []
        size = 0
        for sample in _samples(self._file, set(self._selection.loaded.names), self._max_bytes, self._report):
            row = self._row(sample)
            if isinstance(row, Unreadable):
                self._report(row)
                continue
            rows.append(row)
            size += sample.size
            if len(rows) == self._rows or size >= BATCH_BYTES:
                yield self._batch(rows)
                rows, size = [], 0
        yield self._batch(rows)

    def close(self) -> None:
        """Do nothing: the shard is open only while it is read."""

    def _row(self, sample: _Sample) -> dict[str, Any] | Unreadable:
        if sample.problem is not None:
            return sample.problem
        row: dict[str, Any] = {KEY: sample.key}
        for name, value in sample.values.items():
            if name not in self._selection.stored.names:
                reason = f"has a member .{name}, expected one of {', '.join(self._selection.stored.names)}"
                return self._unreadable(sample, reason, Fix("pass schema= with all columns of the shards"))
            if value is None:
                continue
            kind = self._selection.stored.field(name).type
            try:
                row[name] = _converted(value, kind)
            except (UnicodeDecodeError, pa.ArrowException) as error:
                return self._unreadable(sample, f"its .{name} is no {kind}: {error}", None)
        return row

    def _unreadable(self, sample: _Sample, reason: str, fix: Fix | None) -> Unreadable:
        return Unreadable(self._file.path, None, None, sample.key, reason, fix)

    def _batch(self, rows: list[dict[str, Any]]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist(rows, schema=self._selection.loaded)


def samples_schema(file: TableFile, report: Report) -> pa.Schema | None:
    """Return the columns of a shard by its first samples: the key, and one for each extension; None without any.

    Texts and JSON are strings, ``cls`` and the like are integers if all of them are, everything else is binary.
    """
    numbers: dict[str, bool] = {}
    samples = _samples(file, set(_NUMBERS), _MOST_GUESSED_BYTES, lambda problem: None)
    for sample in islice(samples, _SEEN):
        for name, value in sample.values.items():
            numbers[name] = numbers.get(name, True) and value is not None and _is_number(value)
    if not numbers:
        next(_samples(file, set(), 0, report), None)  # It reports what is wrong with the shard.
        return None
    kinds = {
        name: pa.int64() if numbers[name] else pa.string() if name in (*_TEXTS, *_NUMBERS) else pa.binary()
        for name in numbers
    }
    return pa.schema({KEY: pa.string(), **kinds})


def _is_number(value: bytes) -> bool:
    digits = value.strip().removeprefix(b"-")
    return digits.isdigit() and len(digits) < 19


def _converted(value: bytes, kind: pa.DataType) -> Any:
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return value
    text = value.decode()
    return text if pa.types.is_string(kind) else pa.scalar(text.strip(), pa.string()).cast(kind).as_py()


class _Header(tarfile.TarInfo):
    """Keeps why a shard has no further header: tarfile ends at a damaged one as if it were the last."""

    @classmethod
    def fromtarfile(cls, tarfile: Any) -> Any:
        try:
            return super().fromtarfile(tarfile)
        except Exception as error:
            tarfile.ended_by = error
            raise


def _samples(file: TableFile, loaded: set[str], max_bytes: int, report: Report) -> Iterator[_Sample]:
    """Yield the samples of a shard. If its rest is damaged, report it, and end."""
    sample: _Sample | None = None
    try:
        with _archive(file) as archive:
            while (member := archive.next()) is not None:
                archive.members.clear()  # it would keep all headers of the shard
                folder, name = posixpath.split(member.name)
                if member.isdir() or name.startswith((".", "__")):
                    continue
                stem, _, extension = name.partition(".")
                key = posixpath.join(folder, stem)
                if sample is not None and sample.key != key:
                    yield sample
                    sample = None
                sample = sample or _Sample(key)
                _add(sample, file.path, archive, member, extension.lower(), loaded, max_bytes)
            ended_by = type(getattr(archive, "ended_by", None)).__name__
        if ended_by != "EOFHeaderError":
            report(_cut_off(file, sample, "its end is missing" if ended_by == "EmptyHeaderError" else "it is damaged"))
            return  # The last sample may lack members.
    except (tarfile.TarError, OSError, pa.ArrowException, EOFError) as error:
        report(_cut_off(file, sample, f"it is damaged or cut off ({error})"))
        return
    if sample is not None:
        yield sample


@contextmanager
def _archive(file: TableFile) -> Generator[Any]:
    with open_text(file) as stream:
        mode: Any = "r|" if file.compression is not None else "r:"
        with tarfile.open(fileobj=stream, mode=mode, tarinfo=_Header) as archive:
            yield archive


def _add(
    sample: _Sample, path: str, archive: Any, member: tarfile.TarInfo, name: str, loaded: set[str], max_bytes: int
) -> None:
    """Add a member to its row, or what is wrong with it."""
    if not name or name in sample.values or name == KEY:
        what = f"two members .{name}" if name else "a member without an extension"
        sample.problem = Unreadable(path, None, None, sample.key, f"has {what}, expected one for each column")
    elif not member.isreg() or member.issparse():
        reason = f"its .{name} is no plain file of the archive"
        sample.problem = Unreadable(path, None, None, sample.key, reason)
    elif name not in loaded:
        sample.values[name] = None
    elif member.size > max_bytes:
        sample.values[name] = None
        sample.problem = too_large(path, sample.key, member.size, max_bytes)
    else:
        sample.values[name] = archive.extractfile(member).read()


def _cut_off(file: TableFile, sample: _Sample | None, reason: str) -> Unreadable:
    where = "from its beginning" if sample is None else f"from the key {sample.key} on"
    return Unreadable(file.path, None, None, None, f"can't be read {where}: {reason}")
