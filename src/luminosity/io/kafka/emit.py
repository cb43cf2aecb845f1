"""What a read emits: records, values, tables or dead letters, with their event times, many in one element at first."""

from __future__ import annotations

import pickle
from collections.abc import Collection, Iterable, Iterator, Mapping
from itertools import repeat
from typing import Any, NamedTuple

import apache_beam as beam
import pyarrow as pa
from apache_beam import coders, pvalue
from apache_beam.transforms.window import GlobalWindow
from apache_beam.utils import windowed_value

from luminosity._shared.record_places import RecordRun, noting
from luminosity._shared.text import first_line, list_some
from luminosity.errors import Fix, InvalidArgument, InvalidType, KafkaError, TableError
from luminosity.io.kafka.deserialize import Deserializer, SchemaRegistry, Unreadable, deserializer
from luminosity.io.kafka.progress import Span, TimestampPolicy
from luminosity.io.kafka.record import KafkaRecord, Partition
from luminosity.tables.batch_builder import BatchBuilder
from luminosity.tables.row_times import TIMESTAMP

__all__ = ["UNREADABLE", "Chunk", "Emitter", "Outputs", "TableEmitter", "Tally", "Unpack", "emitter_of", "table_schema"]

UNREADABLE = "unreadable"  # the tag of dead letters
_GLOBAL = (GlobalWindow(),)
_USUAL_MICROS = 4_102_444_800_000_000  # the year 2100: an element can have any time before it
_REASON = 300  # characters of a reason at most
_OUTPUT_BYTES = 500  # a guess, which only metrics show: the size of a record with its key, value and time


class Emitter:
    """Turns records of one partition into elements with times. It travels with the pipeline."""

    schema: pa.Schema | None = None  # of tables

    def __init__(
        self,
        timestamps: TimestampPolicy,
        deserializer: Deserializer | None,
        *,
        values_only: bool = False,
        keeps_unreadable: bool = False,
    ) -> None:
        self.timestamps = timestamps
        self.deserializer = deserializer
        self.values_only = values_only
        self.keeps_unreadable = keeps_unreadable

    def emit(self, records: list[KafkaRecord], now_micros: int, tally: Tally) -> Iterable[Any]:
        """Return an element for each record, with its time, and count in ``tally``."""
        create, values_only = windowed_value.create, self.values_only
        if self.deserializer is None and self.timestamps.kind in ("record", "log_append"):
            # The most frequent path: what `micros` of the policy does is spelled out, for usual times.
            times = [record.timestamp * 1000 for record in records]
            newest = max(times)
            if min(times) >= 0 and newest < _USUAL_MICROS:
                tally.newest = max(tally.newest, newest)
                return map(create, [r.value for r in records] if values_only else records, times, repeat(_GLOBAL))
        elements: list[Any] = []
        for record in records:
            found = self.read(record, now_micros, tally)
            if isinstance(found, tuple):
                made, micros = found
                found = create(made.value if values_only else made, micros, _GLOBAL)
            elements.append(found)
        return elements

    def read(self, record: KafkaRecord, now_micros: int, tally: Tally) -> tuple[KafkaRecord, int] | Any:
        """Return the record with its objects and its time, or a dead letter."""
        try:
            made = record if self.deserializer is None else self.deserializer.read(record)
            micros = self._time(made, now_micros)
        except Unreadable as error:
            return self.unreadable(record, error, now_micros, tally)
        tally.newest = max(tally.newest, micros)
        return made, micros

    def unreadable(self, record: KafkaRecord, error: Unreadable, now_micros: int, tally: Tally) -> Any:
        """Return a dead letter, or raise ``KafkaError`` if these are not collected."""
        if not self.keeps_unreadable:
            place = f"--skip_record={record.topic}[{record.partition}]@{record.offset}"
            raise KafkaError(
                f"{record.topic}[{record.partition}] offset {record.offset}: {error}",
                fix=Fix(
                    f"call .with_exception_handling() to collect such records, or pass {place} to leave this one out",
                    command=f"use {place} to leave this record out",
                ),
            ) from error
        tally.unreadable += 1
        micros = TimestampPolicy("record", 0).micros(record, now_micros)
        return pvalue.TaggedOutput(UNREADABLE, windowed_value.create((record, str(error)), micros, _GLOBAL))

    def _time(self, record: KafkaRecord, now_micros: int) -> int:
        try:
            return self.timestamps.micros(record, now_micros)
        except InvalidType as error:  # what the function has returned
            raise Unreadable(first_line(error.message, _REASON)) from error
        except Exception as error:  # in the function of the user
            text = first_line(f"{type(error).__name__}: {error}", _REASON)
            raise Unreadable(f"the function timestamps= raised {text}") from error


