"""Find the files that a pattern names, open them, and explain why one can't be read."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Generator, Iterable, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any, NamedTuple
from urllib.parse import unquote

import pyarrow as pa
from apache_beam.io.filesystem import BeamIOError, CompressionTypes, FileMetadata
from apache_beam.io.filesystems import FileSystems

from luminosity._shared.text import did_you_mean, list_some
from luminosity.errors import Fix, TableError, may_pass
from luminosity.io.formats import Format, compression_of, is_row, recognise
from luminosity.io.remote import explain_remote, give_options

__all__ = ["Member", "TableFile", "find_files", "open_bytes", "open_text", "readable"]

_GLOB = re.compile(r"[*?\[]")
_NULL = "__HIVE_DEFAULT_PARTITION__"  # the name that Hive and Spark give to the folder of nulls
_ABOUT = ("README", "LICENSE")  # how the names of files about a table begin
_SHOWN_NAMES = 5  # enough to recognise a wrong folder in one line
_OPENING_BYTES = 16 << 10  # opening a file takes as long as reading about this much
_GROUP_BYTES = 8 << 20  # of the files of a group: as much as a piece of a table's file
_GROUP_FILES = 512  # of empty files, so that several workers share them


class Member(NamedTuple):
    """A file that is a row of a table, as it was found: its size, and when it was changed, since the epoch."""

    path: str
    size: int
    modified: float

    @property
    def weight(self) -> int:
        """The work that the file is, in bytes; more than 0."""
        return self.size + _OPENING_BYTES


@dataclass(frozen=True)
class TableFile:
    """A file of a table; ``partition`` holds the columns and values in the names of its folders.

    If files are rows, it is a group of them, its ``members``: the path is that of the first, the size their weight.
    """

    path: str
    size: int
    format: Format
    compression: str | None = None
    partition: tuple[tuple[str, str | None], ...] = ()
    members: tuple[Member, ...] = ()

    def luminosity_user_data(self) -> str:
        """Return the path, for error messages."""
        return self.path


def find_files(
    patterns: Sequence[str], table_format: Format | None, left_out: list[str] | None = None
) -> list[TableFile]:
    """Return all files that the patterns match, sorted by path.

    Adds the files in folders that are no part of the table, by their names or those of their folders, to ``left_out``.
    """
    skipped: list[str] = [] if left_out is None else left_out
    found = {file.path: file for pattern in patterns for file in _find(pattern, table_format, skipped)}
    return list(_grouped(found[path] for path in sorted(found)))


def _grouped(files: Iterable[TableFile]) -> Iterator[TableFile]:
    """Yield the files, but those that are rows in groups: one element for each would cost more than to read it."""
    members: list[Member] = []
    for file in files:
        if file.format is not Format.FILES:
            yield file
            continue
        [member] = file.members
        if members and (len(members) == _GROUP_FILES or _weight(members) + member.weight > _GROUP_BYTES):
            yield _group(members)
            members = []
        members.append(member)
    if members:
        yield _group(members)


def _group(members: Sequence[Member]) -> TableFile:
    return TableFile(members[0].path, _weight(members), Format.FILES, members=tuple(members))


def _weight(members: Iterable[Member]) -> int:
    return sum(member.weight for member in members)


def _find(pattern: str, table_format: Format | None, left_out: list[str]) -> list[TableFile]:
    if not _GLOB.search(pattern) and (os.path.isdir(pattern) or pattern.endswith("/")):
        files = list(_in_folder(pattern, table_format, left_out))
    elif matched := _match(pattern):
        # One text file is more likely a table with another name than a row.
        may_be_rows = table_format is None and _GLOB.search(pattern) is not None
        files = [
            _table_file(each, Format.FILES if may_be_rows and is_row(each.path) else table_format)
            for each in matched
            if not _GLOB.search(pattern) or not _is_hidden(posixpath.basename(each.path))
        ]
    else:
        files = [] if _GLOB.search(pattern) else list(_in_folder(pattern, table_format, left_out))
    if not files:
        raise _not_found(pattern)
    return files


def _in_folder(folder: str, table_format: Format | None, left_out: list[str]) -> Iterator[TableFile]:
    """Yield the table files in the folder, and in folders below it that are named ``column=value``.

    If files are rows, yield those of all folders below it. Without a format, they are if the folder has no table.
    """
    folder = folder.rstrip("/")
    there = [
        each
        for each in _match(folder + "/**")
        if not any(_is_hidden(part) for part in each.path[len(folder) + 1 :].split("/"))
    ]
    if table_format is None and _holds_rows(there):
        left_out += [each.path for each in there if not is_row(each.path) and not _is_about(each.path)]
        there, table_format = [each for each in there if is_row(each.path) and not _is_about(each.path)], Format.FILES
    if table_format is Format.FILES:
        yield from (_table_file(each, table_format) for each in there)
        return
    for each in there:
        *folders, _ = each.path[len(folder) + 1 :].split("/")
        if any("=" not in inner for inner in folders):
            left_out.append(each.path)
            continue
        try:
            yield _table_file(each, table_format, tuple(map(_column_and_value, folders)))
        except TableError:
            if not _is_about(each.path):
                left_out.append(each.path)


def _holds_rows(files: Sequence[FileMetadata]) -> bool:
    """Return whether there are files that are rows, and no table in any folder."""
    paths = [each.path for each in files if not _is_about(each.path)]
    return any(map(is_row, paths)) and not any(map(_is_table, paths))


def _is_table(path: str) -> bool:
    try:
        recognise(path)
    except TableError:
        return False
    return True


def _is_about(path: str) -> bool:
    return posixpath.basename(path).upper().startswith(_ABOUT)


def _match(pattern: str) -> list[FileMetadata]:
    if FileSystems.get_scheme(pattern) is not None:
        return _match_remote(pattern)
    if not os.path.dirname(pattern):
        pattern = os.path.join(".", pattern)  # Beam finds nothing for a pattern without a folder.
    try:
        return FileSystems.match([pattern])[0].metadata_list
    except (BeamIOError, ValueError) as error:
        raise TableError(f"{pattern}: can't look for files there: {error}") from error


def _match_remote(pattern: str) -> list[FileMetadata]:
    give_options()
    try:
        return FileSystems.match([pattern])[0].metadata_list
    except Exception as error:  # Each library has its own errors, for example for missing credentials.
        message, fix = explain_remote(pattern, error)
        raise TableError(f"{pattern}: {message}", fix=fix) from error


def _table_file(
    found: FileMetadata, table_format: Format | None, partition: tuple[tuple[str, str | None], ...] = ()
) -> TableFile:
    path, size = found.path, found.size_in_bytes
    if table_format is Format.FILES:
        member = Member(path, size, found.last_updated_in_seconds)
        return TableFile(path, member.weight, Format.FILES, members=(member,))
    form, compression = (table_format, compression_of(path)) if table_format else recognise(path)
    return TableFile(path, size, form, compression, partition)


def _is_hidden(name: str) -> bool:
    """Return whether writers give such a name to files beside a table: markers, checksums, unfinished files."""
    return name.startswith(("_", "."))


def _column_and_value(folder: str) -> tuple[str, str | None]:
    column, _, value = folder.partition("=")
    return unquote(column), None if value == _NULL else unquote(value)


def _not_found(pattern: str) -> TableError:
    """Return an error that shows the nearest folder that exists, and what is in it."""
    message = f"no table file matches {pattern}"
    if FileSystems.get_scheme(pattern) is not None:
        return TableError(message, fix="check the address, and that your credentials allow listing it")
    folder = os.path.abspath(_GLOB.split(pattern)[0])
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    names = sorted(os.listdir(folder))
    contents = f"contains {list_some(names, _SHOWN_NAMES)}" if names else "is empty"
    return TableError(
        f"{message}; the nearest folder that exists is {folder}, which {contents}",
        fix=did_you_mean(os.path.relpath(pattern, folder), names) or None,
    )


def open_bytes(file: TableFile) -> pa.NativeFile:
    """Open the file without decompressing it. pyarrow reads local files itself, without Python's lock.

    Files are not mapped into memory: a mapped file that shrinks kills the process.
    """
    if FileSystems.get_scheme(file.path) is None:
        opened = pa.OSFile(file.path)
    else:
        opened = pa.PythonFile(FileSystems.open(file.path, compression_type=CompressionTypes.UNCOMPRESSED), mode="r")
    if opened.size() != file.size:  # The byte ranges fit the old content: they would lose or repeat rows.
        raise TableError(
            f"{file.path}: found {opened.size()} bytes, expected {file.size} as when the pipeline was built",
            fix="wait until nothing writes the file any more",
        )
    return opened


def open_text(file: TableFile) -> pa.NativeFile:
    """Open the file and decompress it. A compressed file can't seek."""
    opened = open_bytes(file)
    return opened if file.compression is None else pa.CompressedInputStream(opened, file.compression)


