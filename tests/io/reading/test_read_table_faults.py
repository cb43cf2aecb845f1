"""Tests of ReadTable's errors: they name the file and the likely mistake."""

from __future__ import annotations

import re
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from pyarrow import parquet

from luminosity import ReadTable
from luminosity.errors import TableError
from luminosity.io.reading import text_lines
from tests.both_runners import Pipelines
from tests.io.reading.reads import numbered, read_alone, write, write_bytes


@pytest.fixture
def table(tmp_path: Path) -> str:
    write(tmp_path / "a.parquet", pa.table({"stars": [1, 2], "text": ["x", "y"]}))
    return str(tmp_path)


@pytest.mark.parametrize(
    ("arguments", "message"),
    [
        ({"columns": ["star"]}, r"the column 'star': .*a\.parquet does not have it; did you mean 'stars'\?"),
        ({"columns": ["zzz"]}, r"the column 'zzz': .* it has stars, text"),
        ({"columns": "stars"}, r"found columns='stars', expected a list of names"),
        ({"columns": []}, r"found columns=\[\], expected at least one name"),
        ({"columns": ["text", "text"]}, r"found the columns \['text', 'text'\], expected every name once"),
        (
            {"where": pc.field("star") > 1},
            r"where= names the column 'star': .*a\.parquet does not have it; did you mean 'stars'",
        ),
        ({"where": pc.field("text", "a") > 1}, r"where= names the column 'text': |where=.*can't be evaluated"),
        ({"where": pc.field("stars") > "x"}, r"where=.*can't be evaluated on the columns of .*no kernel matching"),
        ({"where": pc.field("stars")}, r"where=stars can't be evaluated .* must evaluate to bool"),
        ({"where": "stars > 1"}, r"found where='stars > 1' of type str, expected an expression of pyarrow"),
        ({"format": "xml"}, "found format='xml', expected one of parquet, jsonl, csv, tsv, arrow"),
        ({"rows_per_batch": 0}, "found rows_per_batch=0, expected 1 or more"),
        ({"delimiter": ";"}, r"are for CSV, but no CSV file: the first file is .*a\.parquet; pass format='csv'"),
    ],
)
def test_what_can_not_be_is_refused_when_it_is_built(table: str, arguments: dict[str, Any], message: str) -> None:
    with pytest.raises(TableError, match=message):
        ReadTable(table, **arguments)


def test_no_file_matches(tmp_path: Path) -> None:
    write(tmp_path / "reviews.parquet", numbered(1))
    with pytest.raises(
        TableError,
        match=f"no table file matches {tmp_path}/data/\\*.parquet; the nearest folder that exists is {tmp_path}, "
        "which contains reviews.parquet",
    ):
        ReadTable(f"{tmp_path}/data/*.parquet")
    with pytest.raises(TableError, match=r"did you mean 'reviews.parquet'\?"):
        ReadTable(f"{tmp_path}/review.parquet")
    (tmp_path / "empty").mkdir()
    with pytest.raises(TableError, match=r"the nearest folder that exists is .*/empty, which is empty"):
        ReadTable(f"{tmp_path}/empty")
    with pytest.raises(TableError) as error:  # It is in the list, but not close.
        ReadTable(f"{tmp_path}/nosuch.parquet")
    assert str(error.value).endswith("which contains empty, reviews.parquet")


