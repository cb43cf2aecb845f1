"""Postgres with pgvector, a real server: what only this store does, and the example."""

from __future__ import annotations

import os
import signal
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import psycopg
import pyarrow as pa
import pytest

from luminosity import WriteVectors
from luminosity.errors import InvalidArgument, StoreError
from luminosity.io.run_owner import RunOwner
from luminosity.io.stores.address import StoreAddress
from luminosity.io.stores.points import Point, PointColumns, TableFacts
from luminosity.io.stores.postgres import PostgresStore
from luminosity.io.stores.store import Target, WriteMode
from tests.io.stores.postgres_server import computes_distances, postgres_database, postgres_server
from tests.io.stores.vectors import numbered

pytestmark = pytest.mark.thorough

EXAMPLE = Path(__file__).parents[3] / "examples" / "stores" / "postgres.py"


@pytest.fixture(scope="module")
def server() -> Iterator[str]:
    with postgres_server() as address:
        yield address


@pytest.fixture
def dsn(server: str) -> Iterator[str]:
    with postgres_database(server) as address:
        yield address


def test_rows_are_there_once_and_can_be_found(dsn: str) -> None:
    """The table is written twice, once on each runner."""
    for runner in (["--runner=FnApiRunner"], ["--runner=luminosity.LuminosityRunner", "--progress=off"]):
        done = subprocess.run(
            [sys.executable, EXAMPLE, f"--dsn={dsn}", "--search", *runner], capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("10 colours")
        assert "like an evening sky: tomato, orange, crimson" in done.stdout

    with psycopg.connect(dsn) as connection:
        rows = connection.execute("SELECT payload->>'name', vector::text FROM colours ORDER BY id::int").fetchall()
    assert len(rows) == 10
    assert rows[0] == ("black", "[0,0,0]")
    assert rows[-1] == ("white", "[1,1,1]")


def staged(dsn: str, mode: WriteMode, owner: RunOwner, *ids: int, deleted: int = 99) -> Target:
    """Write points for a run that has not published them yet."""
    store = PostgresStore(StoreAddress(dsn, "things"))
    target = store.prepare(store.begin(mode, str(owner)), TableFacts(2, 2, {"": 2}), PointColumns({"": "v"}), mode)
    own = PostgresStore(StoreAddress(dsn, "things", staged=target.staged))
    for _ in range(2):  # A bundle may be retried.
        own.write([Point(number, {"": [1.0, number]}, {"n": number}) for number in ids], [deleted])
    own.close()
    store.close()
    return target


def names(dsn: str) -> set[str]:
    with psycopg.connect(dsn) as connection:
        return {name for (name,) in connection.execute("SELECT relname FROM pg_class WHERE relkind = 'r'").fetchall()}


def test_rows_appear_together_once_and_killed_runs_leave_nothing(dsn: str) -> None:
    here = RunOwner.current()
    ended = RunOwner(here.machine, here.pid, here.started - 1)  # Its id was given to this process since.
    mode, store = WriteMode("cosine"), PostgresStore(StoreAddress(dsn, "things"))
    before = names(dsn)
    staged(dsn, mode, ended, 5, 6)
    assert store.vectors() is None
    for ids, deleted, expected in [((0, 1), 99, [0, 1]), ((1, 2), 0, [1, 2])]:
        target = staged(dsn, mode, here, *ids, deleted=deleted)
        for _ in range(2):  # The step may be repeated, also after the rows are there.
            store.publish(target, mode)
        assert sorted(hit.id for hit in store.sample(10)) == expected
        store.clean_up(target)
        assert names(dsn) - before == {"things"}
    with pytest.raises(StoreError, match=r"the table of this run, luminosity_.*, is gone"):
        store.publish(target, mode)
    store.close()


def test_the_index_is_for_large_tables(dsn: str, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr("luminosity.io.stores.postgres_tables._INDEX_ROWS", 2)
    if not computes_distances():
        pytest.skip("the package's pgvector builds no index on this processor")
    mode, store = WriteMode("cosine"), PostgresStore(StoreAddress(dsn, "things"))
    for ids in ((0,), (1, 2)):
        store.publish(staged(dsn, mode, RunOwner.current(), *ids), mode)
        with psycopg.connect(dsn) as connection:
            found = connection.execute("SELECT indexdef FROM pg_indexes WHERE tablename = 'things'").fetchall()
        assert sum("hnsw" in definition for (definition,) in found) == len(ids) - 1
    store.close()


@pytest.mark.parametrize("where", ["postgresql://me:word@host/db", "postgresql://host/db?password=word"])
def test_no_password_is_part_of_an_address(where: str) -> None:
    with pytest.raises(InvalidArgument, match="found a password in the address of host") as raised:
        WriteVectors(where, "things", vectors="v")
    assert "word" not in str(raised.value).replace("password", "")


def test_a_database_that_does_not_answer(tmp_path: Path) -> None:
    with pytest.raises(StoreError, match=r"can't be reached: .*; check the address, and that the server runs"):
        WriteVectors(f"postgresql://me@/db?host={tmp_path}", "things", vectors="v").check_reachable()


class _KillsAtStatements:
    """A key of the store, for which a worker asks before it connects. Then it dies once after each of ``statements``.

    The number of a statement says at which of its executions in a process, so that some writes are committed by then.
    """

    def __init__(self, folder: Path, **statements: int) -> None:
        self._folder = folder
        self._statements = statements
        self._test = os.getpid()

    def __call__(self) -> str:
        if psycopg.Cursor.execute.__module__ != __name__ and os.getpid() != self._test:
            for name in ("execute", "executemany"):
                setattr(psycopg.Cursor, name, self._dying(getattr(psycopg.Cursor, name)))
        return "any"

    def _dying(self, real: Callable[..., Any]) -> Callable[..., Any]:
        left = dict(self._statements)

        def execute(cursor: Any, query: Any, *values: Any, **options: Any) -> Any:
            found = real(cursor, query, *values, **options)
            text = query if isinstance(query, str | bytes) else query.as_string(cursor)
            for word in [each for each in left if each in str(text)]:
                left[word] -= 1
                if left[word] == 0 and not (self._folder / word).exists():
                    (self._folder / word).touch()
                    os.kill(os.getpid(), signal.SIGKILL)
            return found

        return execute


def test_rows_are_exact_though_workers_are_killed(dsn: str, tmp_path: Path) -> None:
    """They die in the middle of writes, in the transaction that publishes the rows, and when these are published."""
    before, deaths = names(dsn), {"VALUES": 3, "RENAME": 1, 'IF EXISTS "luminosity': 1}
    options = ["--runner=luminosity.LuminosityRunner", "--progress=off", "--run_dir=off", "--cpu_workers=2"]
    with beam.Pipeline(argv=options) as pipeline:
        batches = pipeline | beam.Create(range(0, 400, 20)) | beam.Map(numbered, 20).with_output_types(pa.RecordBatch)
        key = _KillsAtStatements(tmp_path, **deaths)
        _ = batches | WriteVectors(dsn, "things", vectors="vector", batch_size=10, api_key=key)

    assert set(os.listdir(tmp_path)) == set(deaths)
    with psycopg.connect(dsn) as connection:
        found = connection.execute("SELECT id::int, payload->>'text' FROM things ORDER BY 1").fetchall()
    assert found == [(number, f"text {number}") for number in range(400)]
    assert names(dsn) - before == {"things"}
