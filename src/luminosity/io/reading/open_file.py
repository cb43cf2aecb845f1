"""Open a table's file on any of Beam's file systems, and explain why it can't be read."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from apache_beam.io.filesystem import BeamIOError, CompressionTypes
from apache_beam.io.filesystems import FileSystems

from luminosity.errors import Fix, TableError, may_pass
from luminosity.io.reading.find_files import TableFile

__all__ = ["open_bytes", "open_text", "readable"]


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
