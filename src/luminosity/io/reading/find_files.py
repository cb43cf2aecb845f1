"""Find the files that a pattern names, open them, and explain why one can't be read."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Generator, Iterator, Sequence
from contextlib import contextmanager
from dataclasses import dataclass
from typing import Any
from urllib.parse import unquote

import pyarrow as pa
from apache_beam.io.filesystem import BeamIOError, CompressionTypes, FileMetadata
from apache_beam.io.filesystems import FileSystems

from luminosity._shared.text import did_you_mean, list_some
from luminosity.errors import Fix, TableError, may_pass
from luminosity.io.formats import Format, compression_of, recognise
from luminosity.io.remote import explain_remote, give_options

__all__ = ["TableFile", "find_files", "open_bytes", "open_text", "readable"]

_GLOB = re.compile(r"[*?\[]")
_NULL = "__HIVE_DEFAULT_PARTITION__"  # the name that Hive and Spark give to the folder of nulls
_ABOUT = ("README", "LICENSE")  # how the names of files about a table begin
_SHOWN_NAMES = 5  # enough to recognise a wrong folder in one line


@dataclass(frozen=True)
class TableFile:
    """A file of a table; ``partition`` holds the columns and values in the names of its folders."""

    path: str
    size: int
    format: Format
    compression: str | None = None
    partition: tuple[tuple[str, str | None], ...] = ()

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
    return [found[path] for path in sorted(found)]


def _find(pattern: str, table_format: Format | None, left_out: list[str]) -> list[TableFile]:
    if not _GLOB.search(pattern) and (os.path.isdir(pattern) or pattern.endswith("/")):
        files = list(_in_folder(pattern, table_format, left_out))
    elif matched := _match(pattern):
        files = [
            _table_file(each, table_format)
            for each in matched
            if not _GLOB.search(pattern) or not _is_hidden(posixpath.basename(each.path))
        ]
    else:
        files = [] if _GLOB.search(pattern) else list(_in_folder(pattern, table_format, left_out))
    if not files:
        raise _not_found(pattern)
    return files


def _in_folder(folder: str, table_format: Format | None, left_out: list[str]) -> Iterator[TableFile]:
    """Yield the table files in the folder, and in folders below it that are named ``column=value``."""
    folder = folder.rstrip("/")
    for each in _match(folder + "/**"):
        *folders, name = each.path[len(folder) + 1 :].split("/")
        if _is_hidden(name) or any(map(_is_hidden, folders)):
            continue
        if any("=" not in inner for inner in folders):
            left_out.append(each.path)
            continue
        try:
            yield _table_file(each, table_format, tuple(map(_column_and_value, folders)))
        except TableError:
            if not name.upper().startswith(_ABOUT):
                left_out.append(each.path)


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
