"""Tests of FakeTable and equal_table."""

from __future__ import annotations

import datetime
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.testing.util import BeamAssertException, assert_that
from pyarrow import csv, feather, json, parquet

from luminosity import RowsFromTable, TableFromRows
from luminosity.testing import FakeTable, equal_table

COLUMNS = {
    "id": int,
    "text": str,
    "f": float,
    "ok": bool,
    "raw": bytes,
    "at": datetime.datetime,
    "day": datetime.date,
    "tags": list[str],
    "small": pa.int8(),
    "who": pa.struct([("name", pa.string())]),
    "vector": FakeTable.vector(8),
    "lang": FakeTable.one_of("en", "de"),
}


def test_the_same_seed_gives_the_same_rows() -> None:
    table = FakeTable(COLUMNS, rows=50, seed=1).table()
    assert table.equals(FakeTable(COLUMNS, rows=50, seed=1).table())
    assert not table.equals(FakeTable(COLUMNS, rows=50, seed=2).table())
    assert sorted(table["id"].to_pylist()) == list(range(50))
    assert set(table["lang"].to_pylist()) == {"en", "de"}
    assert table.schema.field("vector").type == pa.list_(pa.float32(), 8)


def test_nulls_are_where_they_are_asked_for() -> None:
    assert all(column.null_count == 0 for column in FakeTable(COLUMNS, rows=50).table().columns)
    assert all(column.null_count == 50 for column in FakeTable(COLUMNS, rows=50, nulls=1.0).table().columns)
    some = FakeTable(COLUMNS, rows=50, nulls={"text": 0.5}).table()
    assert 10 < some["text"].null_count < 40
    assert some["id"].null_count == 0


@pytest.mark.parametrize(
    ("name", "read"),
    [
        ("t.parquet", parquet.read_table),
        ("t.jsonl.gz", lambda path: json.read_json(pa.input_stream(path))),
        ("t.csv", csv.read_csv),
        ("t.arrow", feather.read_table),
    ],
)
def test_written_tables_can_be_read(name: str, read: Any, tmp_path: Path) -> None:
    fake = FakeTable({"id": int, "text": str, "f": float}, rows=20)
    fake.write(tmp_path / name)
    assert read(str(tmp_path / name)).equals(fake.table())


def test_a_type_without_made_up_values_says_so() -> None:
    with pytest.raises(TypeError, match=r"found map<string, int64>, which has no random values"):
        FakeTable({"m": dict[str, int]})
    with pytest.raises(TypeError, match="found 3 for the column 'm', expected a Python type"):
        FakeTable({"m": 3})


def test_made_up_tables_go_through_a_pipeline() -> None:
    fake = FakeTable(COLUMNS, rows=100, nulls=0.2)
    with beam.Pipeline("FnApiRunner") as pipeline:
        table = pipeline | beam.Create(fake.batches(rows_per_batch=30))
        again = table | RowsFromTable() | beam.Reshuffle() | TableFromRows(fake.schema)
        assert_that(again, equal_table(fake.table()))


@pytest.mark.parametrize(
    ("found", "ordered", "message"),
    [
        ({"a": [1, 2, 2]}, False, r"rows not expected \(1\): {'a': 2}$"),
        ({"a": [1] * 10}, False, r"rows missing \(1\): {'a': 2}\n  rows not expected \(9\): ({'a': 1}; ){5}…"),
        ({"a": [2, 1]}, True, r"row 0: found {'a': 2}, expected {'a': 1}"),
        ({"a": [1]}, True, r"found 1 rows, expected 2"),
        ({"a": [1.0, 2.0]}, False, r"column a: found double, expected int64"),
        ({"b": ["x"]}, False, r"column missing: a: int64\n  column not expected: b: string"),
    ],
)
def test_differences_are_readable(found: dict[str, Any], ordered: bool, message: str) -> None:
    with pytest.raises(BeamAssertException, match=message):
        equal_table(pa.table({"a": [1, 2]}), ordered=ordered)([pa.record_batch(found)])


def test_an_empty_table_equals_no_batches() -> None:
    equal_table(pa.table({"a": pa.array([], pa.int64())}))([])
    with pytest.raises(BeamAssertException, match="found an element of type int"):
        equal_table(pa.table({"a": [1]}))([3])
