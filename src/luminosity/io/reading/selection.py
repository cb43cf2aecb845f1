"""Which columns and rows of a table to read."""

from __future__ import annotations

import difflib
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from luminosity.errors import TableError
from luminosity.io.reading.partition_columns import partition_arrays

__all__ = ["Selection", "check_columns", "check_condition", "columns_of", "select"]


# pyarrow has no way to ask an expression for its columns but to bind it, and to read what is missing.
_MISSING = re.compile(
    r"No match for FieldRef\.(?:Nested\(FieldRef\.)?Name\((.*?)\)(?: FieldRef\.Name\(.*\)\))? in ", re.S
)


@dataclass(frozen=True)
class Selection:
    """Each file must have the columns `stored`; of these `loaded` are read, and `output` is emitted."""

    stored: pa.Schema
    loaded: pa.Schema
    output: pa.Schema
    where: Any  # a pyarrow.compute.Expression, or nothing
    partition: pa.Schema
    origin: str  # of the schema: the first file, or the argument

    def finish(self, batch: pa.RecordBatch, partition: Sequence[tuple[str, str | None]]) -> pa.RecordBatch:
        """The rows and columns that are selection, of a batch that has what is loaded."""
        if len(self.partition):
            added = partition_arrays(self.partition, partition, batch.num_rows)
            batch = pa.record_batch({**dict(zip(batch.schema.names, batch.columns, strict=True)), **added})
        if self.where is not None:
            batch = batch.filter(self.where)
        return pa.RecordBatch.from_arrays([batch.column(name) for name in self.output.names], schema=self.output)

    def check(self, path: str, found: pa.Schema) -> None:
        """That a file has the columns that all must have, whatever their order."""
        expected = {field.name: field.type for field in self.stored}
        there = {field.name: field.type for field in found}
        if there == expected and len(there) == len(found):
            return
        differences = [
            f"column {name!r}: found {there.get(name, 'none')}, expected {expected.get(name, 'none')}"
            for name in [*expected, *(name for name in there if name not in expected)]
            if there.get(name) != expected.get(name)
        ]
        differences += [f"column {name!r}: found twice" for name in there if found.names.count(name) > 1]
        raise TableError(f"{path} has other columns than {self.origin}: {_some(differences)}")


def select(
    stored: pa.Schema, partition: pa.Schema, columns: Sequence[str] | None, where: Any, origin: str
) -> Selection:
    """Check what a user asks of a table that has these columns."""
    for name in stored.names:
        if stored.names.count(name) > 1:
            raise TableError(f"{origin}: has the column {name!r} twice")
    stored = _plain(stored)
    partition = _plain(pa.schema([field for field in partition if field.name not in stored.names]))
    whole = pa.schema([*stored, *partition])
    if columns is not None:
        check_columns(columns, whole, origin)
    output = whole if columns is None else pa.schema([whole.field(name) for name in columns])
    needed = set(output.names)
    if where is not None:
        check_condition(where, whole, origin)
        needed |= columns_of(where, whole)
    loaded = [field for field in stored if field.name in needed]
    return Selection(stored, pa.schema(loaded or list(stored)[:1]), output, where, partition, origin)


def _plain(schema: pa.Schema) -> pa.Schema:
    """Names and types alone: what else the first file says need not hold for the others."""
    return pa.schema([pa.field(field.name, field.type) for field in schema])


def _some(differences: list[str]) -> str:
    more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
    return "; ".join(differences[:5]) + more


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
