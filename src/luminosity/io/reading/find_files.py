"""Find the files that a pattern names."""

from __future__ import annotations

import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from apache_beam.io.filesystem import BeamIOError, FileMetadata
from apache_beam.io.filesystems import FileSystems

from luminosity._shared.text import did_you_mean, list_some
from luminosity.errors import TableError
from luminosity.io.formats import Format, compression_of, recognise
from luminosity.io.remote import explain_remote, give_options

__all__ = ["TableFile", "find_files"]

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
