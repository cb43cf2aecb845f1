"""Tests of the Postgres example with pgvector, against a real server."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path

import psycopg
import pytest

from tests.io.stores.postgres_server import postgres_database, postgres_server

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
