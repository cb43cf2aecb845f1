"""Iceberg and Delta tables: round trips, versions, conditions, partitions, upserts, evolution, and what is refused."""

from __future__ import annotations

import base64
import datetime
import json
import string
import struct
from decimal import Decimal
from pathlib import Path
from typing import Any

import apache_beam as beam
import polars
import pyarrow as pa
import pyarrow.compute as pc
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.util import assert_that, equal_to
from deltalake import write_deltalake
from pyiceberg.utils.config import Config
from pyroaring import BitMap64

from luminosity import LuminosityRunner, ReadDelta, ReadIceberg, ReadTable, WriteDelta, WriteIceberg, WriteTable
from luminosity.errors import InvalidArgument, TableError, WriteError
from tests.io.lakes.places import DeltaPlace, IcebergPlace, Place, data_files, place
from tests.streams import stream_of, tables

pytestmark = pytest.mark.thorough

__all__ = ["place"]
_DAY = datetime.datetime(2024, 1, 1)


def _batch(start: int, stop: int) -> pa.RecordBatch:
    """Rows of many types, of which lakes have only some."""
    numbers = range(start, stop)
    return pa.record_batch(
        {
            "id": pa.array(numbers, pa.int64()),
            "text": [f"t{n}" if n % 7 else None for n in numbers],
            "lang": [["en", "d /%e", None][n % 3] for n in numbers],
            "vector": pa.array([[n, 0.5] for n in numbers], pa.list_(pa.float32(), 2)),
            "at": pa.array([_DAY + datetime.timedelta(hours=n) for n in numbers], pa.timestamp("ns")),
            "day": [datetime.date(2024, 1, 1 + n % 5) for n in numbers],
            "small": pa.array([n % 250 for n in numbers], pa.uint8()),
            "more": [{"x": n, "y": [str(n)]} for n in numbers],
        }
    )


_ROWS = [_batch(first, first + 50) for first in range(0, 200, 50)]
_ALL = pa.Table.from_batches(_ROWS)
_SCHEMA = _ALL.schema


def _write(transform: Any, *rows: pa.RecordBatch, runner: Any = "FnApiRunner") -> None:
    with beam.Pipeline(runner, PipelineOptions(["--progress=off"] if runner != "FnApiRunner" else [])) as pipeline:
        _ = pipeline | beam.Create(rows or _ROWS) | transform


def _rows(table: ReadTable) -> list[dict[str, Any]]:
    return sorted((row for _, batch in table.all() for row in batch.to_pylist()), key=lambda row: row["id"])


def _ids(table: ReadTable) -> list[int]:
    return [row["id"] for row in _rows(table)]


def _as_written(rows: pa.Table) -> list[dict[str, Any]]:
    """Return rows as lists of the columns that were written, by their ids."""
    return rows.select(_SCHEMA.names).sort_by("id").to_pylist()


def test_a_partitioned_table_there_and_back(place: Place) -> None:
    by = {"iceberg": ["day(at)", "bucket(4, id)", "truncate(1, text)", "lang"], "delta": ["lang", "day"]}[place.kind]
    _write(place.write(schema=_SCHEMA, partition_by=by), runner=LuminosityRunner())
    expected = _as_written(_ALL)
    assert _as_written(place.rows()) == expected  # by the format's own reader
    assert [{name: row[name] for name in _SCHEMA.names} for row in _rows(place.read())] == expected
    if place.kind == "iceberg":
        theirs = polars.scan_iceberg(place.table).select("id", "lang").collect()
    else:
        theirs = polars.read_delta(str(place.folder)).select("id", "lang")
    assert theirs.sort("id").to_dicts() == [{"id": row["id"], "lang": row["lang"]} for row in expected]
    assert data_files(place) == place.referenced()


