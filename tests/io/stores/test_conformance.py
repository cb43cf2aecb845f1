"""What every vector store does, whatever its kind: a new kind is named in ``PLACES``, and passes all of these."""

from __future__ import annotations

import atexit
import json
from collections.abc import Callable, Iterator
from contextlib import contextmanager
from datetime import datetime, timezone
from functools import cache
from pathlib import Path
from typing import Any, NamedTuple

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms.window import FixedWindows

from luminosity import SearchVectors, WriteVectors
from luminosity.cli.main import main
from luminosity.core import READS, WRITES
from luminosity.errors import StoreError
from luminosity.io.stores.kinds import STORES, address_of, kind_of, open_store
from luminosity.io.stores.store import Query
from tests.answering.scripted import REVIEWS, SIZE, WordCounts
from tests.io.stores.postgres_server import postgres_database, postgres_server
from tests.io.stores.qdrant_server import qdrant_server
from tests.io.stores.vectors import numbered, vectors
from tests.runners import IS_REFERENCE
from tests.streams import early_and_late_panes, run_stream, stream_of

pytestmark = pytest.mark.thorough


class Place(NamedTuple):
    where: str
    collection: str | None


@contextmanager
def _folder(folder: Path) -> Iterator[Place]:
    yield Place(str(folder / "store"), "things")


@contextmanager
def _lance(folder: Path) -> Iterator[Place]:
    yield Place(str(folder / "things.lance"), None)


@contextmanager
def _server(folder: Path) -> Iterator[Place]:
    with qdrant_server() as server:
        yield Place(server.url, "things")


@contextmanager
def _postgres(folder: Path) -> Iterator[Place]:
    with postgres_database(_running_postgres()) as address:
        yield Place(address, "things")


@cache
def _running_postgres() -> str:
    """Start one server for all tests of this process; the process stops it when it ends."""
    server = postgres_server()
    atexit.register(server.__exit__, None, None, None)
    return server.__enter__()


PLACES: dict[str, Callable[[Path], Any]] = {
    "qdrant folder": _folder,
    "qdrant server": _server,
    "lance": _lance,
    "postgres": _postgres,
}


@pytest.fixture(params=PLACES)
def place(request: pytest.FixtureRequest, tmp_path: Path) -> Iterator[Place]:
    with PLACES[request.param](tmp_path) as found:
        yield found


def write(place: Place, *batches: pa.RecordBatch, **settings: Any) -> None:
    with beam.Pipeline("FnApiRunner") as pipeline:
        rows = pipeline | beam.Create(batches, reshuffle=False)
        _ = rows | WriteVectors(*place, **{"vectors": {"v": "vector"}, "timeout": 20, **settings})


def found(place: Place) -> dict[str, dict[str, Any]]:
    """Return the payloads of all points, by id."""
    store = open_store(address_of(*place))
    if store.vectors() is None:
        return {}
    return {str(hit.id): dict(hit.payload) for hit in store.sample(10_000)}


def nearest(place: Place, *vector: float, limit: int = 3, **settings: Any) -> list[tuple[Any, float]]:
    """Return the ids and scores of the nearest points."""
    query = Query(settings.get("using", "v"), limit, ["n"], settings.get("threshold"), settings.get("equal", {}))
    [hits] = open_store(address_of(*place)).search([vector], query)
    return [(hit.payload["n"], hit.score) for hit in hits]


def rows(*n: int, **columns: Any) -> pa.RecordBatch:
    """Return rows with the vectors of three directions, in turn."""
    ways = [[1.0, 0.0], [0.6, 0.8], [0.0, 2.0]]
    return pa.record_batch({"id": n, "n": n, "vector": vectors([ways[each % 3] for each in n]), **columns})


def test_every_kind_of_store_is_tested() -> None:
    addresses = ["http://localhost:6333", "store", "x.lance", "postgresql://localhost/db"]
    assert {kind_of(each) for each in addresses} == set(STORES)
    assert len(addresses) == len(PLACES)


def test_points_replace_themselves_and_tombstones_delete(place: Place) -> None:
    write(place, rows(0, 1, 2, _deleted=[False] * 3), rows(3, 4, _deleted=[False] * 2))
    assert found(place) == {str(n): {"n": n} | _own_id(place, n) for n in range(5)}
    write(place, rows(1, 2, 2, 9, _deleted=[None, False, True, True]), payload=["n"])
    assert sorted(found(place)) == ["0", "1", "3", "4"]


def _own_id(place: Place, value: Any) -> dict[str, Any]:
    """Return what the payload has of an id that points can hold: a row of Lance has it as a column."""
    return {"id": value} if place.collection is None else {}


