"""Tests of WriteQdrant with a server that fails in several ways."""

from __future__ import annotations

import re
import socket
from collections.abc import Iterator
from functools import partial
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from qdrant_client import models

from luminosity import WriteQdrant
from luminosity.errors import StoreError
from luminosity.io.run_owner import RunOwner
from luminosity.io.stores import address
from luminosity.io.stores import qdrant_server as server_module
from luminosity.io.stores.address import StoreAddress
from luminosity.io.stores.kinds import open_store
from luminosity.io.stores.qdrant_server import ServerCollection
from luminosity.io.stores.store import WriteMode
from luminosity.testing import FakeClock
from tests.both_runners import Pipelines, counters
from tests.io.stores.qdrant_server import StandIn, fails, qdrant_server
from tests.io.stores.vectors import numbered, vectors
from tests.processes import waiting_process

pytestmark = pytest.mark.thorough

POINTS = "PUT /collections/things[^/]*/points"
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
    server.after = fails(2, 502, "bad gateway", POINTS)
    with pipelines() as (pipeline, run):
        _ = (
            pipeline
            | beam.Create(range(0, 500, 50))
            | beam.Map(numbered, 50).with_output_types(pa.RecordBatch)
            | WriteQdrant(server.url, "things", vectors={"v": "vector"}, batch_size=100, distance="dot", timeout=120)
        )

    points = server.points("things")
    assert sorted(points) == list(range(500))
    assert points[321].payload == {"text": "text 321"}
    assert points[321].vector["v"] == pytest.approx(numbered(321, 1).column("vector")[0].as_py())
    assert counters(run.result)["points_upserted"] == 500
    assert counters(run.result)["retries"] == 5


def make(server: StandIn, name: str) -> None:
    """Create a collection as a user would, without an alias."""
    server.store.create_collection(name, models.VectorParams(size=4, distance=models.Distance.COSINE))


@pytest.fixture
def _waits_take_no_time(monkeypatch: pytest.MonkeyPatch) -> None:
    """Let only waiting move the clock, so that the speed of the machine does not matter."""
    clock = FakeClock()
    monkeypatch.setattr(address, "time", clock)
    monkeypatch.setattr(server_module, "retry", partial(address.retry, sleep=clock.sleep))


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


@pytest.fixture
def refusing() -> Iterator[str]:
    """The address of a port that is taken, so that no other process gets it, but at which nothing listens."""
    with socket.socket() as taken:
        taken.bind(("127.0.0.1", 0))
        yield f"http://127.0.0.1:{taken.getsockname()[1]}"


@pytest.mark.usefixtures("_waits_take_no_time")
def test_nobody_listens(refusing: str) -> None:
    retries: list[int] = []
    collection = open_store(StoreAddress(refusing, "things", timeout=20), lambda: retries.append(1))
    with pytest.raises(
        StoreError, match=rf"'things' at {refusing} can't be reached: .*refused; gave up after \d attempts"
    ):
        collection.count()
    assert 6 <= len(retries) <= 8


def test_whether_a_server_responds_can_be_checked_before_a_run(server: StandIn, refusing: str) -> None:
    WriteQdrant(server.url, "things", vectors="vector").check_reachable()
    with pytest.raises(StoreError, match=rf"no server responds at {refusing} .*; check that the server runs"):
        WriteQdrant(refusing, "things", vectors="vector").check_reachable()


def test_a_request_that_the_server_does_not_want_is_sent_once(server: StandIn) -> None:
    server.script = fails(10_000, 400, "Wrong input: no room for you", POINTS)
    with pytest.raises(Exception, match="the server responded 400 Wrong input: no room for you"):
        write(server, numbered(0, 1))
    assert [bool(re.match(POINTS, request)) for request in server.requests].count(True) == 1
    assert not server.store.collection_exists("things")


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
    """A worker that repeats the work of another learns that the collection exists."""
    created: list[str] = []

    def script(method: str, path: str) -> tuple[int, str] | None:
        if method == "PUT" and re.fullmatch("/collections/things--[^/]*", path):
            make(server, path.rpartition("/")[2])
            created.append(path)
        return None

    server.script = script
    assert len(write(server, numbered(0, 3))) == 3
    assert len(created) == 1


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


# ---- all points or none


def bad(batch: pa.RecordBatch) -> pa.RecordBatch:
    if batch.num_rows == 1:
        raise ValueError("a row that fails")
    return batch


def collections(server: StandIn) -> list[str]:
    return sorted(found.name for found in server.store.get_collections().collections)