def test_a_condition_leaves_files_out(place: Place) -> None:
    for batch in _ROWS:
        _write(place.write(schema=_SCHEMA), batch)
    whole = place.read()
    where = (pc.field("id") >= 150) & (pc.field("lang") == "en")
    some = place.read(["id", "text"], where)
    assert (len(whole.files), len(some.files)) == (4, 1)
    assert some.schema == pa.schema({"id": pa.int64(), "text": pa.string()})
    expected = [n for n in range(150, 200) if n % 3 == 0]
    assert _ids(some) == expected
    assert whole.count() == (200, True)
    if isinstance(place, IcebergPlace):
        assert _ids(place.read(["id"], "id >= 150 and lang = 'en'")) == expected
        with pytest.raises(TableError, match=r"where='nosuch > 1' can't be evaluated on its columns: .*; it has id, "):
            place.read(None, "nosuch > 1")
    with pytest.raises(TableError, match=r"can't read the column 'texts': .* did you mean 'text'"):
        place.read(["texts"])


def test_versions_and_rows_since_a_version(place: Place) -> None:
    for batch in _ROWS[:3]:
        _write(place.write(schema=_SCHEMA), batch)
    versions = place.versions()[-3:]
    assert _ids(place.read(["id"], snapshot=versions[0])) == list(range(50))
    assert _ids(place.read(["id"], since=versions[0])) == list(range(50, 150))
    assert _ids(place.read(["id"], snapshot=versions[1], since=versions[0])) == list(range(50, 100))
    assert _ids(place.read(["id"], since=versions[2])) == []  # as of a job that looks again and again
    assert _ids(place.read(["id"], snapshot=datetime.datetime.now(datetime.timezone.utc))) == list(range(150))
    with pytest.raises(TableError, match=r"no snapshot datetime|found the time 2001-.*, its first version, or later"):
        place.read(snapshot=datetime.datetime(2001, 1, 1, tzinfo=datetime.timezone.utc))
    before = place.read(["id"])
    _write(place.write(mode="overwrite"), _ROWS[3])
    assert _ids(place.read(["id"])) == list(range(150, 200))
    assert _ids(before) == list(range(150))  # what a pipeline has found, it reads
    with pytest.raises(TableError, match=r"expected only appended rows"):
        place.read(since=versions[0])
    with pytest.raises(TableError, match=r"no snapshot 9{9}; its snapshots are|found the version 9{9}, expected 0 to"):
        place.read(snapshot=999_999_999)
    with pytest.raises(InvalidArgument, match=r"found the version 1.5"):
        place.read(snapshot=1.5)


def test_rows_that_another_program_deleted(place: Place) -> None:
    place.append(pa.table({"id": range(10), "n": range(10)}))
    place.table.delete("id = 3")
    assert _ids(place.read()) == [n for n in range(10) if n != 3]


def test_columns_that_were_renamed_and_added(tmp_path: Path) -> None:
    """Iceberg's files keep the old names; columns are found by their ids."""
    place = IcebergPlace(tmp_path)
    place.append(pa.table({"id": [1, 2], "text": ["a", "b"]}))
    with place.table.update_schema() as update:
        update.rename_column("text", "body")
    assert _rows(place.read()) == [{"id": 1, "body": "a"}, {"id": 2, "body": "b"}]
    assert _ids(place.read(["id"], pc.field("body") == "b")) == [2]
    _write(
        place.write(schema_changes="add", schema=pa.schema({"id": pa.int64(), "new": pa.string()})),
        pa.record_batch({"id": [3], "new": ["c"]}),
    )
    assert _rows(place.read()) == [
        {"id": 1, "body": "a", "new": None},
        {"id": 2, "body": "b", "new": None},
        {"id": 3, "body": None, "new": "c"},
    ]


