"""Columns that are not in the files but in the names of their folders: ``country=DE/part-1.parquet``."""

from __future__ import annotations

import functools
import operator
import re
from collections.abc import Sequence
from typing import Any, TypeAlias

import pyarrow as pa

from luminosity.errors import TableError
from luminosity.io.reading.find_files import TableFile

__all__ = ["partition_arrays", "partition_condition", "partition_schema"]

Partition: TypeAlias = Sequence[tuple[str, str | None]]

_WHOLE_NUMBER = re.compile(r"0|-?[1-9]\d{0,17}")  # of at most 18 digits: these fit into 64 bits


def partition_schema(files: Sequence[TableFile], given: pa.Schema | None) -> pa.Schema:
    """Return the names and types of these columns: the types of ``given``, otherwise integers or strings."""
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


def partition_arrays(schema: pa.Schema, partition: Partition, rows: int) -> dict[str, pa.Array]:
    """Return these columns for a file: one value, repeated for all rows."""
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
