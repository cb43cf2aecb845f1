"""Checks of schemas: all batches of a table have the same schema, and not every format can hold every type."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
from pyarrow import types

from luminosity.errors import Fix, WriteError
from luminosity.io.writing.destination import Destination
from luminosity.io.writing.filesystem import is_hidden

__all__ = ["check_same", "check_writable"]

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
    if is_hidden(name):
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