def test_columns_are_added_only_when_asked(place: Place) -> None:
    place.append(pa.table({"id": [1]}))
    more = pa.record_batch({"id": [2], "new": ["x"]})
    with pytest.raises(
        WriteError, match=r"found the columns 'new', which the table does not have.*schema_changes=.add"
    ):
        _write(place.write(schema=more.schema), more)
    with pytest.raises(WriteError, match=r"the columns of the rows are not known before the run; pass schema="):
        _write(place.write(schema_changes="add"), more)
    _write(place.write(schema=more.schema, schema_changes="add"), more)
    _write(place.write(), pa.record_batch({"id": [3]}))  # the columns that it lacks are null
    assert _rows(place.read()) == [{"id": 1, "new": None}, {"id": 2, "new": "x"}, {"id": 3, "new": None}]


def test_a_new_table_has_the_columns_of_the_first_rows(place: Place) -> None:
    _write(beam.Reshuffle() | place.write(partition_by="lang"))
    assert _as_written(place.rows()) == _as_written(_ALL)
    assert data_files(place) == place.referenced()


def test_upsert(place: Place) -> None:
    place.append(pa.table({"id": [1, 2], "text": ["a", "b"]}))
    _write(
        place.write(mode="upsert", keys="id"),
        pa.record_batch({"id": [2], "text": ["B"]}),
        pa.record_batch({"id": [3], "text": ["C"]}),
    )
    assert _rows(place.read()) == [{"id": 1, "text": "a"}, {"id": 2, "text": "B"}, {"id": 3, "text": "C"}]
    assert list(place.folder.rglob("*staged*/*")) == []
    with pytest.raises(Exception, match=r"found several rows with the same id, expected one of each"):
        _write(place.write(mode="upsert", keys="id"), pa.record_batch({"id": [1, 1], "text": ["x", "y"]}))
    with pytest.raises(Exception, match=r"found a row without a value in the key 'id'"):
        _write(
            place.write(mode="upsert", keys="id"), pa.record_batch({"id": pa.array([None], pa.int64()), "text": ["x"]})
        )
    with pytest.raises(WriteError, match=r"found no column 'ids' for keys="):
        _write(place.write(mode="upsert", keys="ids"))


def test_upsert_by_several_keys(place: Place) -> None:
    """Rows that share one key with new rows stay."""
    at = [_DAY + datetime.timedelta(days=n) for n in range(3)]
    names = pa.schema({"id": pa.int64(), "at": pa.timestamp("us"), "tags": pa.list_(pa.string())})

    def batch(*rows: tuple[int, int, str]) -> pa.RecordBatch:
        return pa.RecordBatch.from_pylist([{"id": n, "at": at[day], "tags": [tag]} for n, day, tag in rows], names)

    for rows in (
        batch((1, 0, "a"), (1, 1, "b"), (2, 0, "c"), (3, 2, "d")),
        batch((1, 1, "B"), (2, 0, "C"), (2, 1, "e")),
        batch((1, 1, "B"), (2, 0, "C"), (2, 1, "e")),
    ):
        _write(place.write(mode="upsert", keys=["id", "at"]), rows)
    found = [(row["id"], at.index(row["at"]), *row["tags"]) for row in _rows(place.read())]
    assert sorted(found) == [(1, 0, "a"), (1, 1, "B"), (2, 0, "C"), (2, 1, "e"), (3, 2, "d")]


def test_keys_that_can_not_identify_rows(place: Place) -> None:
    twice = pa.record_batch({"id": [1, 1, 2], "day": ["a", "a", "a"], "n": [1, 2, 3]})
    with pytest.raises(Exception, match=r"found several rows with the same id, day, expected one of each"):
        _write(place.write(mode="upsert", keys=["id", "day"]), twice)  # no row of the table has them
    assert place.rows().num_rows == 0
    for rows, said in (
        (pa.record_batch({"n": [1]}), r"found no column 'id' for keys="),
        (pa.record_batch({"id": [[1]]}), r"found list<item: int64> in the key 'id', expected texts, numbers or times"),
    ):
        with pytest.raises(Exception, match=said):
            _write(place.write(mode="upsert", keys="id"), rows)


