"""Tests of WriteQdrant with the real embedded engine, and workers in several processes."""

from __future__ import annotations

import multiprocessing
import os
import uuid
from datetime import datetime, timezone
from decimal import Decimal
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
import qdrant_edge
from apache_beam.testing.util import assert_that, equal_to

from luminosity import WriteQdrant
from luminosity.errors import StoreError
from luminosity.io.folders import ReplacedFolder, copy_folder, lock_file
from luminosity.io.stores.address import StoreAddress
from luminosity.io.stores.embedded_qdrant import EmbeddedCollection
from luminosity.io.stores.kinds import open_store
from luminosity.io.stores.points import Point, PointColumns
from luminosity.io.stores.store import WriteMode
from tests.both_runners import Pipelines, counters
from tests.io.deadly import Deadly
from tests.io.stores.vectors import numbered, vectors


def stored(folder: Path, collection: str = "things") -> dict[Any, Any]:
    """Return all points of a collection, by id."""
    shard = qdrant_edge.EdgeShard.load(str(folder / collection))
    records, _ = shard.scroll(qdrant_edge.ScrollRequest(limit=100_000, with_payload=True, with_vector=True))
    shard.close()
    return {record.id if isinstance(record.id, int) else str(record.id): record for record in records}


def write(folder: Path, *batches: pa.RecordBatch, **settings: Any) -> dict[Any, Any]:
    with beam.Pipeline("FnApiRunner") as pipeline:
        _ = (
            pipeline
            | beam.Create(batches, reshuffle=False)
            | WriteQdrant(folder, "things", **{"vectors": "vector", **settings})
        )
    return stored(folder)


def test_every_row_becomes_a_point(pipelines: Pipelines, tmp_path: Path) -> None:
    with pipelines() as (pipeline, run):
        _ = (
            pipeline
            | beam.Create(range(0, 2_000, 100))
            | beam.Map(numbered, 100).with_output_types(pa.RecordBatch)
            | WriteQdrant(tmp_path, "things", vectors="vector", batch_size=150, distance="dot")
        )

    points = stored(tmp_path)
    assert sorted(points) == list(range(2_000))
    assert points[1_234].payload == {"text": "text 1234"}
    expected = numbered(1_234, 1).column("vector")[0].as_py()
    assert points[1_234].vector == pytest.approx(expected)
    assert counters(run.result)["points_upserted"] == 2_000


def test_a_write_can_be_waited_for(pipelines: Pipelines, tmp_path: Path) -> None:
    """A later step gets the number of written rows, when they are durable."""

    def check(counts: int) -> int:
        assert len(stored(tmp_path)) == 250
        return counts

    with pipelines() as (pipeline, _):
        written = pipeline | beam.Create([numbered(0, 250)]) | WriteQdrant(tmp_path, "things", vectors="vector")
        total = written | beam.CombineGlobally(sum) | beam.Map(check)
        assert_that(total, equal_to([250]))


def test_points_are_exact_though_workers_are_killed(tmp_path: Path) -> None:
    """The engine allows one process at a time: two workers take turns, and a dead worker releases the lock."""
    folder, markers = tmp_path / "stores", tmp_path / "markers"
    markers.mkdir()
    deaths = {200, 850, 1_500}
    options = ["--runner=luminosity.LuminosityRunner", "--progress=off", "--cpu_workers=2"]
    with beam.Pipeline(argv=options) as pipeline:
        _ = (
            pipeline
            | beam.Create(range(0, 2_000, 50))
            | beam.Reshuffle()
            | beam.ParDo(Deadly(markers, deaths, rows=50, after_s=0.03)).with_output_types(pa.RecordBatch)
            | WriteQdrant(folder, "things", vectors="vector", batch_size=50)
        )

    assert {int(name) for name in os.listdir(markers)} == deaths
    points = stored(folder)
    assert sorted(points) == list(range(2_000))
    assert all(point.payload == {"text": f"text {number}"} for number, point in points.items())


def test_named_vectors_and_a_null_among_them(tmp_path: Path) -> None:
    rows = pa.record_batch(
        {"id": [1, 2], "title": vectors([[1, 0], [0, 1]]), "body": vectors([[1, 2, 3], None]), "stars": [5, 4]}
    )
    points = write(tmp_path, rows, vectors={"t": "title", "b": "body"}, distance="euclid")

    assert points[1].vector == {"t": [1, 0], "b": [1, 2, 3]}
    assert points[2].vector == {"t": [0, 1]}
    assert points[2].payload == {"stars": 4}


