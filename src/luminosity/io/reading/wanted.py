"""What is wanted of a table: which columns, and which rows."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import pyarrow as pa

from luminosity.errors import TableError
from luminosity.io.reading.names import check_columns, check_condition, columns_of
from luminosity.io.reading.partitions import partition_arrays

__all__ = ["Wanted", "choose"]


@dataclass(frozen=True)
class Wanted:
    """Each file must have the columns `stored`; of these `loaded` are read, and `output` is emitted."""

    stored: pa.Schema
    loaded: pa.Schema
    output: pa.Schema
    where: Any  # a pyarrow.compute.Expression, or nothing
    partition: pa.Schema
    origin: str  # of the schema: the first file, or the argument

    def finish(self, batch: pa.RecordBatch, partition: Sequence[tuple[str, str | None]]) -> pa.RecordBatch:
        """The rows and columns that are wanted, of a batch that has what is loaded."""
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


def choose(stored: pa.Schema, partition: pa.Schema, columns: Sequence[str] | None, where: Any, origin: str) -> Wanted:
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
    return Wanted(stored, pa.schema(loaded or list(stored)[:1]), output, where, partition, origin)


def _plain(schema: pa.Schema) -> pa.Schema:
    """Names and types alone: what else the first file says need not hold for the others."""
    return pa.schema([pa.field(field.name, field.type) for field in schema])


def _some(differences: list[str]) -> str:
    more = f"; and {len(differences) - 5} more" if len(differences) > 5 else ""
    return "; ".join(differences[:5]) + more