def test_a_column_without_values_fits_each_type(place: Place) -> None:
    _write(place.write(), pa.record_batch({"id": [1], "text": ["a"]}))
    _write(place.write(), pa.record_batch({"id": [2], "text": pa.nulls(1)}))
    assert _rows(place.read()) == [{"id": 1, "text": "a"}, {"id": 2, "text": None}]


def test_a_table_is_never_replaced_by_nothing(place: Place) -> None:
    place.append(pa.table({"id": [1]}))
    none = beam.Filter(lambda _: False).with_output_types(pa.RecordBatch)
    with pytest.raises(Exception, match=r"found no rows, expected some to overwrite the table; it stays as it was"):
        _write(none | place.write(mode="overwrite"))
    assert _ids(place.read()) == [1]
    _write(none | place.write(mode="overwrite").keep_if_empty())
    assert _ids(place.read()) == [1]
    _write(none | place.write(mode="overwrite", allow_empty=True))
    assert _ids(place.read()) == []


def test_a_new_table_may_be_overwritten_by_nothing(place: Place) -> None:
    none = beam.Filter(lambda _: False).with_output_types(pa.RecordBatch)
    write = place.write(mode="overwrite", schema=pa.schema({"id": pa.int64()}))
    _write(none | write)
    assert _ids(place.read()) == []
    _write(none | write)
    assert _ids(place.read()) == []


def test_each_window_of_a_stream_is_a_commit(place: Place) -> None:
    events = stream_of(tables(1, 2, 11), 15, tables(12, 21), 30, element_type=pa.RecordBatch)
    with beam.Pipeline(LuminosityRunner(), PipelineOptions(["--streaming", "--progress=off"])) as pipeline:
        rows = pipeline | events | beam.WindowInto(beam.window.FixedWindows(10))
        _ = rows | place.write(schema=pa.schema({"n": pa.int64()}))
    assert sorted(place.rows()["n"].to_pylist()) == [1, 2, 11, 12, 21]
    assert len(place.versions()) == 3 + (place.kind == "delta")  # which has one for the new table
    with pytest.raises(WriteError, match=r"found a stream and mode='overwrite', expected 'append' or 'upsert'"):
        rows | "Other" >> place.write(schema=pa.schema({"n": pa.int64()}), mode="overwrite")


def test_what_is_refused_before_the_run(place: Place, tmp_path: Path) -> None:
    new = beam.Pipeline("FnApiRunner") | beam.Create(_ROWS)
    with pytest.raises(WriteError, match=r"column 'wait' is duration\[s\], which Iceberg and Delta don't have"):
        new | "Type" >> place.write(schema=pa.schema({"wait": pa.duration("s")}))
    with pytest.raises(InvalidArgument, match=r"found mode='upsert' and keys=\[\], expected keys"):
        place.write(mode="upsert")
    with pytest.raises(InvalidArgument, match=r"found mode='merge', expected one of 'append'"):
        place.write(mode="merge")
    place.append(pa.table({"id": [1], "text": ["a"]}))
    for schema, said in (
        (pa.schema({"id": pa.string()}), "column 'id': found string, expected int64 as in the table"),
        (
            pa.schema({"txt": pa.string()}),
            "found the columns 'txt', which the table does not have.*did you mean 'text'",
        ),
    ):
        with pytest.raises(WriteError, match=said):
            new | said >> place.write(schema=schema)


