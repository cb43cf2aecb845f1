"""Records as rows of tables: a record batch for the records of one partition."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, NamedTuple

import pyarrow as pa
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils import windowed_value

from luminosity._shared.text import first_line, list_some
from luminosity.errors import Fix, InvalidArgument, TableError
from luminosity.io.kafka.reading.deserialize import Deserializer
from luminosity.io.kafka.reading.emit import Emitter, Tally
from luminosity.io.kafka.reading.registry import Unreadable
from luminosity.io.kafka.reading.timestamps import TimestampPolicy
from luminosity.io.kafka.record import KafkaRecord
from luminosity.tables.batch_builder import BatchBuilder
from luminosity.tables.row_times import TIMESTAMP

__all__ = ["TableEmitter", "table_schema"]

_GLOBAL = (GlobalWindow(),)
_REASON = 300  # characters of a reason at most
_PLAIN = {"bytes": pa.binary(), "utf8": pa.string()}


def table_schema(key: Any, value: Any, schema: Any) -> pa.Schema:
    """Return the columns of the tables: those of the value first, then those of the record.

    >>> table_schema("bytes", "utf8", None).names[:3]
    ['value', '_topic', '_partition']
    """
    if not isinstance(key, str) or key not in _PLAIN:
        raise InvalidArgument(f"found as_table=True and key={key!r}, expected 'bytes' or 'utf8'")
    is_plain = isinstance(value, str) and value in _PLAIN
    if schema is None:
        if not is_plain:
            raise InvalidArgument(
                f"found as_table=True and value={value!r} without schema=, expected the columns of the values",
                fix=Fix('pass a schema such as pyarrow.schema([("stars", pyarrow.int8())])'),
            )
        schema = pa.schema([("value", _PLAIN[value])])
    elif is_plain:
        raise InvalidArgument(
            f"found schema= and value={value!r}, expected values with fields",
            fix=Fix("pass value='json', or leave out schema="),
        )
    elif not isinstance(schema, pa.Schema):
        raise InvalidArgument(f"found schema= of type {type(schema).__name__}, expected pyarrow.schema(...)")
    record = [
        pa.field("_topic", pa.string()),
        pa.field("_partition", pa.int32()),
        pa.field("_offset", pa.int64()),
        pa.field(TIMESTAMP, pa.timestamp("us", "UTC")),
        pa.field("_timestamp_type", pa.int8()),
        pa.field("_key", _PLAIN[key]),
        pa.field("_headers", pa.map_(pa.string(), pa.binary())),
        pa.field("_deleted", pa.bool_()),
    ]
    if both := sorted({field.name for field in record} & set(schema.names)):
        raise InvalidArgument(f"found {list_some(both, 5)} in schema=, which are columns of the record itself")
    return pa.schema([*(field.with_nullable(True) for field in schema), *record])


class _Row(NamedTuple):
    raw: KafkaRecord
    record: KafkaRecord
    micros: int


class TableEmitter(Emitter):
    """Turns records of one partition into a record batch, whose time is the earliest of its rows."""

    def __init__(
        self,
        timestamps: TimestampPolicy,
        deserializer: Deserializer | None,
        schema: pa.Schema,
        *,
        has_fields: bool,
    ) -> None:
        super().__init__(timestamps, deserializer)
        self._schema = schema
        values = [field for field in schema if field.name[0:1] != "_" or field.name not in _RECORD_COLUMNS]
        self._values = pa.schema(values)
        self._names = self._values.names
        self._has_fields = has_fields

    def emit(self, records: list[KafkaRecord], now_micros: int, tally: Tally) -> Iterator[Any]:
        """Yield one table, and a dead letter for each record that does not fit into it."""
        rows: list[_Row] = []
        for record in records:
            found = self.read(record, now_micros, tally)
            if isinstance(found, tuple):
                made, micros = found
                rows.append(_Row(record, made, micros))
            else:
                yield found
        if not rows:
            return
        try:
            values = self._build([row.record for row in rows])
        except (TableError, Unreadable):
            rows, letters = self._fitting(rows, now_micros, tally)
            yield from letters
            if not rows:
                return
            values = self._build([row.record for row in rows])
        yield windowed_value.create(self._batch(values, rows), min(row.micros for row in rows), _GLOBAL)

    def _build(self, records: list[KafkaRecord]) -> pa.RecordBatch:
        if not self._has_fields:
            array = pa.array([record.value for record in records], self._values.field(0).type)
            return pa.RecordBatch.from_arrays([array], schema=self._values)
        return BatchBuilder(self._values, None).build([self._fields(record.value) for record in records])

    def _fields(self, value: Any) -> dict[str, Any]:
        """Return the fields that have a column; others are left out, and missing ones are null."""
        if value is None:
            return dict.fromkeys(self._names)
        if not isinstance(value, dict):
            raise Unreadable(f"the value is of type {type(value).__name__}, expected fields")
        return {name: value.get(name) for name in self._names}

    def _fitting(self, rows: list[_Row], now_micros: int, tally: Tally) -> tuple[list[_Row], list[Any]]:
        """Return the rows that fit into the schema, and dead letters for the others."""
        fitting: list[_Row] = []
        letters: list[Any] = []
        for row in rows:
            try:
                self._build([row.record])
                fitting.append(row)
            except (TableError, Unreadable) as error:
                words = error.message if isinstance(error, TableError) else str(error)
                letters.append(self.unreadable(row.raw, Unreadable(first_line(words, _REASON)), now_micros, tally))
        return fitting, letters

    def _batch(self, values: pa.RecordBatch, rows: list[_Row]) -> pa.RecordBatch:
        count = len(rows)
        records = [row.record for row in rows]
        kinds = {field.name: field.type for field in self._schema}
        times = pa.array([row.micros for row in rows], pa.int64()).cast(kinds[TIMESTAMP])
        columns = [
            *values.columns,
            pa.repeat(pa.scalar(records[0].topic, pa.string()), count),
            pa.repeat(pa.scalar(records[0].partition, pa.int32()), count),
            pa.array([record.offset for record in records], pa.int64()),
            times,
            pa.array([record.timestamp_type for record in records], pa.int8()),
            pa.array([record.key for record in records], kinds["_key"]),
            pa.array([list(record.headers) for record in records], kinds["_headers"]),
            pa.array([record.value is None for record in records], pa.bool_()),
        ]
        return pa.RecordBatch.from_arrays(columns, schema=self._schema)


_RECORD_COLUMNS = frozenset(table_schema("bytes", "bytes", None).names[1:])
