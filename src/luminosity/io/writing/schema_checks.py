"""One table has one schema, and not every format takes every type."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
from pyarrow import types

from luminosity.errors import WriteError
from luminosity.io.formats import Format
from luminosity.io.writing.destination import Destination
from luminosity.io.writing.filesystem import is_hidden

__all__ = ["check_same", "check_writable", "is_nested", "parts"]


def check_same(path: str, expected: pa.Schema, found: pa.Schema) -> None:
    if not found.equals(expected):
        raise WriteError(
            f"{path}: a table has one schema, and these batches differ: {_difference(expected, found)}. "
            "Give all batches the same columns and types, for example by a cast in a MapTable before"
        )


def check_writable(destination: Destination, schema: pa.Schema) -> None:
    """Refuse at the first batch what would fail, or get lost, later."""
    if twice := [name for name, count in Counter(schema.names).items() if count > 1]:
        raise WriteError(f"{destination.path}: found several columns named {_listed(twice)}, expected one of each name")
    for name in destination.partition_by:
        _check_partition(destination, schema, name)
    if destination.partition_by and len(schema) == len(destination.partition_by):
        raise WriteError(
            f"{destination.path}: all columns are in partition_by, "
            "which leaves none for the files; expected one at least"
        )
    if destination.format in (Format.CSV, Format.JSON_LINES):
        for field in schema:
            if field.name not in destination.partition_by:
                _check_text(destination, field)


def parts(kind: pa.DataType) -> list[pa.DataType]:
    """The type, and the types of what is in its lists, structs and maps.

    >>> parts(pa.list_(pa.struct({"a": pa.int8()})))
    [ListType(list<item: struct<a: int8>>), StructType(struct<a: int8>), DataType(int8)]
    """
    if types.is_dictionary(kind):
        return parts(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return parts(kind.storage_type)
    inner = (
        [kind.key_type, kind.item_type] if types.is_map(kind) else [kind.field(n).type for n in range(kind.num_fields)]
    )
    return [kind, *(part for each in inner for part in parts(each))]


def is_nested(kind: pa.DataType) -> bool:
    return types.is_nested(kind) or (isinstance(kind, pa.BaseExtensionType) and types.is_nested(kind.storage_type))


def is_binary(kind: pa.DataType) -> bool:
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)


def _check_partition(destination: Destination, schema: pa.Schema, name: str) -> None:
    if name not in schema.names:
        raise WriteError(
            f"{destination.path}: there is no column {name!r} to partition by; found {_listed(schema.names)}"
        )
    kind = schema.field(name).type
    if is_nested(kind) or any(map(is_binary, parts(kind))):
        raise WriteError(
            f"{destination.path}: column {name!r} is {kind}, which makes no folder names; "
            "expected a column of texts, numbers, dates or booleans to partition by"
        )
    if is_hidden(name):
        raise WriteError(
            f"{destination.path}: folders named for column {name!r} would be hidden, since they "
            f"begin with {name[0]!r}; rename the column, or partition by another"
        )


def _check_text(destination: Destination, field: pa.Field) -> None:
    where = f"{destination.path}: column {field.name!r} is {field.type}, which "
    if destination.format is Format.CSV and is_nested(field.type):
        raise WriteError(where + "CSV has no way to write; write Parquet or JSON lines, or drop the column")
    inner = parts(field.type)
    if any(map(is_binary, inner)):
        raise WriteError(
            where + "is bytes and no text; write Parquet, or make texts of it before (base64, say), or drop the column"
        )
    if any(types.is_map(part) and not _is_text(part.key_type) for part in inner):
        raise WriteError(where + "JSON has no way to write: keys must be texts; write Parquet, or drop the column")
    if is_nested(field.type) and any(map(types.is_duration, inner)):
        raise WriteError(where + "JSON has no way to write: a duration within it has no unit there; write Parquet")


def _is_text(kind: pa.DataType) -> bool:
    return types.is_string(kind) or types.is_large_string(kind)


def _difference(expected: pa.Schema, found: pa.Schema) -> str:
    said: list[str] = []
    if missing := [name for name in expected.names if name not in found.names]:
        said.append(f"some lack {_listed(missing)}")
    if extra := [name for name in found.names if name not in expected.names]:
        said.append(f"some have {_listed(extra)} beside the others")
    for name in expected.names:
        if name in found.names and (one := expected.field(name)) != (other := found.field(name)):
            said.append(f"column {name!r} is {_described(one, other)} in some and {_described(other, one)} in others")
    return "; ".join(said) or f"columns are {_listed(expected.names)} in some and {_listed(found.names)} in others"


def _described(field: pa.Field, other: pa.Field) -> str:
    if field.type != other.type:
        return str(field.type)
    return f"{field.type} {'with' if field.nullable else 'without'} nulls"


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names))
