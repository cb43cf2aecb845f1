"""One table has one schema, and not every format takes every type."""

from __future__ import annotations

from collections import Counter

import pyarrow as pa
from pyarrow import types

from luminosity.errors import WriteError
from luminosity.io.formats import Format
from luminosity.io.writing.files import is_hidden
from luminosity.io.writing.target import Target

__all__ = ["check_same", "check_writable", "is_nested", "leaves"]


def check_same(path: str, expected: pa.Schema, found: pa.Schema) -> None:
    if not found.equals(expected):
        raise WriteError(
            f"{path}: a table has one schema, and these batches differ: {_difference(expected, found)}. "
            "Give all batches the same columns and types, for example by a cast in a MapTable before"
        )


def check_writable(target: Target, schema: pa.Schema) -> None:
    """Refuse at the first batch what would fail, or get lost, later."""
    if twice := [name for name, count in Counter(schema.names).items() if count > 1]:
        raise WriteError(f"{target.path}: found several columns named {_listed(twice)}, expected one of each name")
    for name in target.partition_by:
        _check_partition(target, schema, name)
    if target.partition_by and len(schema) == len(target.partition_by):
        raise WriteError(
            f"{target.path}: all columns are in partition_by, which leaves none for the files; expected one at least"
        )
    if target.format in (Format.CSV, Format.JSON_LINES):
        for field in schema:
            if field.name not in target.partition_by:
                _check_text(target, field)


def leaves(kind: pa.DataType) -> list[pa.DataType]:
    """The types that hold values: its own, or those of its parts.

    >>> leaves(pa.list_(pa.struct({"a": pa.int8(), "b": pa.binary()})))
    [DataType(int8), DataType(binary)]
    """
    if types.is_dictionary(kind):
        return leaves(kind.value_type)
    if isinstance(kind, pa.BaseExtensionType):
        return leaves(kind.storage_type)
    if not types.is_nested(kind):
        return [kind]
    if types.is_map(kind):
        return [*leaves(kind.key_type), *leaves(kind.item_type)]
    return [leaf for index in range(kind.num_fields) for leaf in leaves(kind.field(index).type)]


def is_nested(kind: pa.DataType) -> bool:
    return types.is_nested(kind) or (isinstance(kind, pa.BaseExtensionType) and types.is_nested(kind.storage_type))


def is_binary(kind: pa.DataType) -> bool:
    return types.is_binary(kind) or types.is_large_binary(kind) or types.is_fixed_size_binary(kind)


def _check_partition(target: Target, schema: pa.Schema, name: str) -> None:
    if name not in schema.names:
        raise WriteError(f"{target.path}: there is no column {name!r} to partition by; found {_listed(schema.names)}")
    kind = schema.field(name).type
    if is_nested(kind) or any(is_binary(leaf) for leaf in leaves(kind)):
        raise WriteError(
            f"{target.path}: column {name!r} is {kind}, which makes no folder names; "
            "expected a column of texts, numbers, dates or booleans to partition by"
        )
    if is_hidden(name):
        raise WriteError(
            f"{target.path}: folders named for column {name!r} would be hidden, since they begin with {name[0]!r}; "
            "rename the column, or partition by another"
        )


def _check_text(target: Target, field: pa.Field) -> None:
    where = f"{target.path}: column {field.name!r} is {field.type}, which "
    if target.format is Format.CSV and is_nested(field.type):
        raise WriteError(where + "CSV has no way to write; write Parquet or JSON lines, or drop the column")
    if any(is_binary(leaf) for leaf in leaves(field.type)):
        raise WriteError(
            where + "is bytes and no text; write Parquet, or make texts of it before (base64, say), or drop the column"
        )


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
