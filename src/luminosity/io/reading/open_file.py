"""Open a table's file on any of Beam's file systems, and say what is wrong if that fails."""

from __future__ import annotations

from collections.abc import Generator
from contextlib import contextmanager
from typing import Any

import pyarrow as pa
from apache_beam.io.filesystem import BeamIOError, CompressionTypes
from apache_beam.io.filesystems import FileSystems

from luminosity.errors import TableError
from luminosity.io.reading.find_files import TableFile

__all__ = ["open_bytes", "open_text", "readable"]


def open_bytes(file: TableFile) -> pa.NativeFile:
    """The file as it lies there. pyarrow reads local files itself: Python's lock is not needed for that.

    They are not mapped into memory: a file that shrinks while it is mapped kills the process.
    """
    if FileSystems.get_scheme(file.path) is None:
        opened = pa.OSFile(file.path)
    else:
        opened = pa.PythonFile(FileSystems.open(file.path, compression_type=CompressionTypes.UNCOMPRESSED), mode="r")
    if opened.size() != file.size:  # Ranges of what was there before would lose rows of this, or repeat them.
        raise TableError(
            f"{file.path}: has {opened.size()} bytes, and had {file.size} when the pipeline was built; "
            "is something still writing it?"
        )
    return opened


def open_text(file: TableFile) -> pa.NativeFile:
    """The file, unpacked. What is compressed can't seek."""
    opened = open_bytes(file)
    return opened if file.compression is None else pa.CompressedInputStream(opened, file.compression)


@contextmanager
def readable(file: TableFile) -> Generator[None]:
    """Errors of whatever reads the file become one that names it."""
    try:
        yield
    except TableError:
        raise
    except (OSError, pa.ArrowException, BeamIOError) as error:
        said = " ".join(str(error).split())  # Parquet's come in several lines.
        raise TableError(f"{file.path}: can't be read as {_kind(file)}; {_likely(file, error)} ({said})") from error


def _kind(file: TableFile) -> str:
    return file.format.value + (f" with {file.compression}" if file.compression else "")


def _likely(file: TableFile, error: Any) -> str:
    if isinstance(error, FileNotFoundError):
        return "it is gone, and was there when the pipeline was built: does something clean up, or write there?"
    if isinstance(error, PermissionError):
        return "this user may not read it"
    if "Expected all lists to be of size" in str(error):  # Arrow's words, whatever wrote the file
        return (
            "a column of lists of a fixed size has nulls, which Arrow can't read from Parquet: choose other columns, "
            "or have them written as plain lists, or by WriteTable"
        )
    if file.compression is not None:
        return f"it is damaged, cut off, or not {file.compression} at all"
    return "it is damaged, cut off, or something else under that name"