def test_ids_of_all_kinds(tmp_path: Path) -> None:
    known = str(uuid.uuid4())
    rows = pa.record_batch({"id": [known, "review 7"], "vector": vectors([[1], [2]])})
    points = write(tmp_path, rows)
    again = write(tmp_path, rows)

    assert points.keys() == again.keys()
    assert points[known].payload == {}
    (other,) = points.keys() - {known}
    assert uuid.UUID(other).version == 5
    assert points[other].payload == {"id": "review 7"}


def test_payloads_are_json(tmp_path: Path) -> None:
    rows = pa.record_batch(
        {
            "id": [1],
            "vector": vectors([[1]]),
            "at": pa.array([datetime(2026, 3, 1, 12, tzinfo=timezone.utc)], pa.timestamp("ns", "UTC")),
            "price": pa.array([Decimal("1.50")]),
            "tags": [[{"name": "a", "since": None}]],
            "nothing": pa.nulls(1),
            "ratio": [float("nan")],
            "kind": pa.array(["x"]).dictionary_encode(),
        }
    )
    assert write(tmp_path, rows)[1].payload == {
        "at": "2026-03-01T12:00:00+00:00",
        "price": "1.50",
        "tags": [{"name": "a", "since": None}],
        "nothing": None,
        "ratio": None,
        "kind": "x",
    }
    assert write(tmp_path, rows, payload=["kind"])[1].payload == {"kind": "x"}


def test_tombstones_delete_and_the_last_row_wins(tmp_path: Path) -> None:
    write(tmp_path, numbered(0, 5))
    rows = pa.record_batch(
        {
            "id": [1, 2, 2, 3, 3, 99],
            "text": ["one", "two", None, None, "three", None],
            "vector": vectors([[1, 0, 0, 0], [1, 0, 0, 0], None, None, [1, 0, 0, 0], None]),
            "_deleted": [None, False, True, True, False, True],
        }
    )
    points = write(tmp_path, rows)

    assert sorted(points) == [0, 1, 3, 4]
    assert [points[number].payload["text"] for number in (0, 1, 3)] == ["text 0", "one", "three"]


def test_tombstones_alone_need_no_collection(tmp_path: Path) -> None:
    rows = pa.record_batch({"id": [1], "vector": pa.array([None], pa.list_(pa.float32())), "_deleted": [True]})
    with beam.Pipeline("FnApiRunner") as pipeline:
        _ = pipeline | beam.Create([rows]) | WriteQdrant(tmp_path, "things", vectors="vector")
    assert not (tmp_path / "things").exists()


def table(**columns: Any) -> pa.RecordBatch:
    return pa.record_batch({"id": [7, 8], "vector": vectors([[1, 2], [3, 4]]), **columns})


MISTAKES = {
    "no id": (table(id=pa.array([7, None])), r"row 1 \(id None\) has no id"),
    "a negative id": (table(id=[7, -8]), r"the id of row 1 \(id -8\): found -8, expected an integer of 0 or more"),
    "ids of another type": (table(id=[0.5, 1.5]), "the id column 'id' is of type double, expected unsigned integers"),
    "no such column": (table().drop_columns(["id"]), "there is no column 'id', expected one of vector"),
    "NaN": (table(vector=vectors([[1, 2], [3, float("nan")]])), r"the vector 'vector' of row 1 \(id 8\) has a number"),
    "null within": (table(vector=vectors([[1, 2], [3, None]])), r"the vector 'vector' of row 1 \(id 8\) has a number"),
    "no vector": (
        table(vector=vectors([[1, 2], None])),
        r"row 1 \(id 8\) has only null vectors, expected at least one",
    ),
    "no vectors": (table(vector=[1.0, 2.0]), "the vector column 'vector' is of type double, expected lists of numbers"),
    "sizes": (table(vector=[[1.0], [1.0, 2.0]]), r"of row 1 \(id 8\) has 2 numbers, that of row 0 \(id 7\) has 1"),
    "another size": (table(vector=[[1.0], [1.0]]), "'vector' has 1 numbers in one batch and 2 in another"),
}


@pytest.mark.parametrize("name", MISTAKES)
def test_a_mistake_names_the_row(name: str, tmp_path: Path) -> None:
    rows, message = MISTAKES[name]
    good = pa.record_batch({"id": [1], "vector": vectors([[1, 2]])})
    with pytest.raises(Exception, match=message):  # Beam wraps the errors of steps.
        write(tmp_path, good, rows)
    assert not (tmp_path / "things").exists()


