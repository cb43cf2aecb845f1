"""Selects the columns and rows of a table to read.

Some columns are not in the files but in the names of their folders: ``country=DE/part-1.parquet``.
"""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, TypeAlias

import pyarrow as pa

from luminosity._shared.text import did_you_mean, list_some
from luminosity.errors import TableError
from luminosity.io.reading.find_files import TableFile

__all__ = ["Selection", "columns_of", "partition_condition", "partition_schema", "select"]

Partition: TypeAlias = Sequence[tuple[str, str | None]]

# pyarrow can't list the columns of an expression: bind it, and read the missing column from the error.
_MISSING = re.compile(
    r"No match for FieldRef\.(?:Nested\(FieldRef\.)?Name\((.*?)\)(?: FieldRef\.Name\(.*\)\))? in ", re.S
)
_WHOLE_NUMBER = re.compile(r"0|-?[1-9]\d{0,17}")  # of at most 18 digits: these fit into 64 bits
_SHOWN_COLUMNS = 20  # in a message, which stays readable
_SHOWN_DIFFERENCES = 5  # enough to see that two schemas have nothing in common
_SUGGESTIONS = 3


@dataclass(frozen=True)
class Selection:
    """The columns and rows to read: ``stored`` must be in each file, ``loaded`` are read, ``output`` is emitted."""

    stored: pa.Schema
    loaded: pa.Schema
    output: pa.Schema
    where: Any  # a pyarrow.compute.Expression, or None
    partition: pa.Schema
    origin: str  # where the schema comes from: the first file, or the argument

    def finish(self, batch: pa.RecordBatch, partition: Partition) -> pa.RecordBatch:
        """Return the selected rows and columns of a batch that has the loaded columns."""
        if len(self.partition):
            added = _partition_arrays(self.partition, partition, batch.num_rows)
            batch = pa.record_batch({**dict(zip(batch.schema.names, batch.columns, strict=True)), **added})
        if self.where is not None:
            batch = batch.filter(self.where)
        return pa.RecordBatch.from_arrays([batch.column(name) for name in self.output.names], schema=self.output)

    def check(self, path: str, found: pa.Schema) -> None:
        """Raise unless a file has the columns that every file must have, in any order."""
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
    """Return the selection of ``columns`` and rows from a table with these columns, after checking both."""
    for name in stored.names:
        if stored.names.count(name) > 1:
            raise TableError(f"{origin}: found the column {name!r} twice, expected different names")
    stored = _plain(stored)
    partition = _plain(pa.schema([field for field in partition if field.name not in stored.names]))
    whole = pa.schema([*stored, *partition])
    if columns is not None:
        _check_columns(columns, whole, origin)
    output = whole if columns is None else pa.schema([whole.field(name) for name in columns])
    needed = set(output.names)
    if where is not None:
        _check_condition(where, whole, origin)
        needed |= columns_of(where, whole)
    loaded = [field for field in stored if field.name in needed]
    return Selection(stored, pa.schema(loaded or list(stored)[:1]), output, where, partition, origin)


def columns_of(where: Any, schema: pa.Schema) -> set[str]:
    """Return the columns that a condition reads.

    >>> import pyarrow.compute as pc
    >>> schema = pa.schema({"a": pa.int64(), "b": pa.string(), "c": pa.float64()})
    >>> sorted(columns_of((pc.field("c") > 1) & (pc.field("a") == 2), schema))
    ['a', 'c']
    """
    used: list[str] = []
    while error := _binding_error(where, pa.schema([schema.field(name) for name in used])):
        missing = _MISSING.match(str(error))
        if missing is None or missing[1] not in schema.names or missing[1] in used:
            return set(schema.names)  # It refers to columns in a way that can't be followed, such as by number.
        used.append(missing[1])
    return set(used)


def _plain(schema: pa.Schema) -> pa.Schema:
    """Return names and types only: other files may have other metadata than the first."""
    return pa.schema([pa.field(field.name, field.type) for field in schema])


def _some(differences: list[str]) -> str:
    hidden = len(differences) - _SHOWN_DIFFERENCES
    return "; ".join(differences[:_SHOWN_DIFFERENCES]) + (f"; and {hidden} more" if hidden > 0 else "")