@pytest.mark.parametrize("is_there", [True, False])
def test_a_run_that_fails_writes_no_point(server: StandIn, is_there: bool) -> None:
    if is_there:
        make(server, "things")
    pipeline = beam.Pipeline("FnApiRunner")
    rows = pipeline | beam.Create([numbered(0, 128), numbered(128, 1)]) | beam.Map(bad)
    _ = rows | WriteQdrant(server.url, "things", vectors="vector", batch_size=10)
    with pytest.raises(Exception, match="a row that fails"):
        pipeline.run()
    assert collections(server) == (["things"] if is_there else [])
    assert not is_there or server.points("things") == {}


def test_readers_see_the_old_points_until_all_new_ones_are_there(server: StandIn) -> None:
    write(server, numbered(0, 5))
    seen: list[set[int]] = []

    def script(method: str, path: str) -> None:
        if re.match(POINTS, f"{method} {path}") or path == "/collections/aliases":
            seen.append(set(server.points("things")))

    server.script = script
    points = write(server, numbered(100, 30), if_exists="replace", batch_size=10)
    assert sorted(points) == list(range(100, 130))
    assert seen == [set(range(5))] * 4
    assert len(collections(server)) == 1  # The old one is gone.
    assert len(write(server, numbered(200, 3))) == 33  # Points are added to it by its alias.


def test_a_store_that_fails_half_way_shows_no_point(server: StandIn) -> None:
    write(server, numbered(0, 5))
    [old] = collections(server)
    put = 0

    def script(method: str, path: str) -> tuple[int, str] | None:
        nonlocal put
        put += bool(re.match(POINTS, f"{method} {path}"))
        return (400, "no room") if put == 2 else None

    server.script = script
    with pytest.raises(Exception, match="no room"):
        write(server, numbered(100, 30), if_exists="replace", batch_size=10)
    assert sorted(server.points("things")) == list(range(5))
    [left] = set(collections(server)) - {old}  # It is removed by the next run.
    server.script = lambda method, path: None
    assert len(write(server, numbered(100, 3), if_exists="replace")) == 3
    assert not {old, left} & set(collections(server))


def test_a_collection_that_is_no_alias_is_not_replaced(server: StandIn) -> None:
    make(server, "things")
    with pytest.raises(Exception, match=r"can't be replaced at once: it is no alias.*; delete it before"):
        write(server, numbered(0, 3), if_exists="replace")
    assert server.points("things") == {}
    assert not any(re.match(POINTS, request) for request in server.requests)


def test_a_users_collection_behind_an_alias_stays(server: StandIn) -> None:
    make(server, "mine")
    pointed = models.CreateAlias(collection_name="mine", alias_name="things")
    server.store.update_collection_aliases([models.CreateAliasOperation(create_alias=pointed)])
    assert len(write(server, numbered(0, 3), if_exists="replace")) == 3
    assert "mine" in collections(server)


def test_a_table_without_rows(server: StandIn) -> None:
    write(server, numbered(0, 5))
    assert len(write(server, numbered(0, 0))) == 5
    with pytest.raises(
        Exception, match=r"found no rows, expected some to replace .* stays as it was; .*allow_empty=True"
    ):
        write(server, if_exists="replace")
    assert len(server.points("things")) == 5
    assert write(server, if_exists="replace", allow_empty=True) == {}


def begin(server: StandIn, **settings: Any) -> str:
    mode = WriteMode("cosine", **settings)
    return ServerCollection(StoreAddress(server.url, "things", timeout=20)).begin(mode, str(RunOwner.current()))


def test_what_killed_runs_left_is_removed(server: StandIn) -> None:
    here = RunOwner.current()
    ended = RunOwner(here.machine, here.pid, here.started - 1)  # Its id was given to this process since.
    elsewhere = RunOwner("abcdef", 1, 1)
    for name in ("things--mine", "other--x", f"things--{ended}-65000000-aa", f"things--{elsewhere}-65000000-bb"):
        make(server, name)
    make(server, fresh := f"things--{elsewhere}-{2**31:x}-cc")
    staged = begin(server)
    assert collections(server) == sorted(["other--x", "things--mine", fresh])
    assert RunOwner.in_name(staged) == here


def test_a_run_that_still_writes_is_named(server: StandIn) -> None:
    with waiting_process() as other:
        owner = RunOwner.of(other)
        make(server, f"things--{owner}-65000000-aa")
        with pytest.raises(StoreError, match=rf"'things' at .*: process {other} \(.*input.* is writing it right now"):
            begin(server)
    assert begin(server)
    assert collections(server) == []


@pytest.mark.parametrize(("if_exists", "message"), [("fail", "exists already"), ("replace", "is no alias")])
def test_what_can_not_be_written_is_refused_when_the_run_starts(server: StandIn, if_exists: Any, message: str) -> None:
    make(server, "things")
    with pytest.raises(StoreError, match=message):
        begin(server, if_exists=if_exists)
    assert begin(server) == ""