def test_partitions_that_can_not_be(tmp_path: Path) -> None:
    new = beam.Pipeline("FnApiRunner") | beam.Create(_ROWS)
    schema = pa.schema({"id": pa.int64(), "text": pa.string(), "raw": pa.binary(), "tags": pa.list_(pa.string())})
    of_iceberg = (
        ("ids", r"found partition_by='ids', expected one of id, text"),
        ("day(text)", r"the column 'text' is string, for which there is no day; write partition_by="),
        ("tags", r"the column 'tags' is list<item: string>, for which there is no identity"),
        ("bucket(id)", r"found partition_by='bucket\(id\)': Could not match bucket"),
        ("bucket(0, id)", r"found partition_by='bucket\(0, id\)', expected a column"),
        (("id", "bucket(4, id)"), r"found partition_by='id' and another partition of 'id', expected one of each"),
    )
    of_delta = (
        ("ids", r"found partition_by='ids', expected one of id, text"),
        ("raw", r"found the partition 'raw' of binary, expected texts, numbers, times or booleans"),
        (schema.names[:2], r"which are all columns, expected one more"),
    )
    for lake, wrong in ((IcebergPlace(tmp_path), of_iceberg), (DeltaPlace(tmp_path), of_delta)):
        for by, said in wrong:
            columns = pa.schema([schema.field(name) for name in by]) if isinstance(by, list) else schema
            with pytest.raises((InvalidArgument, WriteError), match=said):
                _ = new | f"{lake.kind} {by}" >> lake.write(schema=columns, partition_by=by)
    empty = pa.record_batch({"id": [1], "text": [""]})
    with pytest.raises(Exception, match=r"found an empty text in 'text', which Delta can't tell from null"):
        _write(DeltaPlace(tmp_path).write(partition_by="text"), empty)


def test_buckets_of_decimals(tmp_path: Path) -> None:
    place = IcebergPlace(tmp_path)
    prices = [Decimal(n) / 4 for n in range(9)]
    rows = pa.record_batch({"price": pa.array(prices, pa.decimal128(9, 2))})
    _write(beam.Reshuffle() | place.write(partition_by="bucket(3, price)"), rows)
    assert sorted(place.rows()["price"].to_pylist()) == prices


def test_tables_that_are_not_there(tmp_path: Path) -> None:
    place = IcebergPlace(tmp_path)
    place.append(pa.table({"id": [1]}))
    with pytest.raises(TableError, match=r"no such table; the namespace shop has the tables: shop.sales; did you mean"):
        ReadIceberg("main.shop.sale", catalog=place.settings)
    with pytest.raises(TableError, match=r"no such table; the catalog has the namespaces: shop"):
        ReadIceberg("main.shops.sales", catalog=place.settings)
    with pytest.raises(TableError, match=r"no settings for the catalog 'nowhere'.*PYICEBERG_CATALOG__NOWHERE__URI"):
        ReadIceberg("nowhere.shop.sales")
    with pytest.raises(InvalidArgument, match=r"found 2 names, expected CATALOG\.NAMESPACE\.TABLE"):
        ReadIceberg("shop.sales")
    with pytest.raises(WriteError, match=r"no namespace 'shops'; the catalog has shop; create it"):
        WriteIceberg("main.shops.sales", catalog=place.settings).check(_SCHEMA)
    broken = {**place.settings, "uri": f"sqlite:///{tmp_path}/no/folder.db"}
    with pytest.raises(TableError, match=r"the database of the catalog can't be used: .*unable to open database file"):
        ReadIceberg("main.shop.sales", catalog=broken)
    with pytest.raises(TableError, match=r"no Delta table: the folder does not exist"):
        ReadDelta(tmp_path / "nowhere")
    with pytest.raises(TableError, match=r"no Delta table: the folder has no _delta_log in it"):
        ReadDelta(tmp_path)
    with pytest.raises(WriteError, match=r"found a folder with files that is no Delta table"):
        WriteDelta(tmp_path).check(_SCHEMA)
    with pytest.raises(WriteError, match=r"delta:sales@7: found a version of a table.*leave out @7"):
        WriteTable("delta:sales@7")
    with pytest.raises(TableError, match=r"a library for the catalog is missing: .*install it: pip install"):
        ReadIceberg("main.shop.sales", catalog={"type": "hive", "uri": "thrift://localhost:1"})