def test_a_collection_with_other_vectors_is_left_alone(tmp_path: Path) -> None:
    write(tmp_path, numbered(0, 3))
    place = f"the collection 'things' at {tmp_path}"
    for settings, size, message in [
        ({}, 5, f"{place} has a vector without a name of 4 numbers with cosine distance, expected 5 numbers"),
        ({"distance": "dot"}, 4, "with cosine distance, expected 4 numbers with dot distance"),
        ({"vectors": {"a": "vector"}}, 4, f"{place} has no vector 'a', it has one without a name"),
    ]:
        with pytest.raises(Exception, match=message):
            write(tmp_path, numbered(0, 1, size), **settings)
    assert len(stored(tmp_path)) == 3


def test_a_collection_that_must_be_there(tmp_path: Path) -> None:
    with pytest.raises(Exception, match="does not exist, and create=False"):
        write(tmp_path, numbered(0, 1), create=False)


def test_a_file_where_the_folder_should_be(tmp_path: Path) -> None:
    (tmp_path / "file").write_text("")
    with pytest.raises(Exception, match=r"can't be written: found a file at .*/file, expected a folder"):
        write(tmp_path / "file", numbered(0, 1))


def _hold(path: str, taken: Any, done: Any) -> None:
    with lock_file(path, 1):
        taken.set()
        done.wait(200)


def test_a_lock_held_too_long_names_its_holder(tmp_path: Path) -> None:
    write(tmp_path, numbered(0, 1))
    context = multiprocessing.get_context("spawn")
    taken, done = context.Event(), context.Event()
    holder = context.Process(target=_hold, args=(str(tmp_path / "things.lock"), taken, done))
    holder.start()
    assert taken.wait(120)
    collection = open_store(StoreAddress(str(tmp_path), "things", timeout=0.2), lambda: None)
    with (
        pytest.raises(StoreError, match=rf"process {os.getpid()} \(.*\) is writing it right now"),
        ReplacedFolder(str(tmp_path / "things"), timeout_s=1.0).writing(),
    ):
        WriteQdrant(tmp_path, "things", vectors="vector", if_exists="replace").check_writable()
    with pytest.raises(StoreError, match=rf"waited 0.2 s for {tmp_path}/things.lock, which process {holder.pid} holds"):
        collection.count()
    done.set()
    holder.join(60)
    assert collection.count() == 1


def test_a_folder_that_is_open_elsewhere(tmp_path: Path) -> None:
    write(tmp_path, numbered(0, 1))
    shard = qdrant_edge.EdgeShard.load(str(tmp_path / "things"))
    with pytest.raises(Exception, match=r"was open in another program for 0.3 s, and only one may"):
        write(tmp_path, numbered(1, 1), timeout=0.3)
    shard.close()


@pytest.mark.parametrize(
    ("settings", "error", "message"),
    [
        ({"where": "s3://bucket/x"}, ValueError, "expected an address .http://.... or a folder of this machine"),
        ({"where": "http://me:word@host"}, ValueError, "found a user or password in the address of host"),
        ({"where": "http://host", "api_key": "secret"}, TypeError, "found api_key= of type str, expected a function"),
        ({"api_key_env": "KEY"}, ValueError, "found an API key for the folder"),
        ({"collection": "../x"}, ValueError, "found the collection name '../x'"),
        ({"distance": "far"}, ValueError, "found distance='far', expected one of cosine, dot, euclid, manhattan"),
        ({"vectors": {}}, ValueError, "found no vectors"),
        ({"batch_size": 0}, ValueError, "batch_size=0, expected both to be positive"),
    ],
)
def test_settings_are_checked_when_the_pipeline_is_built(
    settings: dict[str, Any], error: type[Exception], message: str
) -> None:
    with pytest.raises(error, match=message) as raised:
        WriteQdrant(**{"where": "folder", "collection": "things", "vectors": "vector", **settings})
    assert "word@" not in str(raised.value)
    assert "secret" not in str(raised.value)


def test_ids_of_arrows_own_type_of_uuids(tmp_path: Path) -> None:
    identity = uuid.uuid4()
    rows = pa.record_batch({"id": pa.array([identity.bytes], pa.uuid()), "vector": vectors([[1, 1]])})
    assert list(write(tmp_path, rows)) == [str(identity)]


# ---- all points or none