class Chunk:
    """Messages of a poll as records, run by run: each run is of one partition.

    Records beyond the end of a span are left out. An end of a partition counts as a position.
    """

    def __init__(self, messages: list[Any], spans: Mapping[Partition, Span]) -> None:
        self.runs: list[tuple[Partition, list[KafkaRecord]]] = []
        self.positions: dict[Partition, int] = {}
        self.failed: list[Any] = []
        self.bytes = 0
        positions = self.positions
        topic, number = "", -1
        partition: Partition = topic, number
        run: list[KafkaRecord] = []
        at, stop = 0, None
        new = tuple.__new__  # which takes half as long as KafkaRecord(...)
        for message in messages:
            if message.topic() != topic or message.partition() != number:
                if number >= 0:
                    positions[partition] = at
                partition = topic, number = message.topic(), message.partition()
                if partition not in spans:
                    topic, number = "", -1
                    continue  # a partition that is done
                stop = spans[partition].stop
                at = positions.get(partition, spans[partition].start)
                run = []
                self.runs.append((partition, run))
            error = message.error()
            offset = message.offset()
            if error is not None:
                if error.name() == "_PARTITION_EOF":
                    # Offsets before it that did not come are no records: markers of transactions, or compacted.
                    at = max(at, offset if stop is None else min(offset, stop))
                else:
                    self.failed.append(message)
            elif offset >= at:
                if stop is not None and offset >= stop:
                    at = stop
                    continue
                at = offset + 1
                kind, timestamp = message.timestamp()
                key, value, headers = message.key(), message.value(), message.headers()
                self.bytes += (len(key) if key else 0) + (len(value) if value else 0)
                fields = topic, number, offset, timestamp, kind, key, value, tuple(headers) if headers else ()
                run.append(new(KafkaRecord, fields))
        if number >= 0:
            positions[partition] = at
        self.records = sum(len(each) for _, each in self.runs)

    def pass_by(self, skips: Mapping[Partition, Collection[int]]) -> list[KafkaRecord]:
        """Leave out records at some offsets. Their offsets still count as read. Returns them."""
        passed: list[KafkaRecord] = []
        for partition, run in self.runs:
            if partition in skips:
                passed += [record for record in run if record.offset in skips[partition]]
                run[:] = [record for record in run if record.offset not in skips[partition]]
        self.records -= len(passed)
        return passed


class Tally:
    """Counts what the records of one partition came to."""

    def __init__(self) -> None:
        self.newest = -(1 << 63)  # the latest event time, in microseconds
        self.unreadable = 0


class Outputs(list[Any]):
    """Elements and dead letters, with their times, which a read emits as one.

    Beam's overhead for an output of a splittable ``DoFn`` is several times that of any other step. ``runs`` say which
    records they are of, in their order.
    """

    def __init__(self, outputs: Iterable[Any] = (), runs: Iterable[RecordRun] = ()) -> None:
        super().__init__(outputs)
        self.runs = list(runs)

    def add(self, records: list[KafkaRecord], made: Iterable[Any]) -> None:
        """Add what was made of records of one partition."""
        before = len(self)
        self.extend(made)
        topic, partition, offsets = records[0].topic, records[0].partition, [record.offset for record in records]
        if len(self) - before == len(records) and not isinstance(self[-1].value, pa.RecordBatch):
            self.runs += RecordRun.each(topic, partition, offsets)
        else:
            self.runs.append(RecordRun(topic, partition, offsets[0], offsets[-1], before - len(self)))


class OutputsCoder(coders.Coder):
    """Encodes outputs as a pickle, on runners that don't run :class:`Unpack` together with the read."""

    def encode(self, value: Outputs) -> bytes:
        """Return a pickle."""
        return pickle.dumps(value, 5)

    def decode(self, encoded: bytes) -> Outputs:
        """Return the outputs."""
        return pickle.loads(encoded)

    def estimate_size(self, value: Outputs) -> int:
        """Return a guess, without a look at all records."""
        return _OUTPUT_BYTES * len(value)

    def to_type_hint(self) -> Any:
        """Return ``Outputs``, the type of the elements."""
        return Outputs


class Unpack(beam.DoFn):
    """Emits each of the outputs of a read, with its own time."""

    luminosity_only_unpacks = True  # see core.ONLY_UNPACKS

    def process(self, element: Outputs) -> Iterator[Any]:
        """Yield the outputs as they are. An error in a step that takes one names its record."""
        return noting(element, element.runs)


coders.registry.register_coder(Outputs, OutputsCoder)
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


def emitter_of(
    timestamps: TimestampPolicy,
    key: Any,
    value: Any,
    registry: SchemaRegistry | None,
    *,
    values_only: bool,
    as_table: bool,
    schema: pa.Schema | None,
) -> Emitter:
    """Return what turns records into the elements that the arguments of ``ReadKafka`` ask for."""
    if as_table and values_only:
        raise InvalidArgument("found as_table= and values_only=, expected one of them")
    if schema is not None and not as_table:
        raise InvalidArgument("found schema= without as_table=True, expected both or neither")
    read = deserializer(key, value, registry)
    if not as_table:
        return Emitter(timestamps, read, values_only=values_only)
    return TableEmitter(timestamps, read, table_schema(key, value, schema), has_fields=schema is not None)


class TableEmitter(Emitter):
    """Turns records of one partition into a record batch, whose time is the earliest of its rows."""

    def __init__(
        self, timestamps: TimestampPolicy, deserializer: Deserializer | None, schema: pa.Schema, *, has_fields: bool
    ) -> None:
        super().__init__(timestamps, deserializer)
        self.schema = self._schema = schema
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
