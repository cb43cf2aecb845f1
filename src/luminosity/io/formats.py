"""Which format a table's file has: its name tells."""

from __future__ import annotations

import os
from enum import Enum

from luminosity.errors import TableError

__all__ = ["LIST_SIZE", "Format", "compression_of", "recognise"]


LIST_SIZE = b"luminosity.list_size"
"""In the metadata of a Parquet file's column: its lists are all of this size, though they are called plain ones."""


class Format(Enum):
    PARQUET = "parquet"
    JSON_LINES = "jsonl"
    CSV = "csv"
    ARROW = "arrow"


_SUFFIXES = {
    ".parquet": Format.PARQUET,
    ".pq": Format.PARQUET,
    ".jsonl": Format.JSON_LINES,
    ".ndjson": Format.JSON_LINES,
    ".json": Format.JSON_LINES,
    ".csv": Format.CSV,
    ".arrow": Format.ARROW,
    ".feather": Format.ARROW,
    ".ipc": Format.ARROW,
}
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}


def recognise(path: str) -> tuple[Format, str | None]:
    """The format of a file, and how it is compressed as a whole.

    >>> recognise("reviews/part-1.jsonl.gz")
    (<Format.JSON_LINES: 'jsonl'>, 'gzip')
    >>> recognise("reviews.parquet")
    (<Format.PARQUET: 'parquet'>, None)
    """
    compression = compression_of(path)
    suffix = os.path.splitext(os.path.splitext(path)[0] if compression else path)[1].lower()
    if suffix not in _SUFFIXES:
        raise TableError(
            f"{path}: the name does not tell the format; expected it to end in one of {', '.join(_SUFFIXES)}, "
            f"perhaps with {', '.join(_COMPRESSIONS)} behind it; or say format= yourself"
        )
    return _SUFFIXES[suffix], compression


def compression_of(path: str) -> str | None:
    """How a file is compressed as a whole, as pyarrow calls it.

    >>> compression_of("log.txt.zst")
    'zstd'
    """
    return _COMPRESSIONS.get(os.path.splitext(path)[1].lower())