@pytest.mark.parametrize("distance", ["cosine", "dot", "euclid"])
def test_the_nearest_come_first_with_the_scores_of_the_distance(place: Place, distance: Any) -> None:
    write(place, rows(0, 1, 2), distance=distance)
    assert open_store(address_of(*place)).vectors() == {"v": (2, distance)}
    expected = {
        "cosine": [(0, 1.0), (1, 0.6), (2, 0.0)],
        "dot": [(0, 2.0), (1, 1.2), (2, 0.0)],
        "euclid": [(0, 1.0), (1, 2.6**0.5), (2, 8**0.5)],
    }[distance]
    hits = nearest(place, 2.0, 0.0)
    assert [n for n, _ in hits] == [n for n, _ in expected]
    assert [score for _, score in hits] == pytest.approx([score for _, score in expected], abs=1e-5)
    near = nearest(place, 2.0, 0.0, threshold=1.3 if distance == "euclid" else 0.5)
    assert [n for n, _ in near] == ([0] if distance == "euclid" else [0, 1])


def test_filters(place: Place) -> None:
    write(place, rows(0, 1, 2, 3, kind=["a", "b", "it's", None], stars=[1.5, 2.5, 3.5, 4.5]))
    for equal, expected in [
        ({"kind": "b"}, [1]),
        ({"kind": ["a", "it's"]}, [0, 2]),
        ({"n": [1, 3]}, [3, 1]),
        ({"n": 2}, [2]),
        ({"stars": {"gt": 1.5, "lte": 3.5}}, [1, 2]),
        ({"kind": "a", "n": {"gte": 1}}, []),
        ({"other": "a"}, []),
    ]:
        assert [n for n, _ in nearest(place, 1.0, 0.0, equal=equal)] == expected, equal


def test_payloads_are_json_and_ids_of_any_kind(place: Place) -> None:
    at = pa.array([datetime(2026, 3, 1, 12, tzinfo=timezone.utc)] * 2, pa.timestamp("us", "UTC"))
    ids = ["0fd9d9a2-0b1e-4a6f-9c87-0a2f5f0d3e11", "review 7"]
    for _ in range(2):
        write(place, rows(0, 1, id=ids, at=at, tags=[["x"], []], ratio=[0.5, float("nan")]))
    points = found(place)
    assert len(points) == 2
    assert points[ids[0]] == {"n": 0, "at": "2026-03-01T12:00:00+00:00", "tags": ["x"], "ratio": 0.5} | _own_id(
        place, ids[0]
    )
    [other] = [payload for identity, payload in points.items() if identity != ids[0]]
    assert (other["id"], other["ratio"]) == ("review 7", None)


def test_several_vectors_and_a_null_among_them(place: Place) -> None:
    table = rows(0, 1, other=vectors([[1, 2, 3], None]))
    write(place, table, vectors={"v": "vector", "w": "other"})
    assert open_store(address_of(*place)).vectors() == {"v": (2, "cosine"), "w": (3, "cosine")}
    assert [n for n, _ in nearest(place, 3.0, 2.0, 1.0, using="w")] == [0]
    assert len(nearest(place, 1.0, 0.0)) == 2


def test_a_store_is_replaced_as_a_whole_or_refused(place: Place) -> None:
    write(place, rows(0, 1, 2), if_exists="fail")
    write(place, rows(7, 8), if_exists="replace")
    assert sorted(found(place)) == ["7", "8"]
    with pytest.raises(Exception, match="exists already; pass if_exists='append'"):
        write(place, rows(0), if_exists="fail")
    with pytest.raises(Exception, match=r"found no rows, expected some to replace .* stays as it was"):
        write(place, if_exists="replace")
    write(place)
    assert sorted(found(place)) == ["7", "8"]
    write(place, if_exists="replace", allow_empty=True)
    assert found(place) == {}


@pytest.mark.parametrize(
    ("bad", "message"),
    [
        (rows(8, 9, vector=vectors([[1, 2], [3, float("nan")]])), r"the vector 'v' of row 1 \(id 9\) has a number"),
        (rows(8, vector=[[1.0]]), "'v' has (1 numbers in one batch and 2|2 numbers in one batch and 1) in another"),
        (rows(8, id=[None]), "has no id|is of type null"),
    ],
)
def test_a_bad_row_leaves_the_store_as_it_was(place: Place, bad: pa.RecordBatch, message: str) -> None:
    write(place, rows(0))
    with pytest.raises(Exception, match=message):
        write(place, rows(1, 2), bad)
    assert sorted(found(place)) == ["0"]


def test_other_vectors_than_those_of_the_store_are_refused(place: Place) -> None:
    write(place, rows(0))
    for settings, message in [
        ({"distance": "dot"}, "of 2 numbers with cosine distance, expected 2 numbers with dot distance"),
        ({"vectors": {"w": "vector"}}, "has no vector 'w', it has 'v'"),
    ]:
        with pytest.raises(Exception, match=message):
            write(place, rows(1), **settings)
    assert sorted(found(place)) == ["0"]


