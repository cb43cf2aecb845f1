"""The destination of a table: where its files are written, how, and which schemas it can hold."""

from __future__ import annotations

import os
from collections import Counter
from collections.abc import Sequence
from dataclasses import dataclass, field, replace
from typing import Literal

import pyarrow as pa
from pyarrow import types

from luminosity._shared.shared_files import text_digest
from luminosity.errors import Fix, InvalidArgument, InvalidType, TableError, WriteError
from luminosity.io.formats import Format, recognise
from luminosity.io.run_owner import RunOwner, owner_in_name, owner_of
from luminosity.io.writing import filesystem
from luminosity.runs.run_ids import CheckpointedRun, RunIdentity, new_id

__all__ = ["TEMPORARY_PREFIX", "Destination", "IfEmpty", "IfExists", "check_same", "check_writable"]

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
        return f"f{text_digest(name, digits=8)}" if name else "table"

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
    written = {kind.value: kind for kind in Format if kind.is_written}
    if named is not None and not named[0].is_written:
        raise InvalidArgument(f"{path}: {named[0].value} can only be read, expected one of {', '.join(written)}")
    if given is None:
        return named[0] if named is not None else Format.PARQUET
    if given not in written:
        raise InvalidArgument(f"found format={given!r}, expected one of {', '.join(map(repr, written))}")
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


_OTHER_FORMAT = Fix(
    "write Parquet, or drop the column", command="write Parquet, or leave the column out with --columns"
)


def check_same(path: str, expected: pa.Schema, found: pa.Schema) -> None:
    """Raise if two batches of the table at ``path`` have different schemas."""
    if not found.equals(expected):
        raise WriteError(
            f"{path}: found batches with different schemas, expected the same for all: {_difference(expected, found)}",
            fix=Fix("give all batches the same columns and types, for example with a cast in MapTable"),
        )


def check_writable(destination: Destination, schema: pa.Schema) -> None:
    """Raise if a table with this schema can't be written without errors or losses."""
    path = destination.path
    if twice := [name for name, count in Counter(schema.names).items() if count > 1]:
        raise WriteError(f"{path}: found several columns named {_listed(twice)}, expected one of each name")
    for name in destination.partition_by:
        _check_partition(path, schema, name)
    if destination.partition_by and len(schema) == len(destination.partition_by):
        raise WriteError(f"{path}: found all columns in partition_by, expected at least one that is left for the files")
    if destination.format.is_text:
        for field in schema:
            if field.name not in destination.partition_by:
                _check_text(destination, field)


def _parts(kind: pa.DataType) -> list[pa.DataType]:
    """Return the type and all types inside its lists, structs and maps.

    >>> _parts(pa.list_(pa.struct({"a": pa.int8()})))
    [ListType(list<item: struct<a: int8>>), StructType(struct<a: int8>), DataType(int8)]
    """
    if types.is_dictionary(kind):
        return _parts(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return _parts(kind.storage_type)
    inner = (
        [kind.key_type, kind.item_type] if types.is_map(kind) else [kind.field(n).type for n in range(kind.num_fields)]
    )
    return [kind, *(part for each in inner for part in _parts(each))]


def _is_nested(kind: pa.DataType) -> bool:
    return types.is_nested(kind) or (isinstance(kind, pa.BaseExtensionType) and types.is_nested(kind.storage_type))


def _is_binary(kind: pa.DataType) -> bool:
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)


def _check_partition(path: str, schema: pa.Schema, name: str) -> None:
    if name not in schema.names:
        raise WriteError(
            f"{path}: there is no column {name!r} to partition by, expected one of {_listed(schema.names)}"
        )
    kind = schema.field(name).type
    if _is_nested(kind) or any(map(_is_binary, _parts(kind))):
        raise WriteError(
            f"{path}: found column {name!r} of type {kind}, expected texts, numbers, dates or booleans to partition by"
        )
    if filesystem.is_hidden(name):
        raise WriteError(
            f"{path}: the folders of column {name!r} would be hidden, since their names begin with {name[0]!r}",
            fix="rename the column, or partition by another",
        )


def _check_text(destination: Destination, field: pa.Field) -> None:
    message = f"{destination.path}: column {field.name!r} is {field.type}, which "
    if destination.format.is_csv and _is_nested(field.type):
        fix = Fix(
            "write Parquet or JSON lines, or drop the column",
            command="write Parquet or JSON lines, such as OUT.parquet or OUT.jsonl",
        )
        raise WriteError(message + "CSV can't hold", fix=fix)
    inner = _parts(field.type)
    if any(map(_is_binary, inner)):
        fix = Fix(
            "write Parquet, convert the column to text first (base64, for example), or drop it",
            command=_OTHER_FORMAT.command,
        )
        raise WriteError(message + "has bytes, expected text", fix=fix)
    if any(types.is_map(part) and not _is_text(part.key_type) for part in inner):
        raise WriteError(message + "JSON can't hold: keys must be texts", fix=_OTHER_FORMAT)
    if _is_nested(field.type) and any(map(types.is_duration, inner)):
        raise WriteError(message + "JSON can't hold: a nested duration would lose its unit", fix=_OTHER_FORMAT)


def _is_text(kind: pa.DataType) -> bool:
    return types.is_string(kind) or types.is_large_string(kind)


def _difference(expected: pa.Schema, found: pa.Schema) -> str:
    differences: list[str] = []
    if missing := [name for name in expected.names if name not in found.names]:
        differences.append(f"some lack {_listed(missing)}")
    if extra := [name for name in found.names if name not in expected.names]:
        differences.append(f"some also have {_listed(extra)}")
    for name in expected.names:
        if name in found.names and (one := expected.field(name)) != (other := found.field(name)):
            differences.append(
                f"column {name!r} is {_described(one, other)} in some and {_described(other, one)} in others"
            )
    orders = f"columns are {_listed(expected.names)} in some and {_listed(found.names)} in others"
    return "; ".join(differences) or orders


def _described(field: pa.Field, other: pa.Field) -> str:
    if field.type != other.type:
        return str(field.type)
    return f"{field.type} {'with' if field.nullable else 'without'} nulls"


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names))