@pytest.mark.parametrize(
    ("address", "library", "message"),
    [
        ("nowhere://data/*", None, r"no file system is known for nowhere://, expected .* one of s3://, gs://, hdfs://"),
        (
            "s3://b/x.csv",
            "boto3",
            r"library for s3:// is not installed \(boto3\); .* pip install 'apache-beam\[aws",
        ),
        ("gs://b/x.csv", "google.cloud.storage", r"not installed \(google.cloud.storage\); .*'apache-beam\[gcp\]'"),
        ("hdfs://h/x.csv", "hdfs", r"not installed \(hdfs\); .*'apache-beam\[hadoop\]'"),
        ("https://h/x.csv", None, "found an address of the web, .*; download the file first"),
        ("file:///tmp/x.csv", None, "found file://, expected a plain path; write /tmp/x.csv"),
        ("s3a://b/x.csv", None, "found s3a://, which Beam calls s3://; write s3://b/x.csv"),
        ("S3://b/x.csv", None, "which Beam calls s3://; write s3://b/x.csv"),
    ],
)
def test_addresses_that_can_not_be_reached(
    address: str, library: str | None, message: str, monkeypatch: pytest.MonkeyPatch
) -> None:
    if library is not None:
        monkeypatch.setattr("luminosity.io.remote._is_installed", lambda _: False)
        monkeypatch.setattr("apache_beam.io.filesystems.FileSystems.match", _raise(ValueError("no library")))
    with pytest.raises(TableError, match=message):
        ReadTable(address)


def _raise(error: Exception) -> Any:
    def match(_: Any) -> Any:
        raise error

    return match


def test_missing_credentials_are_named(monkeypatch: pytest.MonkeyPatch) -> None:
    class NoCredentialsError(Exception):
        pass

    monkeypatch.setattr("luminosity.io.remote._is_installed", lambda _: True)
    monkeypatch.setattr(
        "apache_beam.io.filesystems.FileSystems.match", _raise(NoCredentialsError("Unable to locate credentials"))
    )
    with pytest.raises(TableError, match=r"s3://b/x: can't be reached: Unable to locate credentials; .*AWS_ACCESS_KEY"):
        ReadTable("s3://b/x")


def test_a_file_with_another_schema_is_named(tmp_path: Path, pipelines: Pipelines) -> None:
    write(tmp_path / "a.parquet", pa.table({"id": [1], "text": ["x"], "score": [0.5]}))
    write(tmp_path / "b.parquet", pa.table({"id": ["1"], "text": ["x"], "stars": [5]}))

    with pytest.raises(Exception, match="other columns") as failure, pipelines() as (pipeline, _):
        _ = pipeline | ReadTable(str(tmp_path))

    assert (
        f"{tmp_path}/b.parquet has other columns than {tmp_path}/a.parquet: column 'id': found string, expected int64; "
        "column 'score': found none, expected double; column 'stars': found int64, expected none"
    ) in str(failure.value)


@pytest.mark.parametrize(("name", "data"), [("b.csv", b"id,txt\n1,x\n"), ("b.arrow", None)])
def test_other_formats_with_another_schema(name: str, data: bytes | None, tmp_path: Path) -> None:
    write(tmp_path / "a.parquet", numbered(3))
    if data is None:
        write(tmp_path / name, pa.table({"id": [1], "txt": ["x"]}))
    else:
        (tmp_path / name).write_bytes(data)
    with pytest.raises(
        TableError, match=rf"{name} has other columns than .*a\.parquet: column 'text': found none, expected"
    ):
        read_alone(ReadTable(str(tmp_path)))


def test_an_unreadable_parquet_file(tmp_path: Path, pipelines: Pipelines) -> None:
    write(tmp_path / "a.parquet", numbered(10))
    write(tmp_path / "b.parquet", numbered(1000))
    (tmp_path / "b.parquet").write_bytes((tmp_path / "b.parquet").read_bytes()[:5000])

    with pytest.raises(Exception, match="can't be read") as failure, pipelines() as (pipeline, _):
        _ = pipeline | ReadTable(str(tmp_path)) | beam.Map(len)

    assert f"{tmp_path}/b.parquet: can't be read as parquet: it is damaged, incomplete, or has another" in str(
        failure.value
    )
    assert "Parquet magic bytes not found in footer" in str(failure.value)


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow", "t.csv.gz", "t.jsonl.zst", "t.jsonl"])
def test_something_else_under_that_name(name: str, tmp_path: Path) -> None:
    (tmp_path / name).write_text("This is not a table, whatever its name says.\n")
    with pytest.raises(
        TableError, match=rf"{re.escape(name)}(: can't be read as .* or not|: can't be .* another format|, line 1: )"
    ):
        ReadTable(str(tmp_path))