def _check_columns(columns: Sequence[str], schema: pa.Schema, origin: str) -> None:
    if isinstance(columns, str):
        raise TableError(f"found columns={columns!r}, expected a list of names, such as [{columns!r}]")
    if not columns:
        raise TableError("found columns=[], expected at least one name, or None for all columns")
    if len(set(columns)) < len(columns):
        raise TableError(f"found the columns {list(columns)!r}, expected every name once")
    for name in columns:
        if name not in schema.names:
            raise _no_column(f"can't read the column {name!r}", name, schema, origin)


def _check_condition(where: Any, schema: pa.Schema, origin: str) -> None:
    from pyarrow.compute import Expression

    if not isinstance(where, Expression):
        raise TableError(
            f"found where={where!r} of type {type(where).__name__}, expected an expression of pyarrow, such as "
            "pyarrow.compute.field('stars') >= 4"
        )
    error = _binding_error(where, schema)
    if error is None:
        return
    if missing := _MISSING.match(str(error)):
        raise _no_column(f"where= names the column {missing[1]!r}", missing[1], schema, origin)
    raise TableError(f"where={where} can't be evaluated on the columns of {origin}: {error}") from error


def _no_column(message: str, name: str, schema: pa.Schema, origin: str) -> TableError:
    suggestion = did_you_mean(name, schema.names, most=_SUGGESTIONS)
    has = "" if suggestion else f"; it has {list_some(schema.names, _SHOWN_COLUMNS)}"
    return TableError(f"{message}: {origin} does not have it{has}", fix=suggestion or None)


def _binding_error(where: Any, schema: pa.Schema) -> Exception | None:
    try:
        schema.empty_table().filter(where)
    except (pa.ArrowException, TypeError, ValueError) as error:
        return error
    return None


def partition_schema(files: Sequence[TableFile], given: pa.Schema | None) -> pa.Schema:
    """Return the columns that folders name: with the types of ``given``, otherwise integers or strings."""
    names = [name for name, _ in files[0].partition]
    for file in files:
        if [name for name, _ in file.partition] != names:
            raise TableError(
                f"{file.path}: found folders for the columns {[name for name, _ in file.partition]}, expected {names} "
                f"as for {files[0].path}"
            )
    fields: list[pa.Field] = []
    for at, name in enumerate(names):
        if given is not None and name in given.names:
            fields.append(given.field(name))
            _check_values(files, at, given.field(name).type)
            continue
        values = {file.partition[at][1] for file in files} - {None}
        is_number = bool(values) and all(_WHOLE_NUMBER.fullmatch(value or "") for value in values)
        fields.append(pa.field(name, pa.int64() if is_number else pa.string()))
    return pa.schema(fields)


def _check_values(files: Sequence[TableFile], at: int, kind: pa.DataType) -> None:
    """Check values before the run: a value that does not fit is in the folder's name, not in the file."""
    for value, file in {file.partition[at][1]: file for file in files}.items():
        try:
            _scalar(value, kind)
        except (pa.ArrowInvalid, pa.ArrowNotImplementedError) as error:
            raise TableError(
                f"{file.path}: found the folder {file.partition[at][0]}={value}, expected {kind} as in schema=: {error}"
            ) from error


def _partition_arrays(schema: pa.Schema, partition: Partition, rows: int) -> dict[str, pa.Array]:
    """Return the columns that the folders of a file name: one value each, repeated for all rows."""
    return {name: pa.repeat(value, rows) for name, value in _values(schema, partition)}


def partition_condition(schema: pa.Schema, partition: Partition) -> Any:
    """Return a condition that holds for all rows of a file, or None if nothing is known about them."""
    from pyarrow import compute

    known = [
        compute.field(name) == value if value.is_valid else compute.field(name).is_null()
        for name, value in _values(schema, partition)
    ]
    return functools.reduce(operator.and_, known) if known else None


def _values(schema: pa.Schema, partition: Partition) -> list[tuple[str, Any]]:
    return [(name, _scalar(value, schema.field(name).type)) for name, value in partition if name in schema.names]


def _scalar(value: str | None, kind: pa.DataType) -> Any:
    return pa.scalar(None, kind) if value is None else pa.scalar(value, pa.string()).cast(kind)
