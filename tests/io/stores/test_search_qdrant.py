"""Tests of SearchQdrant with a folder and with a server."""

from __future__ import annotations

import tempfile
from collections.abc import Iterator
from datetime import datetime
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.testing.util import assert_that

from luminosity import SearchQdrant, WriteQdrant
from luminosity.errors import StoreError
from luminosity.io.stores.address import StoreAddress, chosen_vector
from luminosity.tables.schemas import RecordBatchCoder
from tests.both_runners import Pipelines, counters
from tests.io.stores.qdrant_server import fails, qdrant_server
from tests.io.stores.vectors import numbered, vectors

PLACES = pa.record_batch(
    {
        "id": ["north", "east", "south", "north-east"],
        "side": vectors([[0, 1], [1, 0], [0, -1], [1, 1]]),
        "seen": pa.array([datetime(2026, 1, day) for day in (1, 2, 3, 4)], pa.timestamp("us")),
        "visits": [1, 2, 3, 4],
        "tags": [["cold"], [], [], []],
        "kind": ["main", "main", "main", "between"],
    }
)


@pytest.fixture(params=["folder", "server"])
def where(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[str]:
    with qdrant_server() as server:
        place = str(tmp_path) if request.param == "folder" else server.url
        with beam.Pipeline("FnApiRunner") as pipeline:
            _ = pipeline | beam.Create([PLACES]) | WriteQdrant(place, "places", vectors={"way": "side"})
        server.script = fails(1, 500, "out of breath")
        yield place


def searched(where: str, rows: pa.RecordBatch, **settings: Any) -> pa.RecordBatch:
    search = SearchQdrant(where, "places", **{"vector_column": "v", "using": "way", "timeout": 20, **settings})
    with tempfile.NamedTemporaryFile() as file:
        with beam.Pipeline("FnApiRunner") as pipeline:
            _ = pipeline | beam.Create([rows]) | search | beam.Map(saved, file.name)
        return RecordBatchCoder().decode(file.read())


def saved(batch: pa.RecordBatch, path: str) -> None:
    Path(path).write_bytes(RecordBatchCoder().encode(batch))


def test_the_nearest_come_first_with_what_is_known_of_them(where: str) -> None:
    rows = pa.record_batch({"v": vectors([[0, 5], None, [2, 2.1]]), "n": [1, 2, 3]})
    types = {"seen": pa.timestamp("us"), "visits": pa.int16(), "kind": pa.string(), "tags": pa.list_(pa.string())}
    found = searched(where, rows, limit=2, with_payload=types)

    assert found.select(["v", "n"]).equals(rows)
    first, nothing, last = found.column("neighbours").to_pylist()
    assert nothing is None
    assert [hit["visits"] for hit in first] == [1, 4]
    assert first[0]["score"] == pytest.approx(1, abs=1e-6)
    assert first[0]["seen"] == datetime(2026, 1, 1)
    assert first[0]["tags"] == ["cold"]
    assert [hit["kind"] for hit in last] == ["between", "main"]
    assert len(last[0]["id"]) == 36


def test_filters_thresholds_and_payloads_as_text(where: str) -> None:
    rows = pa.record_batch({"v": vectors([[1, 1]])})
    names = ["visits", "tags"]
    one = searched(where, rows, filter={"kind": "main", "visits": [1, 3]}, with_payload=names, output="main")
    assert [(hit["visits"], hit["tags"]) for hit in one.column("main")[0].as_py()] == [("1", '["cold"]'), ("3", "[]")]
    between = searched(where, rows, filter={"visits": {"gt": 1, "lte": 3}}, with_payload=names)
    assert {hit["visits"] for hit in between.column("neighbours")[0].as_py()} <= {"2", "3"}
    near = searched(where, rows, score_threshold=0.9).column("neighbours")
    assert len(near[0]) == 1
    assert list(near[0].as_py()[0]) == ["id", "score"]


def test_workers_share_the_folder(pipelines: Pipelines, tmp_path: Path) -> None:
    with pipelines() as (pipeline, _):
        rows = pipeline | beam.Create([numbered(0, 400)])
        _ = rows | WriteQdrant(tmp_path, "things", vectors="vector")

    def own(batch: pa.RecordBatch) -> bool:
        return [hits[0]["id"] for hits in batch.column("near").to_pylist()] == [str(i) for i in batch["id"].to_pylist()]

    with pipelines() as (pipeline, run):
        found = (
            pipeline
            | beam.Create(range(0, 400, 50))
            | beam.Reshuffle()
            | beam.Map(numbered, 50).with_output_types(pa.RecordBatch)
            | SearchQdrant(tmp_path, "things", vector_column="vector", output="near", limit=1, batch_size=32)
        )
        right = found | beam.Map(own)
        assert_that(right, lambda answers: None if all(answers) and len(answers) == 8 else pytest.fail("wrong"))
    assert counters(run.result)["vectors_searched"] == 400


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({"vector_column": "w"}, "there is no column 'w', expected one of v"),
        ({"output": "v"}, "there is a column 'v' already; pass another output="),
        (
            {"using": "ways"},
            "found using='ways', but the collection 'places' at .* has the vectors way; did you mean 'way'",
        ),
        ({"with_payload": {"kind": pa.int8()}}, "the payload field 'kind' can't be read as int8"),
    ],
)
def test_mistakes(settings: dict[str, Any], message: str, where: str) -> None:
    with pytest.raises(Exception, match=message):
        searched(where, pa.record_batch({"v": vectors([[1, 1]])}), **settings)