def test_features_of_delta_that_are_not_known(tmp_path: Path) -> None:
    place = DeltaPlace(tmp_path)
    place.append(pa.table({"id": [1]}))
    place.table.alter.add_constraint({"positive": "id > 0"})
    with pytest.raises(WriteError, match=r"found delta\.constraints\.positive, expected a table without rules"):
        place.write().check(pa.schema({"id": pa.int64()}))
    assert _ids(place.read()) == [1]
    log = sorted((place.folder / "_delta_log").glob("*.json"))[-1]
    actions = [json.loads(line) for line in log.read_text().splitlines()]
    for action in actions:
        if "metaData" in action:
            action["metaData"]["configuration"]["delta.columnMapping.mode"] = "name"
    log.write_text("\n".join(map(json.dumps, actions)))
    with pytest.raises(TableError, match=r"found the table features columnMapping, expected none"):
        place.read()


def _deletion_vector(rows: list[int]) -> dict[str, Any]:
    """Return a deletion vector that is in the log itself, as other engines write it."""
    alphabet = string.digits + string.ascii_lowercase + string.ascii_uppercase + ".-:+=^!/*?&<>()[]{}@%$#"
    python = string.digits + string.ascii_uppercase + string.ascii_lowercase + "!#$%&()*+-;<=>?@^_`{|}~"
    content = struct.pack("<i", 1681511377) + BitMap64(rows).serialize()
    text = base64.b85encode(content + b"\0" * (-len(content) % 4)).decode().translate(str.maketrans(python, alphabet))
    return {"storageType": "i", "pathOrInlineDv": text, "sizeInBytes": len(content), "cardinality": len(rows)}


def test_deletion_vectors_of_delta(tmp_path: Path) -> None:
    place = DeltaPlace(tmp_path)
    rows = pa.table({"id": range(100_000)})
    write_deltalake(place.folder, rows, configuration={"delta.enableDeletionVectors": "true"})
    added = json.loads(next(line for line in _log(place, 0) if '"add"' in line))["add"]
    gone = [0, 3, 65_535, 65_536, 99_999]
    removed = {"path": added["path"], "dataChange": True, "deletionTimestamp": added["modificationTime"]}
    actions = [{"remove": removed}, {"add": {**added, "deletionVector": _deletion_vector(gone)}}]
    (place.folder / "_delta_log" / f"{1:020}.json").write_text("\n".join(map(json.dumps, actions)))
    assert _ids(place.read()) == sorted(set(range(100_000)) - set(gone))
    assert place.read().count() == (100_000 - len(gone), True)
    assert _ids(place.read(where=pc.field("id") > 99_990)) == list(range(99_991, 99_999))


def _log(place: DeltaPlace, version: int) -> list[str]:
    return (place.folder / "_delta_log" / f"{version:020}.json").read_text().splitlines()


def test_changes_that_a_delta_table_recorded(tmp_path: Path) -> None:
    place = DeltaPlace(tmp_path)
    place.append(pa.table({"id": [1, 2]}))
    with pytest.raises(
        TableError, match=r"the table does not record changes, expected delta.enableChangeDataFeed=true"
    ):
        place.read(changes_since=0)
    place.table.alter.set_table_properties({"delta.enableChangeDataFeed": "true"})
    place.append(pa.table({"id": [3]}))
    place.table.delete("id = 1")
    found = place.read(["id", "_change_type"], changes_since=2)
    assert _rows(found) == [{"id": 1, "_change_type": "delete"}, {"id": 3, "_change_type": "insert"}]
    assert found.count() is None
    assert _rows(place.read(changes_since=4)) == []  # the version after the newest
    for first in (-1, 5):
        with pytest.raises(TableError, match=rf"found changes_since={first} and the version 3, expected versions from"):
            place.read(changes_since=first)


