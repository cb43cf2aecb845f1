"""Columns that a user names, checked against those that there are."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from typing import Any

import pyarrow as pa

from luminosity.errors import TableError

__all__ = ["check_columns", "check_condition", "columns_of"]

# pyarrow has no way to ask an expression for its columns but to bind it, and to read what is missing.
_MISSING = re.compile(
    r"No match for FieldRef\.(?:Nested\(FieldRef\.)?Name\((.*?)\)(?: FieldRef\.Name\(.*\)\))? in ", re.S
)


def check_columns(columns: Sequence[str], schema: pa.Schema, origin: str) -> None:
    if isinstance(columns, str):
        raise TableError(f"columns={columns!r}: expected a list of names, such as [{columns!r}]")
    if not columns:
        raise TableError("columns=[]: expected at least one name, or None for all columns")
    if len(set(columns)) < len(columns):
        raise TableError(f"columns={list(columns)!r}: a name is there twice")
    for name in columns:
        if name not in schema.names:
            raise TableError(f"columns= names {name!r}, which {origin} does not have; {_near(name, schema)}")


def check_condition(where: Any, schema: pa.Schema, origin: str) -> None:
    """That it is a condition over these columns."""
    from pyarrow.compute import Expression

    if not isinstance(where, Expression):
        raise TableError(
            f"where={where!r}: expected an expression of pyarrow's, such as pyarrow.compute.field('stars') >= 4; "
            f"found a {type(where).__name__}"
        )
    error = _binding_error(where, schema)
    if error is None:
        return
    if missing := _MISSING.match(str(error)):
        raise TableError(f"where= names {missing[1]!r}, which {origin} does not have; {_near(missing[1], schema)}")
    raise TableError(f"where={where}: can't be decided for the columns of {origin}: {error}") from error


def columns_of(where: Any, schema: pa.Schema) -> set[str]:
    """The columns that a condition reads.

    >>> import pyarrow.compute as pc
    >>> schema = pa.schema({"a": pa.int64(), "b": pa.string(), "c": pa.float64()})
    >>> sorted(columns_of((pc.field("c") > 1) & (pc.field("a") == 2), schema))
    ['a', 'c']
    """
    used: list[str] = []
    while error := _binding_error(where, pa.schema([schema.field(name) for name in used])):
        missing = _MISSING.match(str(error))
        if missing is None or missing[1] not in schema.names or missing[1] in used:
            return set(schema.names)  # It refers to columns in a way that we can't follow, such as by number.
        used.append(missing[1])
    return set(used)


def _binding_error(where: Any, schema: pa.Schema) -> Exception | None:
    try:
        schema.empty_table().filter(where)
    except (pa.ArrowException, TypeError, ValueError) as error:
        return error
    return None


def _near(name: str, schema: pa.Schema) -> str:
    near = difflib.get_close_matches(name, schema.names, n=3)
    if near:
        return f"did you mean {' or '.join(map(repr, near))}?"
    shown = ", ".join(schema.names[:20]) + (", ..." if len(schema) > 20 else "")
    return f"it has {shown}"