def test_no_such_collection(tmp_path: Path) -> None:
    with pytest.raises(Exception, match=r"'places' at .* does not exist; check the name and the place"):
        searched(str(tmp_path), pa.record_batch({"v": vectors([[1, 1]])}))


def test_the_only_vector_needs_no_name(where: str) -> None:
    found = searched(where, pa.record_batch({"v": vectors([[0, 2]])}), using=None, limit=1)
    assert found.column("neighbours").to_pylist()[0][0]["score"] == pytest.approx(1)


@pytest.mark.parametrize(
    ("found", "using", "message"),
    [
        (
            {"a": (2, "dot"), "b": (3, "dot")},
            None,
            r"no using=, but .* has the vectors a, b; choose one, such as using='a'",
        ),
        ({"a": (2, "dot"), "b": (3, "dot")}, "c", r"using='c', but .* has the vectors a, b; choose one of them"),
        ({"": (2, "dot")}, "a", r"using='a', but .* has one vector without a name; leave out using="),
        ({}, None, r"found no using=, but .* has no vectors to search$"),
        (None, None, r"does not exist; check the name and the place"),
    ],
)
def test_the_vectors_that_are_there_are_named(found: Any, using: str | None, message: str) -> None:
    address = StoreAddress("stores", "places")
    with pytest.raises(StoreError, match=message):
        chosen_vector(address, found, using)
    assert chosen_vector(address, {"": (2, "dot")}, None) == ""


def test_types_of_fields_hold_where_nothing_is_found(where: str) -> None:
    types = {"tags": pa.list_(pa.string()), "size": pa.struct({"width": pa.int8()}), "at": pa.timestamp("us")}
    found = searched(where, pa.record_batch({"v": vectors([[1, 1]])}), filter={"kind": "none"}, with_payload=types)
    assert found.column("neighbours").to_pylist() == [[]]


def test_settings_are_checked() -> None:
    for settings, message in [
        ({"limit": 0}, "found limit=0"),
        ({"with_payload": ["id"]}, "found 'id' in with_payload"),
        ({"filter": {"a": None}}, "expected a text, a number, a boolean"),
        ({"filter": {"a": {"from": 1}}}, "expected numbers for some of gt, gte, lt, lte"),
    ]:
        with pytest.raises(ValueError, match=message):
            SearchQdrant("folder", "things", vector_column="v", **settings)
