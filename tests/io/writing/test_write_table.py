"""Tests of WriteTable: every row is written once, to files with final names, and nothing else is left."""

from __future__ import annotations

import contextlib
import datetime
import functools
import gzip
import json
import os
import time
from collections.abc import Callable, Generator
from concurrent.futures import Future, ThreadPoolExecutor, wait
from decimal import Decimal
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms import window
from hypothesis import Phase, given, settings
from hypothesis import strategies as st
from pyarrow import parquet

from luminosity import ReadTable, WriteTable
from luminosity.errors import StepFailed, WriteError
from luminosity.io.folders import lock_folder
from luminosity.io.run_owner import RunOwner
from luminosity.io.writing import existing, finish_step, table_files, write_step
from luminosity.io.writing.destination import TEMPORARY_PREFIX, Destination
from tests.both_runners import Pipelines, counters
from tests.io.written import everything_in, in_order, rows_of, table_of
from tests.processes import waiting_process

REVIEWS = [
    {"id": 1, "text": "Fine.", "lang": "en", "stars": 4.5},
    {"id": 2, "text": 'So "gut",\nwirklich', "lang": "de", "stars": None},
    {"id": 3, "text": None, "lang": "en", "stars": 1.0},
]


def batches(*sizes: int, start: int = 0) -> list[pa.RecordBatch]:
    """Return batches with these numbers of rows; all ids differ."""
    made: list[pa.RecordBatch] = []
    for size in sizes:
        columns = [pa.array(range(start, start + size), pa.int64()), pa.array([0.5] * size, pa.float64())]
        made.append(pa.record_batch(columns, names=["id", "half"]))
        start += size
    return made


def write(table: list[pa.RecordBatch], *args: Any, **options: Any) -> dict[str, int]:
    """Write with Beam's own runner, in one bundle, and return the counters."""
    pipeline = beam.Pipeline(FnApiRunner(), PipelineOptions([]))
    _ = pipeline | beam.Create(table, reshuffle=False) | WriteTable(*args, **options)
    result = pipeline.run()
    result.wait_until_finish()
    return counters(result)


# ---- what is written, on both runners


@pytest.mark.parametrize("suffix", [".parquet", ".jsonl", ".csv", ".arrow"])
def test_all_rows_in_a_folder_and_in_one_file(tmp_path: Path, pipelines: Pipelines, suffix: str) -> None:
    folder, one = tmp_path / "folder", tmp_path / f"one{suffix}"
    with pipelines("--cpu_workers=2") as (pipeline, run):
        table = pipeline | beam.Create([pa.RecordBatch.from_pylist([row]) for row in _full(REVIEWS)])
        names = table | "Folder" >> WriteTable(str(folder), format=suffix[1:])  # type: ignore[arg-type]
        _ = table | "One" >> WriteTable(str(one))
        assert_that(names | beam.Map(os.path.dirname) | beam.Distinct(), equal_to([str(folder)]))
    assert rows_of(folder) == rows_of(one) == in_order(_full(REVIEWS))
    found = everything_in(tmp_path)
    assert found[-1] == one.name
    assert all(name.endswith(f"-of-{len(found) - 2:05}{suffix}") for name in found[1:-1])
    count = counters(run.result)
    assert (count["rows_written"], count["files_written"]) == (6, len(found) - 1)
    assert count["bytes_written"] == sum(path.stat().st_size for path in tmp_path.rglob("*.*"))


def test_partitions(tmp_path: Path, pipelines: Pipelines) -> None:
    with pipelines() as (pipeline, _):
        table = pipeline | beam.Create([pa.RecordBatch.from_pylist([row]) for row in _full(REVIEWS)])
        names = table | WriteTable(str(tmp_path / "out"), partition_by="lang")
        assert_that(
            names | beam.Map(lambda name: name.split("/")[-2]) | beam.Distinct(), equal_to(["lang=de", "lang=en"])
        )
    assert rows_of(tmp_path / "out") == in_order(_full(REVIEWS))
    inside = next((tmp_path / "out" / "lang=de").iterdir())
    assert parquet.read_schema(inside).names == ["id", "text", "stars"]


def test_paths_of_pathlib(tmp_path: Path) -> None:
    write(batches(2), tmp_path / "out")
    assert ReadTable(tmp_path / "out").first(5) == ReadTable([tmp_path / "out"]).first(5) == batches(2)


def test_names_in_any_script(tmp_path: Path, pipelines: Pipelines) -> None:
    rows = [{"größe": 1, "язык": "日本"}, {"größe": 2, "язык": "é"}]
    with pipelines() as (pipeline, _):
        table = pipeline | beam.Create([pa.RecordBatch.from_pylist(rows)])
        _ = table | WriteTable(str(tmp_path / "año"), partition_by="язык")
    assert rows_of(tmp_path / "año") == in_order(rows)


