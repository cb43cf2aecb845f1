"""Tests of ReadTable: every row is read once, in every format and on both runners."""

from __future__ import annotations

import random
from itertools import islice
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from apache_beam.testing.util import assert_that, equal_to
from pyarrow import parquet

from luminosity import ReadTable
from luminosity.errors import TableError
from luminosity.io.reading import reader, text_lines
from luminosity.io.reading.reader import ByteRangeTracker
from luminosity.io.reading.readers import ReadRanges
from tests.both_runners import Pipelines
from tests.io.reading.reads import counters, numbered, read_alone, write, write_bytes

NAMES = ["t.parquet", "t.arrow", "t.csv", "t.jsonl", "t.csv.gz", "t.jsonl.gz", "t.csv.bz2", "t.jsonl.zst", "t.csv.lz4"]


def test_every_format_gives_its_rows_once(tmp_path: Path, pipelines: Pipelines) -> None:
    table = numbered(100 * len(NAMES))
    for at, name in enumerate(NAMES):
        write(tmp_path / name, table.slice(100 * at, 100), 30)

    with pipelines() as (pipeline, run):
        ids = pipeline | ReadTable(str(tmp_path)) | beam.FlatMap(pa.RecordBatch.to_pylist)
        assert_that(ids, equal_to(table.to_pylist()))

    sizes = sum(path.stat().st_size for path in tmp_path.iterdir())
    assert counters(run.result) == {"rows_read": len(table), "bytes_read": sizes, "files_read": len(NAMES)}


