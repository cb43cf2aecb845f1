"""Tests of WriteQdrant with a server that fails in several ways."""

from __future__ import annotations

import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest

from luminosity import WriteQdrant
from luminosity.errors import StoreError
from luminosity.io.stores import qdrant_server as server_module
from luminosity.io.stores.connect import open_collection
from luminosity.io.stores.qdrant_collection import CollectionAddress
from luminosity.testing import FakeClock
from tests.both_runners import Pipelines, counters
from tests.io.stores.qdrant_server import StandIn, fails, qdrant_server
from tests.io.stores.vectors import numbered, vectors

KEY = "a-key-that-nobody-may-see"


@pytest.fixture
def server() -> Iterator[StandIn]:
    with qdrant_server() as running:
        yield running


def write(server: StandIn, *batches: pa.RecordBatch, **settings: Any) -> dict[Any, Any]:
    with beam.Pipeline("FnApiRunner") as pipeline:
        _ = (
            pipeline
            | beam.Create(batches, reshuffle=False)
            | WriteQdrant(server.url, "things", **{"vectors": "vector", "timeout": 20, **settings})
        )
    return server.points("things")


def test_a_server_that_answers_500_then_recovers(pipelines: Pipelines, server: StandIn) -> None:
    """Responses may be lost after the server did its work: points that are sent again are stored once."""
    server.script = fails(3, 500, "Service internal error: out of breath")
    server.after = fails(2, 502, "bad gateway", "PUT /collections/things/points")
    with pipelines() as (pipeline, run):
        _ = (
            pipeline
            | beam.Create(range(0, 500, 50))
            | beam.Map(numbered, 50).with_output_types(pa.RecordBatch)
            | WriteQdrant(server.url, "things", vectors={"v": "vector"}, batch_size=100, distance="dot", timeout=30)
        )

    points = server.points("things")
    assert sorted(points) == list(range(500))
    assert points[321].payload == {"text": "text 321"}
    assert points[321].vector["v"] == pytest.approx(numbered(321, 1).column("vector")[0].as_py())
    assert counters(run.result)["points_upserted"] == 500
    assert counters(run.result)["retries"] == 5


@pytest.fixture
def _waits_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only waiting move the clock, so that the speed of the machine does not matter."""
    clock = FakeClock()
    monkeypatch.setattr(server_module, "time", clock)
    monkeypatch.setattr(server_module, "retry", partial(server_module.retry, sleep=clock.sleep))


@pytest.mark.usefixtures("_waits_take_no_time")
def test_a_server_that_never_recovers(server: StandIn) -> None:
    server.script = fails(10_000, 503, "Service unavailable: try later")
    message = (
        rf"the collection 'things' at {server.url}: the server responded 503 Service unavailable: try later; "
        r"gave up after \d attempts in 20 s"
    )
    with pytest.raises(Exception, match=message):
        write(server, numbered(0, 1))
    assert 7 <= len(server.requests) <= 9


@pytest.mark.usefixtures("_waits_take_no_time")
def test_nobody_listens() -> None:
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    retries: list[int] = []
    collection = open_collection(CollectionAddress.of(url, "things", timeout=20), lambda: retries.append(1))
    with pytest.raises(StoreError, match=rf"'things' at {url} can't be reached: .*refused; gave up after \d attempts"):
        collection.count()
    assert 6 <= len(retries) <= 8


def test_whether_a_server_responds_can_be_checked_before_a_run(server: StandIn) -> None:
    WriteQdrant(server.url, "things", vectors="vector").check_reachable()
    with socket.create_server(("127.0.0.1", 0)) as unused:
        url = f"http://127.0.0.1:{unused.getsockname()[1]}"
    with pytest.raises(StoreError, match=rf"no server responds at {url} .*; check that the server runs"):
        WriteQdrant(url, "things", vectors="vector").check_reachable()


def test_a_request_that_the_server_does_not_want_is_sent_once(server: StandIn) -> None:
    server.script = fails(10_000, 400, "Wrong input: no room for you", "PUT /collections/things/points")
    with pytest.raises(Exception, match="the server responded 400 Wrong input: no room for you"):
        write(server, numbered(0, 1))
    assert server.requests.count("PUT /collections/things/points") == 1


def test_the_key_is_sent_and_never_seen(server: StandIn, monkeypatch: pytest.MonkeyPatch) -> None:
    server.key = KEY
    monkeypatch.setenv("THE_KEY", KEY)
    assert len(write(server, numbered(0, 3), api_key_env="THE_KEY")) == 3
    assert len(write(server, numbered(3, 3), api_key=lambda: KEY)) == 6

    server.key = "another"
    with pytest.raises(Exception, match=r"the server responded 401 Must provide an API key, found \*\*\*") as raised:
        write(server, numbered(0, 1), api_key_env="THE_KEY")
    assert KEY not in str(raised.value)
    monkeypatch.delenv("THE_KEY")
    with pytest.raises(Exception, match="the environment variable THE_KEY, which api_key_env names, is not set"):
        write(server, numbered(0, 1), api_key_env="THE_KEY")


def test_what_is_there_is_checked(server: StandIn) -> None:
    write(server, numbered(0, 3))
    with pytest.raises(Exception, match="has a vector without a name of 4 numbers with cosine distance, expected 5"):
        write(server, numbered(0, 3, size=5))
    with pytest.raises(Exception, match="does not exist, and create=False"), beam.Pipeline("FnApiRunner") as pipeline:
        _ = pipeline | beam.Create([numbered(0, 1)]) | WriteQdrant(server.url, "none", vectors="vector", create=False)


def test_another_worker_may_create_it_first(server: StandIn) -> None:
    """Two workers find no collection; the slower one learns that it exists."""

    def script(method: str, path: str) -> tuple[int, str] | None:
        if (method, path) == ("PUT", "/collections/things"):
            from qdrant_client import models

            params = models.VectorParams(size=4, distance=models.Distance.COSINE)
            server.store.create_collection("things", params)
        return None

    server.script = script
    assert len(write(server, numbered(0, 3))) == 3


def test_tombstones_delete(server: StandIn) -> None:
    rows = pa.record_batch(
        {
            "id": [1, 77, 2],
            "vector": vectors([None, None, [1, 0, 0, 0]]),
            "_deleted": [True, True, None],
        }
    )
    with beam.Pipeline("FnApiRunner") as pipeline:
        _ = pipeline | beam.Create([rows.slice(0, 2)]) | WriteQdrant(server.url, "things", vectors="vector")
    assert not server.store.collection_exists("things")

    write(server, numbered(0, 4))
    points = write(server, rows)
    assert sorted(points) == [0, 2, 3]
    assert points[2].payload == {}