def test_windows_make_one_table(tmp_path: Path, pipelines: Pipelines) -> None:
    with pipelines() as (pipeline, _):
        _ = (
            pipeline
            | beam.Create(batches(2, 3, 4))
            | beam.Map(lambda batch: window.TimestampedValue(batch, batch.num_rows))
            | beam.WindowInto(window.FixedWindows(2))
            | WriteTable(str(tmp_path / "out"))
        )
    assert table_of(tmp_path / "out").num_rows == 9


def test_no_batch_no_file(tmp_path: Path, pipelines: Pipelines) -> None:
    with pipelines() as (pipeline, _):
        nothing = pipeline | beam.Create(batches(1)) | beam.Filter(lambda _: False)
        assert_that(nothing | WriteTable(str(tmp_path / "out")), equal_to([]))
        known = nothing | "Known" >> WriteTable(str(tmp_path / "known"), schema=batches(1)[0].schema)
        assert_that(known | beam.Map(os.path.basename), equal_to(["part-00000-of-00001.parquet"]), "one")
    assert everything_in(tmp_path) == ["known", "known/part-00000-of-00001.parquet"]
    assert table_of(tmp_path / "known").schema.equals(batches(1)[0].schema)


# ---- files and row groups


def test_batches_without_rows_are_one_empty_file(tmp_path: Path) -> None:
    write(batches(0, 0), str(tmp_path / "out"))
    assert table_of(tmp_path / "out").schema.equals(batches(1)[0].schema)
    assert everything_in(tmp_path / "out") == ["part-00000-of-00001.parquet"]


def test_rows_per_file(tmp_path: Path) -> None:
    write(batches(7, 1, 12), str(tmp_path), rows_per_file=5)
    assert [parquet.read_metadata(file).num_rows for file in tmp_path.iterdir()] == [5, 5, 5, 5]
    assert sorted(table_of(tmp_path)["id"].to_pylist()) == list(range(20))