def test_tables_by_name(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    iceberg, delta = IcebergPlace(tmp_path), DeltaPlace(tmp_path)
    for name, value in iceberg.settings.items():
        monkeypatch.setenv(f"PYICEBERG_CATALOG__MAIN__{name.upper()}", value)
    monkeypatch.setattr("pyiceberg.catalog._ENV_CONFIG", Config())  # which is read when it is imported
    rows = pa.record_batch({"id": [1, 2], "text": ["a", "b"]})
    for name in ("iceberg:main.shop.sales", f"delta:{delta.folder}"):
        _write(WriteTable(name, schema=rows.schema), rows)
        with pytest.raises(WriteError, match=r"the table has rows; pass if_exists='replace' or 'append'"):
            WriteTable(name).check(rows.schema)
        with beam.Pipeline("FnApiRunner") as pipeline:
            table = pipeline | ReadTable(name, where=pc.field("id") == 2)
            _ = table | WriteTable(name, if_exists="append")
        assert _ids(ReadTable(name)) == [1, 2, 2]
        newest = (iceberg if name.startswith("iceberg") else delta).versions()[-1]
        _write(WriteTable(name, if_exists="replace"), rows)
        assert _ids(ReadTable(name)) == [1, 2]
        assert _ids(ReadTable(f"{name}@{newest}")) == [1, 2, 2]
        for options in ({"format": "csv"}, {"max_bytes": 5}):
            with pytest.raises(TableError, match=r"found schema=, format=, max_bytes= or an argument for CSV, which"):
                ReadTable(name, **options)  # type: ignore[arg-type]
        with pytest.raises(WriteError, match=r"found rows_per_file=, format= or compression=, which are for files"):
            WriteTable(name, format="csv")
        with pytest.raises(InvalidArgument, match=r"found 2 patterns with the name .* expected the name alone"):
            ReadTable([name, "a.csv"])


def test_datasets_by_name(tmp_path: Path) -> None:
    import datasets
    import lancedb

    data = {"id": list(range(100)), "text": [f"t{n}" for n in range(100)]}
    made = datasets.Dataset.from_dict(data)
    made.save_to_disk(str(tmp_path / "one"))
    datasets.DatasetDict({"train": made, "test": made.select(range(3))}).save_to_disk(str(tmp_path / "two"))
    datasets.Dataset.from_dict({"id": []}).save_to_disk(str(tmp_path / "none"))
    lancedb.connect(str(tmp_path)).create_table("rows", pa.table(data))
    assert _ids(ReadTable(f"hf:{tmp_path}/one")) == data["id"]
    assert _ids(ReadTable(f"hf:{tmp_path}/two/test", ["id"])) == [0, 1, 2]
    where = pc.field("id") >= 90
    with beam.Pipeline("FnApiRunner") as pipeline:
        found = [
            pipeline | f"hf {name}" >> ReadTable(name, ["text"], where, rows_per_batch=7)
            for name in (f"hf:{tmp_path}/two/train", f"lance:{tmp_path}/rows.lance")
        ]
        rows = found | beam.Flatten() | beam.FlatMap(lambda batch: batch.column("text").to_pylist())
        assert_that(rows, equal_to([f"t{n}" for n in range(90, 100)] * 2))
    for name, said in {
        f"hf:{tmp_path}/two": "found no split; the dataset has train, test; name one",
        f"hf:{tmp_path}/two/trian": "found no split 'trian'; the dataset has train, test; did you mean 'train'",
        f"hf:{tmp_path}/none": "it was saved without any row",
        f"hf:{tmp_path}": "is no dataset that save_to_disk wrote",
        "hf:nobody/nothing/train": "found neither a folder nor a dataset in the cache .* nothing is downloaded",
        "hf:nothing": "expected hf:FOLDER, hf:FOLDER/SPLIT or hf:DATASET/SPLIT",
        f"lance:{tmp_path}/other.lance": "can't be opened as a Lance dataset: the folder does not exist",
        f"lance:{tmp_path}/rows": "found no suffix .lance",
    }.items():
        with pytest.raises(TableError, match=said):
            ReadTable(name)
    with pytest.raises(WriteError, match=r"tables of this kind are only read"):
        WriteTable(f"lance:{tmp_path}/rows.lance")