@contextmanager
def readable(file: TableFile) -> Generator[None]:
    """Turn the errors of reading a file into a ``TableError`` that names the file and the likely cause."""
    try:
        yield
    except TableError:
        raise
    except (OSError, pa.ArrowException, BeamIOError) as error:
        cause, fix = _likely_cause(file, error)
        details = " ".join(str(error).split())  # The errors of Parquet have several lines.
        is_local = FileSystems.get_scheme(file.path) is None
        raise TableError(
            f"{file.path}: can't be read as {_kind(file)}: {cause} ({details})",
            fix=fix,
            may_pass=not is_local and may_pass(error, in_user_code=False),
        ) from error


def _kind(file: TableFile) -> str:
    return file.format.value + (f" with {file.compression}" if file.compression else "")


def _likely_cause(file: TableFile, error: Any) -> tuple[str, Fix | str | None]:
    if isinstance(error, FileNotFoundError):
        return (
            "the file existed when the pipeline was built and is gone",
            "check whether something cleans up or writes there",
        )
    if isinstance(error, PermissionError):
        return "this user may not read it", None
    if "Expected all lists to be of size" in str(error):  # Arrow's words, whatever wrote the file
        return (
            "a column of fixed-size lists has nulls, which Arrow can't read from Parquet",
            Fix(
                "read other columns with columns=, or write the table with plain lists or with WriteTable",
                command="read other columns with --columns, or write the table with plain lists",
            ),
        )
    if file.compression is not None:
        return f"it is damaged, incomplete, or not {file.compression}", None
    return "it is damaged, incomplete, or has another format than its name says", None
