"""What is to be written, where, and how: said once, checked once."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal
from uuid import uuid4

import pyarrow as pa

from luminosity.errors import TableError
from luminosity.io.formats import Format, recognise
from luminosity.io.writing import filesystem

__all__ = ["TEMPORARY_PREFIX", "Destination", "IfExists"]

IfExists = Literal["fail", "replace", "append"]
TEMPORARY_PREFIX = ".luminosity-write-"

_SUFFIXES = {"gzip": ".gz", "bz2": ".bz2", "zstd": ".zst", "lz4": ".lz4"}
_CODECS = {
    Format.PARQUET: ("zstd", "snappy", "gzip", "lz4", "brotli", "none"),
    Format.ARROW: ("zstd", "lz4", "none"),
    Format.JSON_LINES: (*_SUFFIXES, "none"),
    Format.CSV: (*_SUFFIXES, "none"),
}


def _new_id() -> str:
    return uuid4().hex[:12]


@dataclass(frozen=True)
class Destination:
    """A folder of files, or one file (``is_one_file``); ``compression`` is None where the format chooses.

    >>> Target.of("out", partition_by="lang").suffix
    '.parquet'
    >>> Target.of("out.jsonl.gz").suffix
    '.jsonl.gz'
    """

    path: str
    is_one_file: bool
    format: Format
    compression: str | None
    partition_by: tuple[str, ...]
    rows_per_file: int | None
    if_exists: IfExists
    schema: pa.Schema | None
    run_id: str = field(default_factory=_new_id)

    @classmethod
    def of(
        cls,
        path: str,
        partition_by: str | Sequence[str] | None = None,
        rows_per_file: int | None = None,
        if_exists: str = "fail",
        format: str | None = None,
        compression: str | None = None,
        schema: pa.Schema | None = None,
    ) -> Destination:
        by = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by or ())
        if if_exists not in ("fail", "replace", "append"):
            raise ValueError(f"found if_exists={if_exists!r}, expected 'fail', 'replace' or 'append'")
        if rows_per_file is not None and rows_per_file < 1:
            raise ValueError(f"found rows_per_file={rows_per_file!r}, expected a whole number from 1 on")
        named = None if path.endswith("/") else _named(path)
        if named is not None and (by or rows_per_file or if_exists == "append"):
            option = "partition_by" if by else "rows_per_file" if rows_per_file else "if_exists='append'"
            raise ValueError(
                f"found {option} for {path}, whose name is that of one file; expected a folder: {path}/ would be one"
            )
        kind = _format(path, format, named)
        codec = _compression(path, compression, kind, named)
        # Workers may stand in another folder than this process.
        whole = os.path.abspath(path) if filesystem.is_local(path) else path.rstrip("/")
        return cls(whole, named is not None, kind, codec, by, rows_per_file, if_exists, schema)

    def for_another_run(self) -> Destination:
        """The same, with temporary files of its own."""
        return replace(self, run_id=_new_id())

    @property
    def folder(self) -> str:
        return filesystem.split(self.path)[0] if self.is_one_file else self.path

    @property
    def temporary_folder(self) -> str:
        """Beside the final files, so that a rename moves no data; its name hides it from readers of tables."""
        return filesystem.join(self.folder, f"{TEMPORARY_PREFIX}{self.run_id}")

    @property
    def suffix(self) -> str:
        return f".{self.format.value}{_SUFFIXES.get(self.whole_file_compression or '', '')}"

    @property
    def whole_file_compression(self) -> str | None:
        """Of text as a whole; Parquet and Arrow files compress their columns themselves."""
        is_text = self.format in (Format.JSON_LINES, Format.CSV)
        return self.compression if is_text and self.compression != "none" else None


def _named(path: str) -> tuple[Format, str | None] | None:
    try:
        return recognise(path)
    except TableError:
        return None


def _format(path: str, said: str | None, named: tuple[Format, str | None] | None) -> Format:
    if said is None:
        return named[0] if named is not None else Format.PARQUET
    if said not in {kind.value for kind in Format}:
        raise ValueError(f"found format={said!r}, expected one of {', '.join(repr(kind.value) for kind in Format)}")
    if named is not None and named[0] is not Format(said):
        raise ValueError(
            f"found format={said!r} for {path}, whose name says {named[0].value!r}; expected them to agree"
        )
    return Format(said)


def _compression(path: str, said: str | None, kind: Format, named: tuple[Format, str | None] | None) -> str | None:
    if said is not None and said not in _CODECS[kind]:
        raise ValueError(
            f"found compression={said!r}, expected one of {', '.join(map(repr, _CODECS[kind]))} for {kind.value} files"
        )
    if named is None:
        return said
    of_name = named[1]
    if of_name is not None and kind in (Format.PARQUET, Format.ARROW):
        raise ValueError(
            f"{path}: a {kind.value} file is not compressed as a whole, its columns are; "
            f"leave the last suffix out and say compression={of_name!r}"
        )
    if kind in (Format.JSON_LINES, Format.CSV) and said is not None and (of_name or "none") != said:
        raise ValueError(
            f"found compression={said!r} for {path}, whose name says {of_name or 'none'!r}; expected them to agree"
        )
    return said or of_name