def test_what_does_not_exist(place: Place) -> None:
    with pytest.raises(Exception, match="does not exist, and create=False"):
        write(place, rows(0), create=False)
    store = open_store(address_of(*place))
    assert store.vectors() is None
    with pytest.raises(StoreError, match="does not exist"):
        search(place, pa.record_batch({"q": vectors([[1, 0]])}))
    tombstone = pa.record_batch({"id": [1], "vector": pa.array([None], pa.list_(pa.float32())), "_deleted": [True]})
    write(place, tombstone)
    assert store.vectors() is None


def search(place: Place, table: pa.RecordBatch, **settings: Any) -> None:
    transform = SearchVectors(*place, vector_column="q", with_payload=["n"], limit=2, **settings)
    with beam.Pipeline("FnApiRunner") as pipeline:
        answers = pipeline | beam.Create([table]) | transform | beam.FlatMap(_payloads)
        assert_that(answers, equal_to([["0", "1"], None]))


def _payloads(batch: pa.RecordBatch) -> list[Any]:
    return [hits and [hit["n"] for hit in hits] for hits in batch["neighbours"].to_pylist()]


def test_a_column_of_neighbours_is_added(place: Place) -> None:
    write(place, rows(0, 1, 2))
    search(place, pa.record_batch({"q": vectors([[1, 0.1], None])}))


def test_records_name_the_store(place: Place) -> None:
    for transform, key in (
        (WriteVectors(*place, vectors="vector"), WRITES),
        (SearchVectors(*place, vector_column="q"), READS),
    ):
        [described] = json.loads(transform.annotations()[key])
        assert described["path"] == place.where
        assert described["kind"] == kind_of(place.where).kind


@pytest.mark.skipif(IS_REFERENCE, reason="it has no streams")
def test_a_point_of_a_stream_never_replaces_that_of_a_later_window(place: Place) -> None:
    def at(time: int, *ids: int, deleted: bool = False) -> list[tuple[pa.RecordBatch, int]]:
        return [(rows(*ids, at=[time] * len(ids), _deleted=[deleted] * len(ids)), time)]

    def build(pipeline: beam.Pipeline) -> None:
        events = (
            at(11, 1, 2),  # an early pane of the second window
            [*at(5, 1, 3), *at(4, 7)],
            12,
            at(6, 2, 3, 4),  # a late pane of the first
            at(6, 1, 7, deleted=True),
            100,
            at(101, 6),
        )
        table = pipeline | stream_of(*events, element_type=pa.RecordBatch)
        _ = table | early_and_late_panes() | WriteVectors(*place, vectors={"v": "vector"})

    run_stream(build)
    assert {id: payload["at"] for id, payload in found(place).items()} == {"1": 11, "2": 11, "3": 6, "4": 6, "6": 101}


def test_a_stream_does_not_replace_a_store(place: Place) -> None:
    table = beam.Pipeline() | stream_of(element_type=pa.RecordBatch) | beam.WindowInto(FixedWindows(10))
    with pytest.raises(StoreError, match="found unbounded input and if_exists='replace'"):
        _ = table | WriteVectors(*place, vectors="vector", if_exists="replace")


def test_many_rows_are_there_once(place: Place) -> None:
    write(place, numbered(0, 700), numbered(700, 300), batch_size=100)
    assert len(found(place)) == open_store(address_of(*place)).count() == 1_000


class _Embedder(WordCounts):
    """An embedder without weights, in the place of a model."""

    output_type = pa.list_(pa.float32(), SIZE)


def test_the_commands_fill_it_and_ask_it(
    place: Place, tmp_path: Path, monkeypatch: pytest.MonkeyPatch, capsys: pytest.CaptureFixture[str]
) -> None:
    monkeypatch.setattr("luminosity.inference.model_names._kind_of_handler", lambda kind: lambda model: _Embedder())
    (tmp_path / "in.jsonl").write_text("".join(json.dumps({"id": n, **row}) + "\n" for n, row in enumerate(REVIEWS)))
    collection = [] if place.collection is None else ["--collection", place.collection]
    stored = ["--vector-store", place.where, *collection, "--run_dir=off", "--progress=off", "--debug"]
    assert main(["enrich", f"{tmp_path}/in.jsonl", f"{tmp_path}/out.jsonl", "--embed=text=words", *stored]) == 0
    assert "5 rows" in capsys.readouterr().out
    models = ["--embed", "tests.answering.scripted:WordCounts", "--model", "tests.answering.scripted:CitesAll"]
    assert main(["ask", place.where, "Is the kettle loud?", *collection, *models, "-k", "1", "--columns=rating"]) == 0
    assert "(id 0, rating: 2)" in capsys.readouterr().out
