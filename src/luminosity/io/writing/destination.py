"""The destination of a table: where its files are written, and how."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import pyarrow as pa

from luminosity.errors import Fix, InvalidArgument, InvalidType, TableError
from luminosity.io.formats import Format, recognise
from luminosity.io.run_owner import RunOwner, owner_in_name, owner_of
from luminosity.io.writing import filesystem
from luminosity.runs.run_ids import CheckpointedRun, RunIdentity, new_id

__all__ = ["TEMPORARY_PREFIX", "Destination", "IfEmpty", "IfExists"]

IfExists = Literal["fail", "replace", "append"]
IfEmpty = Literal["fail", "keep", "write"]
"""What to do instead of replacing a table by one without rows. ``"keep"`` leaves the old table without an error."""
TEMPORARY_PREFIX = ".luminosity-write-"

_NO_CHECKPOINT = RunIdentity()
_SUFFIXES = {"gzip": ".gz", "bz2": ".bz2", "zstd": ".zst", "lz4": ".lz4"}
_CODECS = {
    Format.PARQUET: ("zstd", "snappy", "gzip", "lz4", "brotli", "none"),
    Format.ARROW: ("zstd", "lz4", "none"),
    Format.JSON_LINES: (*_SUFFIXES, "none"),
    Format.CSV: (*_SUFFIXES, "none"),
    Format.TSV: (*_SUFFIXES, "none"),
}


@dataclass(frozen=True)
class Destination:
    """A folder of files, or one file (``is_one_file``), with the settings to write it. It is sent to the workers.

    ``compression`` is None if the format chooses it.

    >>> Destination.of("out", partition_by="lang").suffix
    '.parquet'
    >>> Destination.of("out.jsonl.gz").suffix
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
    if_empty: IfEmpty = "fail"
    empty_schema: pa.Schema | None = None  # of the file that is written if there are no rows
    run_id: str = field(default_factory=new_id)
    checkpoint_dir: str = ""  # of a run with a checkpoint

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
        allow_empty: bool | pa.Schema = False,
    ) -> Destination:
        """Check the arguments of ``WriteTable`` and return the destination that they describe."""
        by = (partition_by,) if isinstance(partition_by, str) else tuple(partition_by or ())
        if if_exists not in ("fail", "replace", "append"):
            raise InvalidArgument(f"found if_exists={if_exists!r}, expected 'fail', 'replace' or 'append'")
        if not isinstance(allow_empty, bool | pa.Schema):
            raise InvalidType(
                f"found allow_empty= of type {type(allow_empty).__name__}, expected True, False or a pyarrow.Schema"
            )
        if rows_per_file is not None and rows_per_file < 1:
            raise InvalidArgument(f"found rows_per_file={rows_per_file!r}, expected 1 or more")
        named = None if path.endswith("/") else _named(path)
        if named is not None and (by or rows_per_file or if_exists == "append"):
            purpose = "partition_by" if by else "rows_per_file" if rows_per_file else "appending"
            raise InvalidArgument(
                f"{path}: found the name of one file, expected a folder for {purpose}", fix=f"write to {path}/ instead"
            )
        kind = _format(path, format, named)
        codec = _compression(path, compression, kind, named)
        # Workers may run in another folder than this process.
        whole = os.path.abspath(path) if filesystem.is_local(path) else path.rstrip("/")
        return cls(
            path=whole,
            is_one_file=named is not None,
            format=kind,
            compression=codec,
            partition_by=by,
            rows_per_file=rows_per_file,
            if_exists=if_exists,
            schema=schema,
            if_empty="fail" if allow_empty is False else "write",
            empty_schema=allow_empty if isinstance(allow_empty, pa.Schema) else schema,
        )

    def for_another_run(self, identity: RunIdentity = _NO_CHECKPOINT) -> Destination:
        """Return the same destination with a folder for temporary files of a run.

        The folder is new, unless the run has a checkpoint: then it is the same for all starts of the run.
        """
        last = str(identity.number(self.path)) if identity.is_durable else new_id()
        run_id = f"{owner_of(identity)}-{self.table_id}-{last}"
        return replace(self, run_id=run_id, checkpoint_dir=identity.checkpoint_dir)

    @property
    def owner(self) -> RunOwner | CheckpointedRun | None:
        """The process or the run with a checkpoint that writes the table."""
        return owner_in_name(self.run_id)

    @property
    def table_id(self) -> str:
        """A short name of the table in the names of temporary folders; several files may lie in one folder."""
        name = filesystem.split(self.path)[1] if self.is_one_file else ""
        return f"f{hashlib.sha256(name.encode()).hexdigest()[:8]}" if name else "table"

    @property
    def folder(self) -> str:
        """The folder that contains the final files."""
        return filesystem.split(self.path)[0] if self.is_one_file else self.path

    @property
    def temporary_folder(self) -> str:
        """The folder of the temporary files. It is beside the final files, so that a rename moves no data.

        Its name begins with a dot, so that readers of tables ignore it.
        """
        return filesystem.join(self.folder, f"{TEMPORARY_PREFIX}{self.run_id}")

    @property
    def suffix(self) -> str:
        """The suffix of the files, such as ``.jsonl.gz``."""
        return f".{self.format.value}{_SUFFIXES.get(self.whole_file_compression or '', '')}"

    @property
    def whole_file_compression(self) -> str | None:
        """The compression of text files as a whole; Parquet and Arrow files compress their columns themselves."""
        return self.compression if self.format.is_text and self.compression != "none" else None


def _named(path: str) -> tuple[Format, str | None] | None:
    try:
        return recognise(path)
    except TableError:
        return None


def _format(path: str, given: str | None, named: tuple[Format, str | None] | None) -> Format:
    if given is None:
        return named[0] if named is not None else Format.PARQUET
    if given not in {kind.value for kind in Format}:
        raise InvalidArgument(
            f"found format={given!r}, expected one of {', '.join(repr(kind.value) for kind in Format)}"
        )
    if named is not None and named[0] is not Format(given):
        raise InvalidArgument(f"{path}: found format={given!r}, expected {named[0].value!r} because of the suffix")
    return Format(given)


def _compression(path: str, given: str | None, kind: Format, named: tuple[Format, str | None] | None) -> str | None:
    if given is not None and given not in _CODECS[kind]:
        raise InvalidArgument(
            f"found compression={given!r}, expected one of {', '.join(map(repr, _CODECS[kind]))} for {kind.value} files"
        )
    if named is None:
        return given
    of_name = named[1]
    if of_name is not None and kind in (Format.PARQUET, Format.ARROW):
        raise InvalidArgument(
            f"{path}: found a suffix for {of_name}, expected none: a {kind.value} file is not compressed as a whole, "
            "only its columns are",
            fix=Fix(f"leave out the last suffix and pass compression={of_name!r}", command="leave out the last suffix"),
        )
    if kind.is_text and given is not None and (of_name or "none") != given:
        raise InvalidArgument(
            f"{path}: found compression={given!r}, expected {of_name or 'none'!r} because of the suffix"
        )
    return given or of_name
