"""Tables for tests: made of random rows, and compared however they are cut into batches."""

from __future__ import annotations

import datetime
import json
from collections import Counter
from collections.abc import Callable, Iterable, Mapping
from typing import Any

import numpy as np
import pyarrow as pa
from apache_beam.testing.util import BeamAssertException
from pyarrow import csv, parquet

from luminosity.errors import InvalidType, TableError
from luminosity.io.formats import Format, recognise
from luminosity.tables.types import arrow_type, is_any_list

__all__ = ["FakeTable", "OneOf", "equal_table"]

_WORDS = [
    "the",
    "a",
    "this",
    "film",
    "book",
    "meal",
    "was",
    "is",
    "never",
    "always",
    "really",
    "good",
    "bad",
    "long",
    "short",
    "funny",
    "sad",
    "worth",
    "my",
    "time",
    "again",
]


class OneOf:
    """A column whose values are picked from ``values``."""

    def __init__(self, *values: Any) -> None:
        self.values = pa.array(values)


class FakeTable:
    """A table of random rows, which are the same for the same seed.

    >>> columns = {"id": int, "text": str, "lang": FakeTable.one_of("en", "de"), "vector": FakeTable.vector(8)}
    >>> fake = FakeTable(columns, rows=100)
    >>> fake.table().num_rows, len(fake.batches(rows_per_batch=40))
    (100, 3)
    >>> fake.schema.field("vector").type
    FixedSizeListType(fixed_size_list<item: float>[8])

    Args:
        columns: for each name a Python type, an Arrow type, ``FakeTable.vector(n)`` or ``FakeTable.one_of(...)``.
            Integers are ids: every number below ``rows`` once, in random order. Texts are a few words.
        rows: the number of rows.
        seed: the seed of the random values.
        nulls: the share of values that are null, for all columns or by name.
    """

    def __init__(
        self,
        columns: Mapping[str, Any],
        *,
        rows: int = 1000,
        seed: int = 0,
        nulls: float | Mapping[str, float] = 0.0,
    ) -> None:
        self._rows = rows
        random = np.random.default_rng(seed)
        shares = nulls if isinstance(nulls, Mapping) else dict.fromkeys(columns, nulls)
        arrays = {name: _made_up(name, kind, rows, random, shares.get(name, 0.0)) for name, kind in columns.items()}
        self._table = pa.table(arrays)

    @staticmethod
    def vector(size: int, of: pa.DataType | None = None) -> pa.DataType:
        """Return the type of vectors with ``size`` numbers, which are 32-bit floats by default."""
        return pa.list_(pa.float32() if of is None else of, size)

    @staticmethod
    def one_of(*values: Any) -> OneOf:
        """Return the type of a column whose values are picked from ``values``."""
        return OneOf(*values)

    @property
    def schema(self) -> pa.Schema:
        """The schema of the table."""
        return self._table.schema

    def table(self) -> pa.Table:
        """Return all rows as a ``pyarrow.Table``."""
        return self._table

    def batches(self, rows_per_batch: int = 100) -> list[pa.RecordBatch]:
        """Return all rows as record batches, for ``beam.Create``."""
        return self._table.to_batches(max_chunksize=rows_per_batch)

    def rows(self) -> list[dict[str, Any]]:
        """Return all rows as dicts."""
        return self._table.to_pylist()

    def write(self, path: Any) -> None:
        """Write the table to one local file, in the format and compression of its suffix."""
        kind, compression = recognise(str(path))
        if not kind.is_written:
            raise TableError(f"{path}: {kind.value} can only be read")
        if kind is Format.PARQUET:
            parquet.write_table(self._table, path)
            return
        with pa.output_stream(str(path), compression=compression) as stream:
            if kind.is_csv:
                csv.write_csv(self._table, stream, csv.WriteOptions(delimiter="\t" if kind is Format.TSV else ","))
            elif kind is Format.ARROW:
                with pa.ipc.new_file(stream, self.schema) as writer:
                    writer.write_table(self._table)
            else:
                stream.write("".join(json.dumps(row, default=str) + "\n" for row in self.rows()).encode())


def _made_up(name: str, kind: Any, rows: int, random: np.random.Generator, nulls: float) -> pa.Array:
    mask = random.random(rows) < nulls
    if isinstance(kind, OneOf):
        picked = random.integers(len(kind.values), size=rows)
        return kind.values.take(pa.array(picked, mask=mask))
    arrow = kind if isinstance(kind, pa.DataType) else arrow_type(kind)
    if arrow is None:
        raise InvalidType(
            f"found {kind!r} for the column {name!r}, expected a Python type, an Arrow type or FakeTable.one_of()"
        )
    values = _values(arrow, rows, random)
    return pa.array([None if null else value for value, null in zip(values, mask.tolist(), strict=True)], arrow)