def test_files_are_cut_by_size(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(table_files, "_MOST_BYTES", 100)
    monkeypatch.setattr(table_files, "_GROUP_ROWS", 100)
    monkeypatch.setattr(table_files, "_JOINED_BYTES", 0)
    write(batches(100, 100, 100), str(tmp_path))
    assert [parquet.read_metadata(file).num_rows for file in tmp_path.iterdir()] == [100, 100, 100]


def test_small_batches_are_gathered(tmp_path: Path) -> None:
    write(batches(*[10_000] * 10), str(tmp_path / "out.parquet"))
    metadata = parquet.read_metadata(tmp_path / "out.parquet")
    assert [metadata.row_group(n).num_rows for n in range(metadata.num_row_groups)] == [70_000, 30_000]


def test_each_column_has_the_codec_it_gains_from(tmp_path: Path) -> None:
    table = pa.record_batch(
        {
            "vector": pa.array([[1.0, 2.0]] * 9, pa.list_(pa.float32(), 2)),
            "text": ["a"] * 9,
            "id": range(9),
            "point": [{"x": 1.0, "name": "p"}] * 9,
            "map": pa.array([{"k": 1.0}] * 9, pa.map_(pa.string(), pa.float64())),
        }
    )
    write([table], str(tmp_path / "out.parquet"))
    group = parquet.read_metadata(tmp_path / "out.parquet").row_group(0)
    columns = [group.column(n) for n in range(group.num_columns)]
    assert {column.path_in_schema: column.compression for column in columns} == {
        "vector.list.element": "SNAPPY",
        "text": "ZSTD",
        "id": "ZSTD",
        "point.x": "SNAPPY",
        "point.name": "ZSTD",
        "map.key_value.key": "ZSTD",
        "map.key_value.value": "SNAPPY",
    }
    assert {c.path_in_schema for c in columns if "RLE_DICTIONARY" in c.encodings} == {"text"}
    assert table_of(tmp_path / "out.parquet").to_batches()[0].equals(table)


@pytest.mark.parametrize("codec", ["gzip", "bz2", "zstd", "lz4"])
def test_text_is_compressed_as_a_whole(tmp_path: Path, codec: str, monkeypatch: pytest.MonkeyPatch) -> None:
    suffix = {"gzip": "gz", "zstd": "zst"}.get(codec, codec)
    write(batches(3, 4), str(tmp_path / f"one.csv.{suffix}"))
    write(batches(3, 4), str(tmp_path / "folder"), format="jsonl", compression=codec)
    assert everything_in(tmp_path / "folder") == [f"part-00000-of-00001.jsonl.{suffix}"]
    for path in (tmp_path / f"one.csv.{suffix}", tmp_path / "folder" / f"part-00000-of-00001.jsonl.{suffix}"):
        text = pa.input_stream(str(path), compression=codec).read().decode()
        assert len(text.splitlines()) == 7 + (".csv" in path.name)


def test_several_bundles_make_one_file(tmp_path: Path) -> None:
    """Compressed streams are concatenated, too."""
    paths = [str(tmp_path / name) for name in ("one.csv", "one.jsonl.gz", "one.arrow", "one.parquet")]
    pipeline = beam.Pipeline(FnApiRunner(), PipelineOptions(["--direct_num_workers=3"]))
    table = pipeline | beam.Create(batches(*[5] * 20)) | beam.Reshuffle()
    for path in paths:
        _ = table | path >> WriteTable(path)
    pipeline.run().wait_until_finish()
    for path in paths:
        assert sorted(row["id"] for row in rows_of(path)) == list(range(100))
    with gzip.open(paths[1]) as file:
        assert len(file.read().splitlines()) == 100
    assert len(everything_in(tmp_path)) == 4


# ---- partitions


@pytest.mark.parametrize(
    ("values", "folders"),
    [
        (["a b/c", "ü=%"], ["v=%C3%BC%3D%25", "v=a%20b%2Fc"]),
        ([7, None], ["v=7", "v=__HIVE_DEFAULT_PARTITION__"]),
        ([True, False], ["v=false", "v=true"]),
        ([datetime.date(2024, 1, 31)] * 2, ["v=2024-01-31"]),
        (["..", ""], ["v=", "v=.."]),
        (pa.array(["x", None]).dictionary_encode(), ["v=__HIVE_DEFAULT_PARTITION__", "v=x"]),
        (pa.array([None, None], pa.string()), ["v=__HIVE_DEFAULT_PARTITION__"]),
    ],
)
def test_names_of_partitions(tmp_path: Path, values: Any, folders: list[str]) -> None:
    table = pa.record_batch({"v": values, "id": [0, 1]})
    write([table], str(tmp_path), partition_by="v")
    assert sorted(os.listdir(tmp_path)) == folders
    plain = pa.array(values).cast(pa.string()) if isinstance(values, pa.DictionaryArray) else pa.array(values)
    assert rows_of(tmp_path, pa.schema({"v": plain.type, "id": pa.int64()})) == in_order(table.to_pylist())


def test_partitions_within_partitions(tmp_path: Path) -> None:
    table = pa.record_batch({"a": ["x", "x", "y", None], "n": [1, 2, 3, 4], "b": [1, 2, 1, None]})
    write([table], str(tmp_path), partition_by=["a", "b"])
    assert rows_of(tmp_path) == in_order(table.select(["n", "a", "b"]).to_pylist())


def test_few_files_are_open_at_a_time(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(write_step, "_MOST_FILES", 2)
    monkeypatch.setattr(write_step, "_MOST_WAITING_BYTES", 1)
    table = pa.record_batch({"key": [0, 1, 2, 0, 1, 2], "id": range(6)})
    write([table, table], str(tmp_path), partition_by="key")
    assert rows_of(tmp_path) == in_order(table.select(["id", "key"]).to_pylist() * 2)


# ---- values


def test_values_as_json(tmp_path: Path) -> None:
    moment = datetime.datetime(2024, 1, 31, 12, 30, 1, 500_000)
    zoned = moment.replace(tzinfo=datetime.timezone(datetime.timedelta(hours=2)))
    table = pa.record_batch(
        {
            "naive": pa.array([moment], pa.timestamp("us")),
            "zoned": pa.array([zoned], pa.timestamp("us", "Europe/Berlin")),
            "inner": pa.array([[moment, None]], pa.list_(pa.timestamp("us"))),
            "day": [moment.date()],
            "time": [moment.time()],
            "price": [Decimal("1.10")],
            "took": [datetime.timedelta(seconds=2)],
            "bad": [float("nan")],
            "vector": [[1.5, float("inf")]],
            "map": pa.array([{"k": 1}], pa.map_(pa.string(), pa.int8())),
            "word": pa.array(["ü"]).dictionary_encode(),
            "small": pa.array([0.5], pa.float16()),
            "none": pa.nulls(1),
        }
    )
    write([table], str(tmp_path / "out.jsonl"))
    assert json.loads((tmp_path / "out.jsonl").read_text()) == {
        "naive": "2024-01-31T12:30:01.500000",
        "zoned": "2024-01-31T10:30:01.500000Z",
        "inner": ["2024-01-31T12:30:01.500000", None],
        "day": "2024-01-31",
        "time": "12:30:01.500000",
        "price": "1.10",
        "took": 2_000_000,
        "bad": None,
        "vector": [1.5, None],
        "map": {"k": 1},
        "word": "ü",
        "small": 0.5,
        "none": None,
    }


def test_dictionaries_that_differ_go_into_one_arrow_file(tmp_path: Path) -> None:
    words = [pa.record_batch({"word": pa.array(texts).dictionary_encode()}) for texts in (["a", "b"], ["c", "a"])]
    write(words, str(tmp_path / "out.arrow"))
    assert table_of(tmp_path / "out.arrow")["word"].to_pylist() == ["a", "b", "c", "a"]


_COLUMNS = {
    "number": (st.none() | st.integers(-(2**63), 2**63 - 1), pa.int64()),
    "real": (st.none() | st.floats(allow_nan=False), pa.float64()),
    "text": (st.none() | st.text(st.characters(exclude_categories=["Cs"]), max_size=5), pa.string()),
    "tags": (st.none() | st.lists(st.text("abc", max_size=2), max_size=3), pa.list_(pa.string())),
    "key": (st.none() | st.text("a/=% ü", min_size=1, max_size=3), pa.string()),
}
_ROW = st.fixed_dictionaries({name: values for name, (values, _) in _COLUMNS.items()})
_SCHEMA = pa.schema({name: kind for name, (_, kind) in _COLUMNS.items()})


@settings(max_examples=40, deadline=None, derandomize=True, database=None, phases=[Phase.generate])
@given(
    bundles=st.lists(st.lists(st.lists(_ROW, max_size=6), max_size=3), max_size=3),
    partition_by=st.sampled_from([None, "key"]),
    rows_per_file=st.none() | st.integers(1, 4),
    killed_at=st.integers(0, 12),
)
def test_what_is_read_is_what_was_written(
    tmp_path_factory: pytest.TempPathFactory, bundles: Any, partition_by: Any, rows_per_file: Any, killed_at: int
) -> None:
    """Some bundles fail, and the last step is killed and runs again."""
    folder = tmp_path_factory.mktemp("any") / "out"
    target = Destination.of(str(folder), partition_by, rows_per_file)
    written: list[table_files.WrittenFile] = []
    for bundle in bundles:
        failed, good = write_step.OpenFiles(target), write_step.OpenFiles(target)
        for rows in bundle:
            for attempt in (failed, good):
                attempt.add(pa.RecordBatch.from_pylist(rows, schema=_SCHEMA))
        failed.close()
        written += good.close()
    with pytest.MonkeyPatch.context() as patch:
        for name in ("move", "remove_folder"):
            patch.setattr(finish_step.filesystem, name, _killed_at(killed_at, getattr(finish_step.filesystem, name)))
        names = _until_done(lambda: finish_step.finish(target, written))
    expected = in_order(row for bundle in bundles for rows in bundle for row in rows)
    assert (rows_of(folder, _SCHEMA) if names else []) == expected
    assert sorted(names) == sorted(map(str, folder.rglob("*.parquet")))
    assert all(not name.startswith(".") for name in everything_in(folder))
    assert all(parquet.read_metadata(name).num_rows <= (rows_per_file or 100) for name in names)


class _Killed(BaseException):
    """The end of a process, which no code catches."""


def _killed_at(count: int, function: Callable[..., None]) -> Callable[..., None]:
    """Return the function with two kills: before call number ``count`` works, and after the next call did."""
    calls = iter(range(1000))

    def call(*args: Any) -> None:
        number = next(calls)
        if number == count:
            raise _Killed
        function(*args)
        if number == count + 1:
            raise _Killed

    return call


def _until_done(function: Callable[[], list[str]]) -> list[str]:
    for _ in range(5):
        with contextlib.suppress(_Killed):
            return function()
    raise AssertionError("not done after five attempts")


# ---- existing files


def test_a_folder_that_is_not_empty_is_refused_at_once(tmp_path: Path) -> None:
    (tmp_path / "mine.txt").write_text("keep")
    with pytest.raises(WriteError, match=r"found mine\.txt in .* if_exists='replace' or if_exists='append'"):
        _ = beam.Pipeline() | beam.Create(batches(1)) | WriteTable(str(tmp_path))
    assert everything_in(tmp_path) == ["mine.txt"]


def test_append(tmp_path: Path, pipelines: Pipelines) -> None:
    write(batches(3), str(tmp_path / "out"))
    for start in (3, 6):
        with pipelines() as (pipeline, _):
            _ = pipeline | beam.Create(batches(3, start=start)) | WriteTable(str(tmp_path / "out"), if_exists="append")
    assert sorted(table_of(tmp_path / "out")["id"].to_pylist()) == list(range(9))
    assert len(everything_in(tmp_path / "out")) == 3


def test_replace(tmp_path: Path, pipelines: Pipelines) -> None:
    out = tmp_path / "out"
    write([pa.record_batch({"id": [1, 2], "key": ["a", "b"]})], str(out), partition_by="key")
    (out / ".luminosity-write-killed").mkdir()
    with pipelines() as (pipeline, _):
        _ = pipeline | beam.Create(batches(3)) | WriteTable(str(out), if_exists="replace")
    assert everything_in(out) == ["part-00000-of-00001.parquet"]
    assert table_of(out)["id"].to_pylist() == [0, 1, 2]


@pytest.mark.parametrize(
    ("name", "if_exists", "idle_s", "stays"),
    [
        ("out", "fail", 0, False),
        ("out.csv", "fail", 0, False),
        ("out", "append", 0, True),  # A run of another runner may outlive the process that started it.
        ("out", "append", 2 * 86_400, False),
    ],
)
def test_what_a_killed_run_left_is_removed(tmp_path: Path, name: str, if_exists: str, idle_s: int, stays: bool) -> None:
    with waiting_process() as other:
        owner = RunOwner.of(other)
    destination = Destination.of(str(tmp_path / name))
    left = Path(destination.folder, f"{TEMPORARY_PREFIX}{owner}-{destination.table_id}-0")
    left.mkdir(parents=True)
    (left / "half").write_text("a file that the killed run had begun")
    os.utime(left, (then := time.time() - idle_s, then))
    running = Path(destination.folder, f"{TEMPORARY_PREFIX}{RunOwner.current()}-{destination.table_id}-0")
    running.mkdir()
    write(batches(3), str(tmp_path / name), if_exists=if_exists)
    assert left.exists() == stays
    assert running.exists()
    assert table_of(tmp_path / name).num_rows == 3


def test_replace_one_file(tmp_path: Path) -> None:
    for count in (1, 2):
        write(batches(count), str(tmp_path / "out.csv"), if_exists="replace")
    assert table_of(tmp_path / "out.csv").num_rows == 2
    with pytest.raises(WriteError, match=r"exists already; .* if_exists='replace'"):
        write(batches(1), str(tmp_path / "out.csv"))


# ---- tables without rows


@pytest.mark.parametrize("name", ["out", "out.parquet"])
@pytest.mark.parametrize("bundle", [[], batches(0)], ids=["no batch", "no rows"])
def test_a_table_is_not_replaced_by_nothing(tmp_path: Path, name: str, bundle: list[pa.RecordBatch]) -> None:
    write(batches(3), str(tmp_path / name))
    before = everything_in(tmp_path)
    with pytest.raises(WriteError, match=r"found no rows.*stays as it was; .* allow_empty=True"):
        write(bundle, str(tmp_path / name), if_exists="replace")
    assert everything_in(tmp_path) == before
    assert table_of(tmp_path / name).num_rows == 3


def test_rows_that_all_fail_leave_the_old_table(tmp_path: Path) -> None:
    write(batches(3), str(tmp_path / "out"))
    pipeline = beam.Pipeline("luminosity.LuminosityRunner", PipelineOptions(["--progress=off"]))
    nothing = pipeline | beam.Create(batches(1)) | beam.Filter(lambda _: False)
    _ = nothing | WriteTable(str(tmp_path / "out"), if_exists="replace")
    result = pipeline.run()
    with pytest.raises(StepFailed, match=r"found no rows.*stays as it was") as caught:
        result.wait_until_finish()
    assert "add --allow-empty" in caught.value.for_command()
    assert table_of(tmp_path / "out").num_rows == 3


@pytest.mark.parametrize("suffix", [".parquet", ".csv", ".arrow"])
@pytest.mark.parametrize("folder", [True, False], ids=["folder", "file"])
def test_an_empty_table_replaces_an_old_one_if_asked(tmp_path: Path, suffix: str, folder: bool) -> None:
    schema = batches(1)[0].schema
    path = str(tmp_path / (f"out{suffix}/" if folder else f"out{suffix}"))
    for empty, options in [
        (batches(0), {"allow_empty": True}),
        ([], {"allow_empty": schema}),
        ([], {"allow_empty": True, "schema": schema}),
    ]:
        write(batches(2, 3), path, if_exists="replace", format=suffix[1:])
        write(empty, path, if_exists="replace", format=suffix[1:], **options)
        assert table_of(path).num_rows == 0
        assert table_of(path).schema.names == schema.names
    assert [*tmp_path.rglob("*.luminosity*")] == []


def test_an_empty_table_of_unknown_columns_removes_the_old_one_if_asked(tmp_path: Path) -> None:
    for name in ("out", "out.csv"):
        write(batches(3), str(tmp_path / name))
        write([], str(tmp_path / name), if_exists="replace", allow_empty=True)
    assert everything_in(tmp_path) == ["out"]


def test_no_rows_append_nothing(tmp_path: Path) -> None:
    schema = batches(1)[0].schema
    for expected in (1, 1):  # The first file has the schema; a second empty one would be of no use.
        write([], str(tmp_path / "new"), if_exists="append", schema=schema)
        assert len(everything_in(tmp_path / "new")) == expected
    write(batches(3), str(tmp_path / "out"))
    write(batches(0), str(tmp_path / "out"), if_exists="append")
    write([], str(tmp_path / "out"), if_exists="append")
    assert everything_in(tmp_path / "out") == ["part-00000-of-00001.parquet"]


@pytest.mark.parametrize("if_exists", ["fail", "replace", "append"])
def test_the_old_table_may_be_kept_without_an_error(tmp_path: Path, if_exists: Any) -> None:
    if if_exists != "fail":
        write(batches(3), str(tmp_path / "out"))
    before = everything_in(tmp_path)
    table = beam.Pipeline(FnApiRunner()) | beam.Create(batches(0), reshuffle=False)
    _ = table | WriteTable(tmp_path / "out", if_exists=if_exists).keep_if_empty()
    table.pipeline.run().wait_until_finish()
    assert [name for name in everything_in(tmp_path) if name != "out"] == [name for name in before if name != "out"]


def test_replace_removes_no_strangers_file(tmp_path: Path) -> None:
    (tmp_path / "thesis.txt").write_text("keep")
    with pytest.raises(WriteError, match=r"found thesis\.txt, which is not a table file"):
        write(batches(1), str(tmp_path), if_exists="replace")
    assert everything_in(tmp_path) == ["thesis.txt"]


# ---- errors


@pytest.mark.parametrize(
    ("options", "message"),
    [
        ({"if_exists": "overwrite"}, "found if_exists='overwrite', expected 'fail', 'replace' or 'append'"),
        ({"rows_per_file": 0}, "found rows_per_file=0, expected 1 or more"),
        ({"format": "xml"}, "found format='xml', expected one of 'parquet'"),
        ({"compression": "bz2"}, "found compression='bz2', expected one of 'zstd'"),
        ({"path": "a.csv", "format": "parquet"}, "a.csv: found format='parquet', expected 'csv' because of the suffix"),
        (
            {"path": "a.csv", "partition_by": "x"},
            "one file, expected a folder for partition_by; write to a.csv/",
        ),
        (
            {"path": "a.csv", "if_exists": "append"},
            "a.csv: found the name of one file, .* for appending",
        ),
        (
            {"path": "a.csv.gz", "compression": "bz2"},
            "found compression='bz2', expected 'gzip' because",
        ),
        ({"path": "a.parquet.gz"}, "a parquet file is not compressed as a whole, .* pass compression='gzip'"),
    ],
)
def test_options_that_make_no_sense(options: dict[str, Any], message: str) -> None:
    with pytest.raises(ValueError, match=message):
        WriteTable(**{"path": "out", **options})


@pytest.mark.parametrize(
    ("columns", "options", "message"),
    [
        ({"v": [[1]]}, {"format": "csv"}, "column 'v' is list<.*>, which CSV can't hold; write Parquet"),
        ({"v": [b"x"]}, {"format": "csv"}, "column 'v' is binary, which has bytes, expected text"),
        ({"v": [[b"x"]]}, {"format": "jsonl"}, "column 'v' is list<.*binary>, which has bytes, expected text"),
        ({"v": pa.array(["x"], pa.string_view())}, {"format": "csv"}, r"CSV can't hold .*; found 'v' \(string_view\)"),
        ({"v": pa.array([{1: 2}], pa.map_(pa.int8(), pa.int8()))}, {"format": "jsonl"}, "keys must be texts"),
        (
            {"v": pa.array([[1]], pa.list_(pa.duration("s")))},
            {"format": "jsonl"},
            "nested duration would lose its unit",
        ),
        ({"v": [1]}, {"partition_by": "w"}, "no column 'w' to partition by, expected one of 'v'"),
        ({"v": [1]}, {"partition_by": "v"}, "found all columns in partition_by"),
        ({"v": [[1]], "w": [1]}, {"partition_by": "v"}, "found column 'v' of type list<.*>, expected texts"),
        ({"_v": [1], "w": [1]}, {"partition_by": "_v"}, "the folders of column '_v' would be hidden"),
        ({"v": [1]}, {"schema": pa.schema({"v": pa.string()})}, "column 'v' is string in some and int64 in others"),
    ],
)
def test_columns_that_cannot_be_written(tmp_path: Path, columns: Any, options: Any, message: str) -> None:
    with pytest.raises(WriteError, match=message):
        write([pa.record_batch(columns)], str(tmp_path / "out"), **options)
    assert everything_in(tmp_path) in ([], ["out"])


def test_a_schema_can_be_checked_before_a_run(tmp_path: Path) -> None:
    schema = pa.schema({"v": pa.list_(pa.float32())})
    WriteTable(tmp_path / "out").check(schema)
    with pytest.raises(WriteError, match=r"column 'v' is list<.*>, which CSV can't hold"):
        WriteTable(tmp_path / "out.csv").check(schema)
    (tmp_path / "there.parquet").touch()
    with pytest.raises(WriteError, match="exists already"):
        WriteTable(tmp_path / "there.parquet").check(schema)
    assert everything_in(tmp_path) == ["there.parquet"]


def test_an_element_that_is_no_batch(tmp_path: Path) -> None:
    pipeline = beam.Pipeline(FnApiRunner(), PipelineOptions([]))
    _ = pipeline | beam.Create([{"id": 1}]) | WriteTable(str(tmp_path / "out"))
    with pytest.raises(WriteError, match=r"found an element of type dict, .* TableFromRows\(\)"):
        pipeline.run()


@pytest.mark.parametrize("in_one_bundle", [True, False])
def test_one_schema(tmp_path: Path, in_one_bundle: bool) -> None:
    ours, theirs = pa.record_batch({"id": [1], "text": ["a"]}), pa.record_batch({"id": ["1"], "stars": [1]})
    options = PipelineOptions(["--direct_num_workers=1" if in_one_bundle else "--direct_num_workers=2"])
    pipeline = beam.Pipeline(FnApiRunner(), options)
    _ = pipeline | beam.Create([ours, theirs]) | beam.Reshuffle() | WriteTable(str(tmp_path / "out"))
    with pytest.raises(
        WriteError, match=r"some lack '\w+'; some also have '\w+'; column 'id' is \w+ in some and \w+ in others"
    ):
        pipeline.run()
    # Hidden files of other bundles stay: a bundle can't know that the run is over.
    assert [name for name in everything_in(tmp_path / "out") if not name.startswith(".luminosity-write-")] == []


def _full(rows: list[dict[str, Any]]) -> list[dict[str, Any]]:
    """Return values without nulls: a bundle of one row would lose the type in CSV and JSON lines."""
    return [{name: value if value is not None else _FILL[name] for name, value in row.items()} for row in rows]


_FILL = {"text": "none", "stars": 0.5}


def test_one_transform_writes_several_tables(tmp_path: Path) -> None:
    """Each use has its own temporary files; otherwise the first to finish would remove the other's."""
    write = WriteTable(str(tmp_path / "out"), if_exists="append")
    with beam.Pipeline("FnApiRunner") as pipeline:
        for name in ("first", "second"):
            _ = pipeline | f"Create {name}" >> beam.Create([pa.record_batch({"name": [name]})]) | name >> write
    assert rows_of(tmp_path / "out") == [{"name": "first"}, {"name": "second"}]
    assert len(everything_in(tmp_path / "out")) == 2


@contextlib.contextmanager
def _killed_after(calls: int, monkeypatch: pytest.MonkeyPatch, *names: str) -> Generator[None]:
    """Within the context, the functions of ``os`` with these names work ``calls`` times, then end the program."""
    left = calls

    def call(real: Any, *arguments: Any, **options: Any) -> None:
        nonlocal left
        if not left:
            raise KeyboardInterrupt
        left -= 1
        real(*arguments, **options)

    with monkeypatch.context() as patched:
        for name in names:
            patched.setattr(os, name, functools.partial(call, getattr(os, name)))
        with pytest.raises(KeyboardInterrupt):
            yield


@pytest.mark.parametrize("removals", range(5))
def test_a_last_step_that_is_killed_while_it_cleans_up_may_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removals: int
) -> None:
    target, written = _written(tmp_path / "out.parquet", 3)
    with _killed_after(removals, monkeypatch, "unlink", "remove", "rmdir"):
        finish_step.finish(target, list(written))
    assert finish_step.finish(target, list(written)) == [target.path]
    assert rows_of(target.path) == [{"n": 0}, {"n": 1}, {"n": 2}]


@pytest.mark.parametrize("name", ["out", "out.parquet"])
def test_of_two_jobs_that_end_at_once_one_is_refused(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, name: str
) -> None:
    check, jobs = existing.check, [_written(tmp_path / name, rows) for rows in (2, 3)]
    others: list[Future[list[str]]] = []

    def check_while_another_ends(target: Destination) -> None:
        check(target)
        if not others:  # The other job finishes after this one found nothing at the destination.
            others.append(threads.submit(finish_step.finish, *jobs[1]))
            wait(others, timeout=0.3)

    monkeypatch.setattr(existing, "check", check_while_another_ends)
    with ThreadPoolExecutor(1) as threads:
        finish_step.finish(*jobs[0])
        with pytest.raises(WriteError, match=r"exists already|expected it to be empty"):
            others[0].result(50)
    assert rows_of(tmp_path / name) == [{"n": 0}, {"n": 1}]


def test_of_two_jobs_that_replace_at_once_none_removes_what_the_other_has_written(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = tmp_path / "out"
    first, second = (_written(folder, rows, if_exists="replace") for rows in (2, 3))

    @contextlib.contextmanager
    def late_turn(*args: Any) -> Generator[None]:
        monkeypatch.setattr(finish_step, "lock_folder", lock_folder)
        finish_step.finish(*first)
        with lock_folder(*args):
            yield

    monkeypatch.setattr(finish_step, "lock_folder", late_turn)
    for _ in range(3):  # A runner may retry.
        with pytest.raises(WriteError, match="check whether another run"):
            finish_step.finish(*second)
        assert [row["n"] for row in rows_of(folder)] == [0, 1]


def test_of_two_jobs_that_replace_at_once_the_last_one_counts(tmp_path: Path) -> None:
    """A job does not remove the temporary files of another that still runs, here in the same process."""
    folder = tmp_path / "out"
    jobs = list[tuple[Destination, list[table_files.WrittenFile]]]()
    for rows in (2, 3):
        target = Destination.of(str(folder), if_exists="replace").for_another_run()
        bundle = write_step.OpenFiles(target)
        bundle.add(pa.record_batch({"n": list(range(rows))}))
        jobs.append((target, bundle.close()))
    finish_step.finish(*jobs[0])
    assert len(rows_of(folder / "part-00000-of-00001.parquet")) == 2
    finish_step.finish(*jobs[1])
    assert len(rows_of(folder)) == 3
    assert everything_in(folder) == ["part-00000-of-00001.parquet"]


def test_a_turn_that_does_not_come(tmp_path: Path) -> None:
    with (
        lock_folder(str(tmp_path), 1),
        pytest.raises(TimeoutError, match=r"waited 0\.05 s"),
        lock_folder(str(tmp_path), 0.05),
    ):
        pass
    with (
        lock_folder(str(tmp_path), 0.05),
        lock_folder(str(tmp_path / "nothing"), 0.05),
        lock_folder("gs://bucket/folder", 0.05),
    ):
        assert os.listdir(tmp_path) == []


def _written(path: Path, bundles: int, if_exists: str = "fail") -> tuple[Destination, list[table_files.WrittenFile]]:
    target, written = Destination.of(str(path), if_exists=if_exists), list[table_files.WrittenFile]()
    for number in range(bundles):
        bundle = write_step.OpenFiles(target)
        bundle.add(pa.record_batch({"n": [number]}))
        written += bundle.close()
    return target, written


def test_a_type_that_the_format_does_not_have_is_named_and_nothing_is_left(tmp_path: Path) -> None:
    batch = pa.record_batch({"nothing": pa.array([{}], pa.struct([])), "n": [1]})
    with pytest.raises(WriteError, match=r"out: the table can't be written in this format: .*'nothing'"):  # noqa: SIM117
        with beam.Pipeline("FnApiRunner") as pipeline:
            _ = pipeline | beam.Create([batch]) | WriteTable(str(tmp_path / "out"))
    assert everything_in(tmp_path / "out") == []


# ---- few files


def _bundles(
    path: Path, tables: list[pa.RecordBatch], **options: Any
) -> tuple[Destination, list[table_files.WrittenFile]]:
    """Write each batch as a bundle of its own, as many workers would."""
    target, written = Destination.of(str(path), **options), list[table_files.WrittenFile]()
    for batch in tables:
        bundle = write_step.OpenFiles(target)
        bundle.add(batch)
        written += bundle.close()
    return target, written


@pytest.mark.parametrize(
    ("format", "compression"),
    [("parquet", None), ("arrow", None), ("jsonl", None), ("jsonl", "gzip"), ("csv", None), ("csv", "zstd")],
)
def test_small_bundles_become_one_file(tmp_path: Path, format: str, compression: str | None) -> None:
    texts = pa.record_batch({"t": ['a "b"', "c,\nd"], "n": [1, 2]})
    target, written = _bundles(tmp_path / "out", [texts] * 7, format=format, compression=compression)
    assert len(written) == 7
    [name] = finish_step.finish(target, written)
    assert everything_in(tmp_path / "out") == [os.path.basename(name)]
    assert os.path.basename(name).startswith("part-00000-of-00001.")
    [found] = {tuple(batch.schema.names) for batch in ReadTable(tmp_path / "out", newlines_in_values=True).first(100)}
    rows = [row for b in ReadTable(tmp_path / "out", newlines_in_values=True).first(100) for row in b.to_pylist()]
    assert (found, in_order(rows)) == (("t", "n"), in_order(texts.to_pylist() * 7))


def test_small_files_of_a_partition_are_joined(tmp_path: Path) -> None:
    batch = pa.record_batch({"n": [1, 2, 3], "lang": ["en", "de", "en"]})
    target, written = _bundles(tmp_path / "out", [batch] * 5, partition_by="lang")
    assert len(written) == 10
    assert len(finish_step.finish(target, written)) == 2
    assert rows_of(tmp_path / "out") == in_order(batch.to_pylist() * 5)


def test_large_files_are_left_to_the_workers_that_wrote_them(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    sizes = [3, 400, 2, 500, 1]
    _, written = _bundles(tmp_path / "out", batches(*sizes), format="csv")
    by_rows = {file.rows: file.size for file in written}
    monkeypatch.setattr(table_files, "_SMALL_BYTES", by_rows[400])
    target = Destination.of(str(tmp_path / "out"), format="csv")
    groups = [sorted(file.rows for file in move.sources) for move in table_files.final_names(target, written)]
    assert sorted(groups) == [[1, 2, 3], [400], [500]]
    monkeypatch.setattr(table_files, "_JOINED_BYTES", by_rows[2] + by_rows[3])  # two of them, in any order
    groups = [[file.rows for file in move.sources] for move in table_files.final_names(target, written)]
    assert len(groups) == 4
    monkeypatch.setattr(table_files, "_MOST_JOINED_BYTES", by_rows[1])
    groups = [[file.rows for file in move.sources] for move in table_files.final_names(target, written)]
    assert len(groups) == 5


def test_joined_files_keep_to_rows_per_file(tmp_path: Path) -> None:
    target, written = _bundles(tmp_path / "out", batches(*[2] * 7), rows_per_file=5)
    names = finish_step.finish(target, written)
    assert sorted(parquet.read_metadata(name).num_rows for name in names) == [2, 4, 4, 4]


@pytest.mark.parametrize("removals", range(5))
def test_a_last_step_that_is_killed_while_it_joins_may_run_again(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, removals: int
) -> None:
    target, written = _written(tmp_path / "out", 3)
    with _killed_after(removals, monkeypatch, "replace", "unlink", "remove", "rmdir"):
        finish_step.finish(target, list(written))
    [name] = finish_step.finish(target, list(written))
    assert rows_of(name) == [{"n": 0}, {"n": 1}, {"n": 2}]
    assert everything_in(tmp_path / "out") == ["part-00000-of-00001.parquet"]
