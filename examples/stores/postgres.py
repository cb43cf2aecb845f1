"""Write a table to Postgres with pgvector, and search by vector::

    pip install 'psycopg[binary]'
    python examples/stores/postgres.py --dsn=postgresql://localhost/postgres --search

Beam's own ``PostgresVectorWriterConfig`` writes through JDBC, which needs Java. This does the same with a small DoFn.
It is plain Beam and runs on any runner. Options that ``--help`` does not list go to Beam.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence
from typing import Any

import apache_beam as beam
import psycopg
from apache_beam.options.pipeline_options import PipelineOptions
from colours import colours

from luminosity import RowsFromTable

_CREATE = """
CREATE EXTENSION IF NOT EXISTS vector;
CREATE TABLE IF NOT EXISTS colours (id bigint PRIMARY KEY, name text, embedding vector(3));
"""
_UPSERT = """
INSERT INTO colours (id, name, embedding) VALUES (%(id)s, %(name)s, %(embedding)s)
ON CONFLICT (id) DO UPDATE SET name = EXCLUDED.name, embedding = EXCLUDED.embedding
"""
_NEAREST = "SELECT name FROM colours ORDER BY embedding <-> %s LIMIT 3"

Row = dict[str, Any]


class Upsert(beam.DoFn):
    """Writes a batch of rows as one transaction. A repeated upsert changes nothing, so bundles may be retried."""

    def __init__(self, dsn: str) -> None:
        self._dsn = dsn

    def setup(self) -> None:
        self._connection = psycopg.connect(self._dsn, connect_timeout=30)

    def process(self, rows: list[Row]) -> Sequence[int]:
        with self._connection.transaction(), self._connection.cursor() as cursor:
            cursor.executemany(_UPSERT, [row | {"embedding": str(row["embedding"])} for row in rows])
        return [len(rows)]

    def teardown(self) -> None:
        self._connection.close()


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dsn", required=True, help="address of the database; set the password in PGPASSWORD")
    parser.add_argument("--search", action="store_true", help="also search for a colour")
    known, others = parser.parse_known_args(argv)
    with psycopg.connect(known.dsn) as connection:
        connection.execute(_CREATE)

    with beam.Pipeline(options=PipelineOptions(others)) as pipeline:
        table = pipeline | beam.Create([colours()])
        rows = table | RowsFromTable()
        _ = rows | beam.BatchElements(min_batch_size=100, max_batch_size=1_000) | beam.ParDo(Upsert(known.dsn))

    with psycopg.connect(known.dsn) as connection:
        (count,) = connection.execute("SELECT count(*) FROM colours").fetchone() or (0,)
        print(f"{count} colours")
        if known.search:
            names = [name for (name,) in connection.execute(_NEAREST, ["[1, 0.4, 0.1]"])]
            print("like an evening sky:", ", ".join(names))


if __name__ == "__main__":
    main()