def _values(kind: pa.DataType, rows: int, random: np.random.Generator) -> list[Any]:
    if pa.types.is_boolean(kind):
        return (random.random(rows) < 0.5).tolist()
    if pa.types.is_integer(kind):
        return (random.permutation(rows) % 2 ** min(kind.bit_width - 1, 62)).tolist()
    if pa.types.is_floating(kind):
        numbers = random.standard_normal(rows)
        return (
            numbers.astype(kind.to_pandas_dtype()).tolist()
            if not pa.types.is_float16(kind)
            else list(numbers.astype("f2"))
        )
    if pa.types.is_string(kind) or pa.types.is_large_string(kind):
        return [" ".join(random.choice(_WORDS, size=count)) for count in random.integers(1, 12, size=rows)]
    if pa.types.is_binary(kind) or pa.types.is_large_binary(kind):
        return [random.bytes(count) for count in random.integers(1, 16, size=rows)]
    if pa.types.is_fixed_size_list(kind):
        values = _values(kind.value_type, rows * kind.list_size, random)
        return [values[at : at + kind.list_size] for at in range(0, len(values), kind.list_size)]
    if is_any_list(kind):
        return [_values(kind.value_type, int(count), random) for count in random.integers(0, 4, size=rows)]
    if pa.types.is_struct(kind):
        columns = {field.name: _values(field.type, rows, random) for field in kind}
        return [{name: values[index] for name, values in columns.items()} for index in range(rows)]
    if pa.types.is_timestamp(kind) or pa.types.is_date(kind):
        start = datetime.datetime(2024, 1, 1, tzinfo=datetime.timezone.utc if getattr(kind, "tz", None) else None)
        times = [
            start + datetime.timedelta(seconds=second) for second in random.integers(365 * 86400, size=rows).tolist()
        ]
        return [time.date() for time in times] if pa.types.is_date(kind) else times
    raise InvalidType(f"found {kind}, which has no random values", fix="append this column to table() yourself")


_SHOWN_ROWS = 5  # enough to see the kind of difference


def equal_table(expected: Any, *, ordered: bool = False) -> Callable[[Iterable[pa.RecordBatch]], None]:
    """Return a matcher for Beam's ``assert_that``: same columns and rows, however they are cut into batches.

    >>> equal_table(pa.table({"n": [1, 2]}))([pa.record_batch({"n": [2]}), pa.record_batch({"n": [1]})])
    >>> equal_table(pa.table({"n": [1, 2]}))([pa.record_batch({"n": [2, 3]})])
    Traceback (most recent call last):
    apache_beam.testing.util.BeamAssertException: tables differ:
      rows missing (1): {'n': 1}
      rows not expected (1): {'n': 3}

    Args:
        expected: a ``pyarrow.Table``, a record batch, or a list of record batches.
        ordered: also compare the order of rows. A pipeline keeps no order between batches.
    """
    wanted = _as_table(expected)

    def matches(actual: Iterable[pa.RecordBatch]) -> None:
        batches = list(actual)
        differences = _differing_batches(batches, wanted.schema)
        if not differences:
            found = pa.Table.from_batches(batches, wanted.schema).to_pylist()
            differences = _differing_rows(found, wanted.to_pylist(), ordered)
        if differences:
            raise BeamAssertException("\n  ".join(["tables differ:", *differences]))

    return matches


def _as_table(expected: Any) -> pa.Table:
    if isinstance(expected, pa.Table):
        return expected
    return pa.Table.from_batches([expected] if isinstance(expected, pa.RecordBatch) else expected)


def _differing_batches(batches: list[pa.RecordBatch], wanted: pa.Schema) -> list[str]:
    """Return the differences of the first batch that has other columns."""
    for batch in batches:
        if not isinstance(batch, pa.RecordBatch):
            return [f"found an element of type {type(batch).__name__}, expected pyarrow.RecordBatch"]
        if batch.schema.equals(wanted):
            continue
        found, expected = _columns(batch.schema), _columns(wanted)
        if dict(found) == dict(expected):
            return [f"columns in another order: found {list(dict(found))}, expected {list(dict(expected))}"]
        return [
            *(f"column missing: {name}: {kind}" for name, kind in expected if name not in dict(found)),
            *(f"column not expected: {name}: {kind}" for name, kind in found if name not in dict(expected)),
            *(
                f"column {name}: found {kind}, expected {dict(expected)[name]}"
                for name, kind in found
                if dict(expected).get(name, kind) != kind
            ),
        ]
    return []


def _columns(schema: pa.Schema) -> list[tuple[str, str]]:
    return [(field.name, f"{field.type}{'' if field.nullable else ' not null'}") for field in schema]


def _differing_rows(found: list[Any], expected: list[Any], ordered: bool) -> list[str]:
    if ordered:
        for at, (row, wanted) in enumerate(zip(found, expected, strict=False)):
            if repr(row) != repr(wanted):
                return [f"row {at}: found {row}, expected {wanted}"]
        return [] if len(found) == len(expected) else [f"found {len(found)} rows, expected {len(expected)}"]
    have, want = Counter(map(repr, found)), Counter(map(repr, expected))
    return [*_listed("rows missing", want - have), *_listed("rows not expected", have - want)]


def _listed(what: str, rows: Counter[str]) -> list[str]:
    if not rows:
        return []
    some = list(rows.elements())
    more = "; …" if len(some) > _SHOWN_ROWS else ""
    return [f"{what} ({len(some)}): {'; '.join(some[:_SHOWN_ROWS])}{more}"]
