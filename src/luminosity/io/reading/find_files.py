"""Which files a pattern means."""

from __future__ import annotations

import difflib
import os
import posixpath
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from urllib.parse import unquote

from apache_beam.io.filesystem import BeamIOError, FileMetadata
from apache_beam.io.filesystems import FileSystems

from luminosity.errors import TableError
from luminosity.io.formats import Format, compression_of, recognise

__all__ = ["TableFile", "find_files"]

_GLOB = re.compile(r"[*?\[]")
_NULL = "__HIVE_DEFAULT_PARTITION__"


@dataclass(frozen=True)
class TableFile:
    """A file of a table; `partition` has the columns that the names of its folders hold."""

    path: str
    size: int
    format: Format
    compression: str | None = None
    partition: tuple[tuple[str, str | None], ...] = ()


def find_files(patterns: Sequence[str], table_format: Format | None) -> list[TableFile]:
    """All files that the patterns match, in the order of their names."""
    found = {file.path: file for pattern in patterns for file in _find(pattern, table_format)}
    return [found[path] for path in sorted(found)]


def _find(pattern: str, table_format: Format | None) -> list[TableFile]:
    if not _GLOB.search(pattern) and (os.path.isdir(pattern) or pattern.endswith("/")):
        files = list(_of_folder(pattern, table_format))
    elif matched := _match(pattern):
        files = [
            _table_file(each, table_format)
            for each in matched
            if not _GLOB.search(pattern) or not _is_hidden(posixpath.basename(each.path))
        ]
    else:
        files = [] if _GLOB.search(pattern) else list(_of_folder(pattern, table_format))
    if not files:
        raise TableError(f"no table's file matches {pattern}; {_what_is_there(pattern)}")
    return files


def _of_folder(folder: str, table_format: Format | None) -> Iterator[TableFile]:
    """Files in the folder, and in folders below it that are named `column=value`."""
    folder = folder.rstrip("/")
    for each in _match(folder + "/**"):
        *folders, name = each.path[len(folder) + 1 :].split("/")
        if _is_hidden(name) or any(_is_hidden(inner) or "=" not in inner for inner in folders):
            continue
        try:
            yield _table_file(each, table_format, tuple(map(_column_and_value, folders)))
        except TableError:  # Something else that lies beside the table: a checksum, a README.
            continue


def _match(pattern: str) -> list[FileMetadata]:
    if FileSystems.get_scheme(pattern) is None and not os.path.dirname(pattern):
        pattern = os.path.join(".", pattern)  # Beam finds nothing for a pattern that is a bare name.
    try:
        return FileSystems.match([pattern])[0].metadata_list
    except (BeamIOError, ValueError) as error:
        raise TableError(f"{pattern}: can't look for files there; {error}") from error


def _table_file(
    found: FileMetadata, table_format: Format | None, partition: tuple[tuple[str, str | None], ...] = ()
) -> TableFile:
    path, size = found.path, found.size_in_bytes
    form, compression = (table_format, compression_of(path)) if table_format else recognise(path)
    return TableFile(path, size, form, compression, partition)


def _is_hidden(name: str) -> bool:
    """Writers leave such files beside a table: markers, checksums, what is not finished."""
    return name.startswith(("_", "."))


def _column_and_value(folder: str) -> tuple[str, str | None]:
    column, _, value = folder.partition("=")
    return unquote(column), None if value == _NULL else unquote(value)


def _what_is_there(pattern: str) -> str:
    """The nearest folder that exists, and what is in it."""
    if FileSystems.get_scheme(pattern) is not None:
        return "check the address, and that these credentials may list it"
    folder = os.path.abspath(_GLOB.split(pattern)[0])
    while not os.path.isdir(folder):
        folder = os.path.dirname(folder)
    names = sorted(os.listdir(folder))
    shown = ", ".join(names[:5]) + (f" and {len(names) - 5} more" if len(names) > 5 else "")
    alike = difflib.get_close_matches(os.path.relpath(pattern, folder), names, n=1)
    hint = f"; did you mean {alike[0]}?" if alike else ""
    return f"the nearest folder that exists is {folder}, which has {shown or 'nothing in it'}{hint}"
