"""The formats of a table's files, recognised by their names."""

from __future__ import annotations

import os
from enum import Enum

from luminosity.errors import Fix, TableError

__all__ = ["LIST_SIZE", "Format", "compression_of", "is_row", "recognise"]


LIST_SIZE = b"luminosity.list_size"
"""Key in the metadata of a Parquet column that is stored as plain lists although all its lists have this size."""


class Format(Enum):
    """A file format; the value is what users pass as ``format=``."""

    PARQUET = "parquet"
    JSON_LINES = "jsonl"
    CSV = "csv"
    TSV = "tsv"  # CSV with tabs
    ARROW = "arrow"
    FILES = "files"  # each file is a row
    WEBDATASET = "webdataset"  # tar files; the members with one key are a row

    @property
    def is_written(self) -> bool:
        """Whether tables can be written in this format, too."""
        return self not in (Format.FILES, Format.WEBDATASET)

    @property
    def is_csv(self) -> bool:
        """Whether rows are lines of values with a delimiter between them."""
        return self in (Format.CSV, Format.TSV)

    @property
    def is_text(self) -> bool:
        """Whether rows are lines of text, so that files may be compressed as a whole."""
        return self.is_csv or self is Format.JSON_LINES


_SUFFIXES = {
    ".parquet": Format.PARQUET,
    ".pq": Format.PARQUET,
    ".jsonl": Format.JSON_LINES,
    ".ndjson": Format.JSON_LINES,
    ".json": Format.JSON_LINES,
    ".csv": Format.CSV,
    ".tsv": Format.TSV,
    ".arrow": Format.ARROW,
    ".feather": Format.ARROW,
    ".ipc": Format.ARROW,
    ".tar": Format.WEBDATASET,
}
_ROWS = (
    *(".bmp", ".gif", ".jpeg", ".jpg", ".png", ".tif", ".tiff", ".webp"),
    *(".aac", ".flac", ".m4a", ".mp3", ".ogg", ".opus", ".wav"),
    *(".htm", ".html", ".md", ".pdf", ".rst", ".txt"),
)
_COMPRESSIONS = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}


def recognise(path: str) -> tuple[Format, str | None]:
    """Return the format of a file, and the compression of the file as a whole, if any.

    >>> recognise("reviews/part-1.jsonl.gz")
    (<Format.JSON_LINES: 'jsonl'>, 'gzip')
    >>> recognise("reviews.parquet")
    (<Format.PARQUET: 'parquet'>, None)
    """
    compression = compression_of(path)
    suffix = os.path.splitext(os.path.splitext(path)[0] if compression else path)[1].lower()
    if suffix not in _SUFFIXES:
        raise TableError(
            f"{path}: the name does not tell the format, expected it to end in one of {', '.join(_SUFFIXES)}, "
            f"optionally followed by {', '.join(_COMPRESSIONS)}",
            fix=Fix("pass format="),
        )
    return _SUFFIXES[suffix], compression


def is_row(path: str) -> bool:
    """Return whether a file is an image, a recording, a PDF or a text by its name: a row, not a table.

    >>> is_row("photos/1.JPG"), is_row("photos/labels.csv")
    (True, False)
    """
    return os.path.splitext(path)[1].lower() in _ROWS


def compression_of(path: str) -> str | None:
    """Return pyarrow's name of the compression of the file as a whole, or None.

    >>> compression_of("log.txt.zst")
    'zstd'
    """
    return _COMPRESSIONS.get(os.path.splitext(path)[1].lower())
