"""Tests that ReadTable reads the rows and types that WriteTable wrote."""

from __future__ import annotations

import datetime
import math
from datetime import date, timedelta
from decimal import Decimal
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyarrow import parquet

from luminosity import ReadTable, WriteTable
from luminosity.errors import TableError


def written(path: Path, *batches: pa.RecordBatch, **options: Any) -> str:
    with beam.Pipeline("FnApiRunner") as pipeline:
        _ = pipeline | beam.Create(batches, reshuffle=False) | WriteTable(str(path), **options)
    return str(path)


def read(path: str, **options: Any) -> pa.Table:
    transform = ReadTable(path, **options)
    return pa.Table.from_batches(transform.first(1_000_000), transform.schema)


@pytest.mark.parametrize("name", ["out", "out.parquet"])
def test_vectors_of_which_some_are_null_come_back_from_parquet(tmp_path: Path, name: str) -> None:
    kind = pa.list_(pa.float32(), 2)
    whole = pa.record_batch({"n": [0, 1], "v": pa.array([[1, 2], [3, 4]], kind)})
    with_null = pa.record_batch({"n": [2, 3, 4], "v": pa.array([[5, 6], None, [7, 8]], kind)})
    path = written(tmp_path / name, whole, with_null)
    expected = pa.Table.from_batches([whole, with_null])
    found = read(path).sort_by("n")
    assert found.schema == expected.schema
    assert found.to_pylist() == expected.to_pylist()
    # pyarrow itself can read it, too: the file does not describe lists with nulls as fixed-size.
    assert parquet.read_table(path).sort_by("n").to_pylist() == expected.to_pylist()


def test_vectors_without_nulls_are_of_a_fixed_size_for_other_readers_too(tmp_path: Path) -> None:
    batch = pa.record_batch({"v": pa.array([[1, 2]], pa.list_(pa.float32(), 2))}).replace_schema_metadata({"by": "us"})
    found = parquet.read_table(written(tmp_path / "out", batch))
    assert found.schema.equals(batch.schema, check_metadata=False)
    assert found.schema.metadata == {b"by": b"us"}


@pytest.mark.parametrize(
    "where",
    [
        ~(pc.field("x") > 5),
        ~(pc.field("x") <= pc.field("y")),
        pc.field("x").is_null(nan_is_null=True),
        (pc.field("x") > 5) & (pc.field("n") < 2),
    ],
    ids=str,
)
def test_rows_with_nan_are_not_lost_with_the_row_groups_that_a_condition_rules_out(tmp_path: Path, where: Any) -> None:
    table = pa.table(
        {"x": [6.0, 7.0, math.nan, 1.0, 2.0, None], "y": [9.0, math.nan, 9.0, 9.0, 9.0, 9.0], "n": range(6)}
    )
    parquet.write_table(table, tmp_path / "x.parquet", row_group_size=3)
    expected = table.filter(where)["n"].to_pylist()
    assert expected
    assert read(str(tmp_path / "x.parquet"), where=where)["n"].to_pylist() == expected


@pytest.mark.parametrize("options", [{}, {"newlines_in_values": True}], ids=str)
@pytest.mark.parametrize("name", ["out", "out.csv", "out.csv.gz"])
def test_nulls_of_a_single_csv_column_are_rows_too(tmp_path: Path, name: str, options: dict[str, Any]) -> None:
    batch = pa.record_batch({"text": ["a", None, "", 'say "b"', None]})
    path = written(tmp_path / name, batch, format="csv")
    assert read(path, **options).to_pylist() == batch.to_pylist()


def test_a_line_break_within_a_single_column_is_still_found(tmp_path: Path) -> None:
    (tmp_path / "x.csv").write_text('text\n\n"a\nb"\n')
    assert read(str(tmp_path / "x.csv"))["text"].to_pylist()[-1] == "a\nb"
    with pytest.raises(TableError, match="a value begins in one line and ends in another"):
        read(str(tmp_path / "x.csv"), newlines_in_values=False)


def test_what_json_lines_take_comes_back_by_a_schema(tmp_path: Path) -> None:
    day, time, span = date(2024, 1, 31), datetime.time(12, 0, 1, 7), timedelta(seconds=5)
    columns = {
        "day": pa.array([day, None]),
        "days": pa.array([[day], None], pa.list_(pa.date32())),
        "time": pa.array([time, None], pa.time64("us")),
        "span": pa.array([span, None], pa.duration("ms")),
        "at": pa.array([datetime.datetime(2024, 1, 31, 12), None], pa.timestamp("ms", "Europe/Berlin")),
        "price": pa.array([Decimal("1.50"), None], pa.decimal128(5, 2)),
        "kind": pa.array(["a", None]).dictionary_encode(),
        "long": pa.array([["a", None], None], pa.large_list(pa.string())),
        "vectors": pa.array([[[1, 2]], None], pa.list_(pa.list_(pa.float32(), 2))),
        "both": pa.array(
            [{"v": [1, 2], "day": day}, None], pa.struct({"v": pa.list_(pa.float32(), 2), "day": pa.date32()})
        ),
    }
    batch = pa.record_batch(columns)
    path = written(tmp_path / "out", batch, format="jsonl")
    found = read(path, schema=batch.schema)
    assert found.schema == batch.schema
    assert found.to_pylist() == batch.to_pylist()


def test_a_folder_whose_value_is_of_another_type_is_named(tmp_path: Path) -> None:
    path = written(
        tmp_path / "out", pa.record_batch({"year": ["2024", "soon", None], "n": [1, 2, 3]}), partition_by="year"
    )
    with pytest.raises(TableError, match=r"year=soon/.*: found the folder year=soon, expected int32"):
        read(path, schema=pa.schema({"year": pa.int32(), "n": pa.int64()}))
