"""Parquet, with the encoding and codec that suit each column."""

from __future__ import annotations

import base64
from typing import Any

import pyarrow as pa
from pyarrow import compute, types

from luminosity.io.formats import LIST_SIZE

__all__ = ["ParquetEncoder"]

pc: Any = compute  # It creates its functions on import, so type checkers see none.

_SAMPLE_ROWS = 4096  # enough to see whether values repeat, cheap to count
_FEW = 0.5  # share of distinct values in the sample below which a dictionary saves space


class ParquetEncoder:
    """Writes Parquet. Columns with repeated values get a dictionary; by default, zstd compresses all but floats.

    A dictionary of values that hardly repeat, such as measured floats, makes writing row groups of 64k rows eight times
    slower and a quarter larger. Floats hardly shrink with any codec, and zstd takes twice as long as snappy for them.

    Parquet has no fixed-size lists; Arrow stores their size in its own schema in the metadata, and can't read such a
    column if it has nulls. So that schema is written last, and describes columns with nulls as plain lists;
    ``ReadTable`` restores their size.
    """

    def __init__(self, sink: Any, schema: pa.Schema, compression: str | None) -> None:
        self._sink = sink
        self._schema = schema
        self._compression = compression
        self._writer: Any = None
        self._with_nulls: set[str] = set()

    def write(self, table: pa.Table) -> None:
        """Write the rows as a row group."""
        if self._writer is None:
            self._writer = self._open(table)
        self._with_nulls |= {field.name for field in table.schema if table.column(field.name).null_count}
        self._writer.write_table(table)

    def close(self) -> None:
        """Write the footer."""
        if self._writer is None:
            self._writer = self._open(self._schema.empty_table())
        self._writer.add_key_value_metadata(self._notes())
        self._writer.close()

    def _notes(self) -> dict[bytes, bytes]:
        fields = [_plain_list(field) if field.name in self._with_nulls else field for field in self._schema]
        note = pa.schema(fields, self._schema.metadata).serialize().to_pybytes()
        return {**(self._schema.metadata or {}), b"ARROW:schema": base64.b64encode(note)}

    def _open(self, first: pa.Table) -> Any:
        from pyarrow import parquet

        writer: Any = parquet.ParquetWriter  # Its annotations lack the last two parameters.
        return writer(
            self._sink,
            self._schema,
            compression=self._compression or _codecs(self._schema),
            store_schema=False,
            use_dictionary=[name for name in self._schema.names if _repeats(first.column(name))],
        )


def _plain_list(field: pa.Field) -> pa.Field:
    if not types.is_fixed_size_list(field.type):
        return field
    size = {LIST_SIZE: str(field.type.list_size).encode()}
    return field.with_type(pa.list_(field.type.value_field)).with_metadata({**(field.metadata or {}), **size})


def _repeats(column: pa.ChunkedArray) -> bool:
    """Return whether the first rows have few distinct values: only then a dictionary helps."""
    if types.is_dictionary(column.type):
        return True
    if types.is_nested(column.type) or types.is_floating(column.type) or isinstance(column.type, pa.BaseExtensionType):
        return False
    sample = column.slice(0, _SAMPLE_ROWS)
    try:
        return pc.count_distinct(sample, mode="all").as_py() <= _FEW * len(sample)
    except pa.ArrowNotImplementedError:
        return False


def _codecs(schema: pa.Schema) -> dict[str, str]:
    return {path: "snappy" if types.is_floating(kind) else "zstd" for f in schema for path, kind in _leaves(f)}


def _leaves(field: pa.Field, above: str = "") -> list[tuple[str, pa.DataType]]:
    """Return the columns that Parquet stores for a field, with the paths that it gives them.

    >>> _leaves(pa.field("points", pa.list_(pa.struct({"x": pa.float32()}))))
    [('points.list.element.x', DataType(float))]
    """
    path, kind = f"{above}{field.name}", field.type
    if isinstance(kind, pa.BaseExtensionType):
        kind = kind.storage_type
    if types.is_struct(kind):
        return [leaf for index in range(kind.num_fields) for leaf in _leaves(kind.field(index), f"{path}.")]
    if types.is_map(kind):
        key, value = pa.field("key", kind.key_type), pa.field("value", kind.item_type)
        return [*_leaves(key, f"{path}.key_value."), *_leaves(value, f"{path}.key_value.")]
    if types.is_nested(kind):
        return _leaves(kind.value_field.with_name("element"), f"{path}.list.")
    return [(path, kind)]