@pytest.mark.parametrize("name", ["t.parquet", "t.arrow"])
def test_an_empty_file_is_no_table(name: str, tmp_path: Path) -> None:
    write(tmp_path / f"a{name}", numbered(1))
    (tmp_path / name).touch()
    with pytest.raises(TableError, match=rf"/{name}: can't be read"):
        read_alone(ReadTable(str(tmp_path)))


def test_a_file_that_is_damaged_in_its_middle(tmp_path: Path) -> None:
    write(tmp_path / "t.jsonl.gz", numbered(2000))
    whole = (tmp_path / "t.jsonl.gz").read_bytes()
    schema = numbered(0).schema
    (tmp_path / "t.jsonl.gz").write_bytes(whole[: len(whole) // 2])
    with pytest.raises(TableError, match=r"t\.jsonl\.gz: can't be read as jsonl with gzip: it is damaged, inc"):
        read_alone(ReadTable(str(tmp_path), schema=schema))
    (tmp_path / "t.jsonl.gz").write_bytes(whole[:2000] + b"\0" * 100 + whole[2100:])
    with pytest.raises(TableError, match=r"t\.jsonl\.gz.*(damaged, incomplete, or not gzip|line \d+)"):
        read_alone(ReadTable(str(tmp_path), schema=schema))


def test_lists_of_a_fixed_size_with_nulls_as_others_write_them(tmp_path: Path) -> None:
    vectors = pa.array([[1.0, 2.0], None, [3.0, 4.0]], pa.list_(pa.float32(), 2))
    parquet.write_table(pa.table({"id": [1, 2, 3], "vector": vectors}), tmp_path / "t.parquet")
    with pytest.raises(TableError, match=r"t\.parquet: .*: a column of fixed-size lists has nulls, which Arrow can't"):
        read_alone(ReadTable(str(tmp_path)))
    assert len(read_alone(ReadTable(str(tmp_path), ["id"]))) == 3


@pytest.mark.parametrize("name", ["t.parquet", "t.csv", "t.jsonl"])
def test_a_file_that_is_gone(name: str, tmp_path: Path) -> None:
    write(tmp_path / name, numbered(10))
    transform = ReadTable(str(tmp_path))
    (tmp_path / name).unlink()
    with pytest.raises(TableError, match=rf"{name}: can't be read as .*: the file existed when .* and is gone"):
        read_alone(transform)


@pytest.mark.parametrize("name", ["t.parquet", "t.jsonl", "t.jsonl.gz"])
def test_a_file_that_has_changed(name: str, tmp_path: Path) -> None:
    write(tmp_path / name, numbered(1000))
    transform = ReadTable(str(tmp_path))
    write(tmp_path / name, numbered(2000))
    size = (tmp_path / name).stat().st_size
    with pytest.raises(
        TableError, match=rf"{name}: found {size} bytes, expected \d+ as when the pipeline was built; wait"
    ):
        read_alone(transform)


def test_a_value_that_does_not_fit_is_shown_with_its_line(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    lines = [f"{number},text {number}" for number in range(200)]
    schema = pa.schema({"id": pa.int64(), "text": pa.string()})
    (tmp_path / "t.csv").write_text("\n".join(["id,text", *lines[:150], "unknown,oops", *lines[150:]]))
    for block in (50, 1 << 20):
        monkeypatch.setattr(text_lines, "TEXT_BYTES", block)
        with pytest.raises(
            TableError,
            match=r"t\.csv, line 152: found 'unknown' in column 'id', expected int64; the types are those of schema=; "
            "the line is 'unknown,oops'; pass schema=",
        ):
            read_alone(ReadTable(str(tmp_path), schema=schema))


@pytest.mark.parametrize("newlines_in_values", [False, True])
def test_the_column_of_a_value_that_does_not_fit_is_named(newlines_in_values: bool, tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("id,text,stars\n1,a,5\n2,b,many\n")
    schema = pa.schema({"id": pa.int64(), "text": pa.string(), "stars": pa.int64()})
    reading = ReadTable(str(tmp_path), ["stars"], schema=schema, newlines_in_values=newlines_in_values)
    with pytest.raises(TableError, match="line 3: found 'many' in column 'stars', expected int64"):
        read_alone(reading)


def test_a_schema_that_is_none(tmp_path: Path) -> None:
    write(tmp_path / "t.csv", numbered(1))
    schema: Any = {"id": pa.int64()}
    with pytest.raises(TableError, match=r"found schema= of type dict, expected pyarrow\.schema"):
        ReadTable(str(tmp_path), schema=schema)


def test_json_lines_at_fault_are_shown(tmp_path: Path) -> None:
    def read(*lines: str, **arguments: Any) -> None:
        (tmp_path / "t.jsonl").write_text("\n".join(lines))
        read_alone(ReadTable(str(tmp_path), **arguments))

    schema = pa.schema({"a": pa.int64()})
    with pytest.raises(
        TableError, match=r"t\.jsonl, line 3: .*changed from number to string.*the line is '{\"a\": \"x\"}'"
    ):
        read('{"a": 1}', "", '{"a": "x"}', '{"a": 2}', schema=schema)
    with pytest.raises(
        TableError, match=r"line 2: .*unexpected field.*'{\"a\": 2, \"b\": 1}'; .*pass schema= if there are more"
    ):
        read('{"a": 1}', '{"a": 2, "b": 1}', schema=schema)
    with pytest.raises(TableError, match=r"line 2: .*'{\"a\": '"):
        read('{"a": 1}', '{"a": ')
    read('{"a": 1, "b": 2}', '{"a": 2, "c": 1}', schema=pa.schema({"a": pa.int64(), "b": pa.int64()}), columns=["a"])


def test_line_breaks_in_values_are_never_read_wrongly(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    """Wherever the file is split, a promise that does not hold is an error with the remedy."""
    (tmp_path / "t.csv").write_bytes(b"text\n" + b"".join(b'"%d\nmore"\n' % number for number in range(30)))
    for block in range(1, 60):
        monkeypatch.setattr(text_lines, "TEXT_BYTES", block)
        with pytest.raises(
            TableError, match=r"t.csv, line \d+: .*ends in another; .*leave newlines_in_values=False out"
        ):
            read_alone(ReadTable(str(tmp_path), newlines_in_values=False))


def test_a_table_with_nothing_in_it_needs_a_schema(tmp_path: Path) -> None:
    (tmp_path / "a.csv").touch()
    (tmp_path / "b.jsonl").write_text("\n\n")
    with pytest.raises(
        TableError, match=r"all 2 files are empty, the first is .*a\.csv, expected a header; pass schema="
    ):
        ReadTable(str(tmp_path))
    assert read_alone(ReadTable(str(tmp_path), schema=pa.schema({"a": pa.int64()}))) == []


def test_what_is_packed_twice(tmp_path: Path) -> None:
    write_bytes(tmp_path / "t.parquet.gz", b"")
    with pytest.raises(
        TableError, match=r"t\.parquet\.gz: found a parquet file that is compressed as a whole with gzip"
    ):
        ReadTable(str(tmp_path))


def test_a_header_with_a_name_twice(tmp_path: Path) -> None:
    (tmp_path / "t.csv").write_text("a,b,a\n1,2,3\n")
    with pytest.raises(TableError, match=r"t\.csv: found the column 'a' twice"):
        ReadTable(str(tmp_path))


def test_folders_that_do_not_agree(tmp_path: Path) -> None:
    (tmp_path / "year=2024").mkdir()
    write(tmp_path / "year=2024" / "t.parquet", numbered(1))
    write(tmp_path / "t.parquet", numbered(1))
    with pytest.raises(
        TableError, match=r"year=2024/t\.parquet: found folders for the columns \['year'\], expected \[\]"
    ):
        ReadTable(str(tmp_path))