def test_a_run_that_fails_writes_no_point(pipelines: Pipelines, tmp_path: Path) -> None:
    write(tmp_path, numbered(0, 5))

    def bad(first: int) -> pa.RecordBatch:
        if first == 190:
            raise ValueError("a row that fails")
        return numbered(first, 10)

    def run(collection: str) -> None:
        with pipelines() as (pipeline, _):
            rows = pipeline | beam.Create(range(10, 210, 10)) | beam.Map(bad).with_output_types(pa.RecordBatch)
            _ = rows | WriteQdrant(tmp_path, collection, vectors="vector", batch_size=10)

    for collection in ("things", "new"):
        with pytest.raises(Exception, match="a row that fails"):
            run(collection)
    assert sorted(stored(tmp_path)) == [0, 1, 2, 3, 4]
    assert not (tmp_path / "new").exists()


def test_a_collection_is_replaced_as_a_whole(tmp_path: Path) -> None:
    write(tmp_path, numbered(0, 5))
    assert sorted(write(tmp_path, numbered(3, 4, size=6), if_exists="replace")) == [3, 4, 5, 6]
    assert not list(tmp_path.glob("things.[ru]*"))
    with pytest.raises(StoreError, match=r"'things' at .* exists already; pass if_exists='append'"):
        write(tmp_path, numbered(0, 1), if_exists="fail")
    with pytest.raises(Exception, match=r"found no rows, expected some to replace .* stays as it was"):
        write(tmp_path, if_exists="replace")
    assert len(stored(tmp_path)) == 4
    assert len(write(tmp_path)) == 4
    assert write(tmp_path, if_exists="replace", allow_empty=True) == {}


def publish(folder: Path, writes: Any, **settings: Any) -> None:
    collection = EmbeddedCollection(StoreAddress(str(folder), "things", timeout=5))
    collection.publish(writes, {"": 4}, WriteMode("cosine", **settings))


def points(first: int, count: int) -> list[Point]:
    return list(PointColumns({"": "vector"}).changes(numbered(first, count)).points.values())  # type: ignore[arg-type]


@pytest.mark.parametrize("if_exists", ["append", "replace"])
def test_readers_see_the_old_points_until_all_new_ones_are_there(tmp_path: Path, if_exists: str) -> None:
    write(tmp_path, numbered(0, 5))
    seen: list[int] = []

    def writes() -> Any:
        for first in (10, 20):
            yield points(first, 3), [0]
            seen.append(EmbeddedCollection(StoreAddress(str(tmp_path), "things", timeout=5)).count())

    publish(tmp_path, writes(), if_exists=if_exists)
    assert seen == [5, 5]
    assert len(stored(tmp_path)) == (10 if if_exists == "append" else 6)


@pytest.mark.parametrize("renames", [0, 1])
def test_a_step_that_is_killed_while_it_publishes(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, renames: int
) -> None:
    """Whichever rename it does not reach: readers find the old points, and the next attempt has all."""
    publish(tmp_path, [(points(0, 5), [])])
    left, rename = renames, os.rename

    def killed(source: str, destination: str) -> None:
        nonlocal left
        if not left:
            patched.setattr("luminosity.io.stores.embedded_qdrant.shutil.rmtree", lambda *args, **options: None)
            raise KeyboardInterrupt  # A killed process removes nothing.
        left -= 1
        rename(source, destination)

    with monkeypatch.context() as patched:
        patched.setattr(os, "rename", killed)
        with pytest.raises(KeyboardInterrupt):
            publish(tmp_path, [(points(10, 3), [])])
    assert (tmp_path / "things.unfinished").exists()
    assert EmbeddedCollection(StoreAddress(str(tmp_path), "things")).count() == 5
    publish(tmp_path, [(points(10, 3), [])])
    assert sorted(stored(tmp_path)) == [0, 1, 2, 3, 4, 10, 11, 12]
    assert sorted(os.listdir(tmp_path)) == ["things", "things.lock", "things.writing"]


def test_holes_of_files_stay_holes(tmp_path: Path) -> None:
    (tmp_path / "old").mkdir()
    with open(tmp_path / "old" / "file", "wb") as file:
        file.write(b"begin")
        file.seek(20 << 20)
        file.write(b"end")
        file.truncate(40 << 20)
    copy_folder(str(tmp_path / "old"), str(tmp_path / "new"))
    assert (tmp_path / "new" / "file").read_bytes() == (tmp_path / "old" / "file").read_bytes()
    assert (tmp_path / "new" / "file").stat().st_blocks * 512 < 1 << 20