def test_large_files_are_cut_before_they_are_read(tmp_path: Path, pipelines: Pipelines) -> None:
    rows, noise = 80_000, random.Random(0)
    table = pa.table({"id": range(rows), "text": [f"{noise.getrandbits(1200):x}" for _ in range(rows)]})
    names = ["t.parquet", "t.arrow", "t.csv", "t.jsonl"]
    for name in names:
        write(tmp_path / name, table, 20_000)
    sizes = [path.stat().st_size for path in tmp_path.iterdir()]
    assert min(sizes) > 1.5 * reader.PIECE_BYTES

    with pipelines() as (pipeline, run):
        sums = pipeline | ReadTable(str(tmp_path), columns=["id"]) | beam.Map(lambda batch: pc.sum(batch["id"]).as_py())
        assert_that(sums | beam.CombineGlobally(sum), equal_to([len(names) * rows * (rows - 1) // 2]))

    assert counters(run.result) == {"rows_read": 4 * rows, "bytes_read": sum(sizes), "files_read": 4}


def test_a_parquet_file_is_first_cut_between_row_groups(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "t.parquet", numbered(1000), 100)
    monkeypatch.setattr("luminosity.io.reading.readers.PIECE_BYTES", 1000)
    read = row_groups_read(monkeypatch)

    assert len(read_alone(ReadTable(str(tmp_path), rows_per_batch=30))) == 1000
    assert sorted(read) == list(range(10))


def row_groups_read(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    """Record the row groups whose decoding begins."""
    read: list[int] = []
    iter_batches = parquet.ParquetFile.iter_batches

    def counted(self: Any, *args: Any, row_groups: list[int], **kwargs: Any) -> Any:
        read.extend(row_groups)
        return iter_batches(self, *args, row_groups=row_groups, **kwargs)

    monkeypatch.setattr(parquet.ParquetFile, "iter_batches", counted)
    return read


def test_only_the_columns_that_are_asked_for(tmp_path: Path) -> None:
    for name in ("t.parquet", "t.arrow", "t.csv", "t.jsonl"):
        write(tmp_path / name, pa.table({"a": [1, 2], "b": ["x", "y"], "c": [0.5, 1.5]}))
        transform = ReadTable(str(tmp_path / name), columns=["c", "a"])
        assert transform.schema == pa.schema({"c": pa.float64(), "a": pa.int64()})
        assert read_alone(transform) == [{"c": 0.5, "a": 1}, {"c": 1.5, "a": 2}]


def test_a_condition_on_a_column_that_is_not_asked_for(tmp_path: Path, pipelines: Pipelines) -> None:
    for name in ("t.parquet", "t.arrow", "t.csv", "t.jsonl"):
        write(tmp_path / name, numbered(500))

    with pipelines() as (pipeline, _):
        where = (pc.field("id") >= 498) | pc.field("text").isin(["row 7"])
        read = pipeline | ReadTable(str(tmp_path), columns=["text"], where=where)
        wanted = [{"text": f"row {number}"} for number in (7, 498, 499)] * 4
        assert_that(read | beam.FlatMap(pa.RecordBatch.to_pylist), equal_to(wanted))


def test_row_groups_that_a_condition_excludes_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    write(tmp_path / "t.parquet", numbered(1000), 100)
    read = row_groups_read(monkeypatch)

    rows = read_alone(ReadTable(str(tmp_path), where=(pc.field("id") > 850) & (pc.field("text") != "row 999")))

    assert [row["id"] for row in rows] == list(range(851, 999))
    assert read == [8, 9]


def test_a_condition_may_name_nested_columns_and_numbers_of_columns(tmp_path: Path) -> None:
    table = pa.table({"a": [1, 2], "s": [{"x": 1}, {"x": 5}], "b": ["u", "v"]})
    write(tmp_path / "t.parquet", table)
    assert read_alone(ReadTable(str(tmp_path), columns=["b"], where=pc.field("s", "x") > 2)) == [{"b": "v"}]
    assert read_alone(ReadTable(str(tmp_path), columns=["b"], where=pc.field(0) < 2)) == [{"b": "u"}]


def test_batches_are_bounded_in_rows_and_in_bytes(tmp_path: Path) -> None:
    write(tmp_path / "long.parquet", numbered(150_000), 150_000)
    write(tmp_path / "wide.parquet", pa.table({"text": ["x" * (1 << 20)] * 48}), 48)
    write(tmp_path / "wide.arrow", pa.table({"text": ["x" * (1 << 20)] * 48}), 48)

    assert _sizes(ReadTable(f"{tmp_path}/long.parquet")) == [65_536, 65_536, 18_928]
    assert _sizes(ReadTable(f"{tmp_path}/long.parquet", rows_per_batch=60_000)) == [60_000, 60_000, 30_000]
    for name in ("wide.parquet", "wide.arrow"):
        sizes = _sizes(ReadTable(f"{tmp_path}/{name}"))
        assert sum(sizes) == 48
        assert max(sizes) <= 32


def _sizes(transform: ReadTable) -> list[int]:
    step = ReadRanges(transform._settings)
    (file,) = transform._files
    return [batch.num_rows for batch in step.process(file, ByteRangeTracker(step.initial_restriction(file)))]


def test_what_a_split_gives_back_goes_on_where_decoding_stopped(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    """If a runner splits a range every few batches, the row group is still decoded only once."""
    write(tmp_path / "t.parquet", numbered(1000), 1000)
    begun = row_groups_read(monkeypatch)
    transform = ReadTable(str(tmp_path), rows_per_batch=10)
    step = ReadRanges(transform._settings)
    (file,) = transform._files
    rest, ids = step.initial_restriction(file), []
    while rest:
        tracker = ByteRangeTracker(rest)
        reading = step.process(file, tracker)
        ids += [number for batch in islice(reading, 1) for number in batch["id"].to_pylist()]
        rest = split[1] if (split := tracker.try_split(0)) else None
        ids += [number for batch in reading for number in batch["id"].to_pylist()]

    assert ids == list(range(1000))
    assert len(begun) == 1


@pytest.mark.parametrize(
    ("data", "rows"),
    [
        (b"a,b\n1,x\n2,y\n", 2),
        (b"a,b\n1,x\n2,y", 2),
        (b"\xef\xbb\xbfa,b\r\n1,x\r\n2,y\r\n", 2),
        (b"\n\na,b\n\n1,x\n\n\n2,y\n\n", 2),
        (b"\r\na,b\r\n\r\n1,x\r\n2,y\r\n\r", 2),
        (b'"a","b"\n1,"x, 5"" z"\n2,5" pipe\n', 2),
        (b"a,b\n", 0),
        (b"a,b", 0),
        (b"", 0),
    ],
)
def test_csv_as_it_comes(data: bytes, rows: int, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.csv").write_bytes(data)
    transform = ReadTable(str(tmp_path), schema=pa.schema({"a": pa.int64(), "b": pa.string()}))
    for seed in range(20):
        monkeypatch.setattr(text_lines, "TEXT_BYTES", 1 + seed)
        found = read_alone(transform, random.Random(seed))
        assert sorted(row["a"] for row in found) == [1, 2][:rows]


@pytest.mark.parametrize(
    "data", [b'{"a":1}\n{"a":2}\n', b'\xef\xbb\xbf{"a":1}\r\n\r\n\n{"a":2}', b'\n{"a":1}\n{"a":2}\n  \n']
)
def test_json_lines_as_they_come(data: bytes, tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "t.jsonl").write_bytes(data)
    for seed in range(20):
        monkeypatch.setattr(text_lines, "TEXT_BYTES", 1 + seed)
        monkeypatch.setattr(text_lines, "_READ_AHEAD", 3)
        assert sorted(row["a"] for row in read_alone(ReadTable(str(tmp_path)), random.Random(seed))) == [1, 2]


def test_nulls_and_empty_texts_come_back_from_csv(tmp_path: Path) -> None:
    table = pa.table({"n": [1, None, 3], "text": ["", None, "NA"], "x": pa.array([None] * 3, pa.float64())})
    write(tmp_path / "t.csv", table)
    assert read_alone(ReadTable(str(tmp_path), schema=table.schema)) == table.to_pylist()

    (tmp_path / "t.csv").write_bytes(b"n;text\nNA;a\n2;b\n")
    found = read_alone(ReadTable(str(tmp_path), delimiter=";", null_values=["NA"]))
    assert found == [{"n": None, "text": "a"}, {"n": 2, "text": "b"}]


def test_line_breaks_in_values_of_csv(tmp_path: Path, pipelines: Pipelines) -> None:
    table = pa.table({"id": range(300), "text": [f"{number}\n" * (number % 3) for number in range(300)]})
    write(tmp_path / "t.csv", table)
    write(tmp_path / "t.csv.gz", table)

    with pipelines() as (pipeline, _):
        read = pipeline | ReadTable(str(tmp_path), newlines_in_values=True)
        assert_that(read | beam.FlatMap(pa.RecordBatch.to_pylist), equal_to(table.to_pylist() * 2))


def test_vectors_come_back_from_json_lines(tmp_path: Path) -> None:
    table = pa.table({"v": pa.array([[1.0, 2.0], None, [3.0, 4.0]], pa.list_(pa.float32(), 2))})
    write(tmp_path / "t.jsonl", table)
    assert read_alone(ReadTable(str(tmp_path), schema=table.schema)) == table.to_pylist()


def test_a_text_of_a_megabyte_and_more(tmp_path: Path) -> None:
    table = pa.table({"id": [1, 2, 3], "text": ["a", "b" * 9_000_000, "c"]})
    for name in ("t.jsonl", "t.csv", "t.parquet", "t.jsonl.gz"):
        write(tmp_path / name, table)
        found = sorted(read_alone(ReadTable(str(tmp_path / name)), random.Random(1)), key=lambda row: row["id"])
        assert found == table.to_pylist()


def test_a_stream_of_arrow_is_read_whole(tmp_path: Path) -> None:
    table = numbered(500)
    with pa.OSFile(str(tmp_path / "t.arrow"), "wb") as sink, pa.ipc.new_stream(sink, table.schema) as writer:
        writer.write_table(table, max_chunksize=100)
    for seed in range(5):
        assert read_alone(ReadTable(str(tmp_path)), random.Random(seed)) == table.to_pylist()


def test_order_nullability_and_metadata_of_columns_may_differ(tmp_path: Path) -> None:
    parquet.write_table(pa.table({"a": [1], "b": ["x"]}).replace_schema_metadata({"k": "v"}), tmp_path / "1.parquet")
    strict = pa.schema([pa.field("b", pa.string(), nullable=False), pa.field("a", pa.int64(), nullable=False)])
    parquet.write_table(pa.table({"b": ["y"], "a": [2]}, schema=strict), tmp_path / "2.parquet")
    (tmp_path / "3.csv").write_text("b,a\nz,3\n")
    assert read_alone(ReadTable(str(tmp_path))) == [{"a": 1, "b": "x"}, {"a": 2, "b": "y"}, {"a": 3, "b": "z"}]


def test_files_of_a_folder_and_what_is_left_out(tmp_path: Path) -> None:
    for name in ("b.parquet", "a.parquet", "_SUCCESS.parquet", ".hidden.parquet"):
        write(tmp_path / name, numbered(1))
    (tmp_path / "README.txt").write_text("no table")
    (tmp_path / "other").mkdir()
    write(tmp_path / "other" / "c.parquet", numbered(1))

    assert [Path(file.path).name for file in ReadTable(str(tmp_path))._files] == ["a.parquet", "b.parquet"]
    assert [Path(file.path).name for file in ReadTable(f"{tmp_path}/*.parquet")._files] == ["a.parquet", "b.parquet"]
    both = ReadTable([f"{tmp_path}/b.parquet", f"{tmp_path}/*.parquet", f"{tmp_path}/_SUCCESS.parquet"])
    assert [Path(file.path).name for file in both._files] == ["_SUCCESS.parquet", "a.parquet", "b.parquet"]


def test_columns_in_the_names_of_folders(tmp_path: Path, pipelines: Pipelines) -> None:
    for folder, rows in (("year=2024/place=a%20b", 2), ("year=2025/place=__HIVE_DEFAULT_PARTITION__", 1)):
        (tmp_path / folder).mkdir(parents=True)
        write(tmp_path / folder / "t.parquet", numbered(rows).select(["id"]))

    with pipelines() as (pipeline, _):
        read = pipeline | ReadTable(str(tmp_path))
        expected = [
            {"id": 0, "year": 2024, "place": "a b"},
            {"id": 1, "year": 2024, "place": "a b"},
            {"id": 0, "year": 2025, "place": None},
        ]
        assert_that(read | beam.FlatMap(pa.RecordBatch.to_pylist), equal_to(expected))

    where = (pc.field("year") == 2025) | (pc.field("id") == 1)
    assert read_alone(ReadTable(str(tmp_path), columns=["year"], where=where)) == [{"year": 2024}, {"year": 2025}]
    as_text = pa.schema({"id": pa.int64(), "year": pa.string(), "place": pa.string()})
    assert read_alone(ReadTable(str(tmp_path), columns=["year"], schema=as_text))[0] == {"year": "2024"}


def test_files_that_their_folders_exclude_are_not_read(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    for year in ("2024", "2025", "__HIVE_DEFAULT_PARTITION__"):
        (tmp_path / f"year={year}").mkdir()
        write(tmp_path / f"year={year}" / "t.parquet", numbered(2))
    read = row_groups_read(monkeypatch)

    assert len(read_alone(ReadTable(str(tmp_path), where=pc.field("year") == 2025))) == 2
    assert len(read) == 1


def test_format_for_names_that_do_not_tell(tmp_path: Path) -> None:
    write_bytes(tmp_path / "log.txt.gz", b'{"a": 1}\n')
    assert read_alone(ReadTable(f"{tmp_path}/log.txt.gz", format="jsonl")) == [{"a": 1}]
    with pytest.raises(TableError, match=r"log\.txt\.gz: the name does not tell the format"):
        ReadTable(f"{tmp_path}/log.txt.gz")


def test_rows_are_counted_or_estimated_without_reading_them(tmp_path: Path) -> None:
    for name in ("t.parquet", "t.csv", "t.jsonl", "t.csv.gz", "t.arrow"):
        write(tmp_path / name, numbered(500))
    assert ReadTable(tmp_path / "t.parquet").count() == (500, True)
    assert ReadTable(tmp_path / "t.csv").count() == (500, True)
    assert ReadTable(tmp_path / "t.jsonl").count() == (500, True)
    assert ReadTable(f"{tmp_path}/t.[jp]*").count() == (1000, True)
    assert ReadTable(tmp_path / "t.csv.gz").count() is None
    assert ReadTable(tmp_path / "t.arrow").count() is None
    lines = pa.table({"id": range(100_000), "text": ["two\nlines, and some more"] * 100_000})
    write(tmp_path / "long.csv", lines)
    found = ReadTable(tmp_path / "long.csv").count()
    assert found is not None
    assert not found.is_exact
    assert abs(found.rows - 100_000) < 5_000
