"""Write a table to Postgres with pgvector, and search by vector::

    pip install 'psycopg[binary]'
    python examples/stores/postgres.py --dsn=postgresql://localhost/postgres --search

Beam's own ``PostgresVectorWriterConfig`` writes through JDBC, which needs Java. This needs none, and runs on any
runner. Options that ``--help`` does not list go to Beam.
"""

from __future__ import annotations

import argparse
from collections.abc import Sequence

import apache_beam as beam
import psycopg
import pyarrow as pa
from apache_beam.options.pipeline_options import PipelineOptions
from colours import colours

from luminosity import SearchVectors, WriteVectors


def main(argv: Sequence[str] | None = None) -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--dsn", required=True, help="address of the database; set the password in PGPASSWORD")
    parser.add_argument("--search", action="store_true", help="also search for a colour")
    known, others = parser.parse_known_args(argv)

    with beam.Pipeline(options=PipelineOptions(others)) as pipeline:
        table = pipeline | beam.Create([colours()])
        _ = table | WriteVectors(known.dsn, "colours", vectors="embedding", distance="euclid")
    with psycopg.connect(known.dsn) as connection:
        (count,) = connection.execute("SELECT count(*) FROM colours").fetchone() or (0,)
    print(f"{count} colours")

    if known.search:
        sky = pa.record_batch({"sky": [[1.0, 0.4, 0.1]]})
        with beam.Pipeline(options=PipelineOptions(others)) as pipeline:
            nearest = SearchVectors(known.dsn, "colours", vector_column="sky", limit=3, with_payload=["name"])
            _ = pipeline | beam.Create([sky]) | nearest | beam.Map(_show)


def _show(batch: pa.RecordBatch) -> None:
    names = [colour["name"] for colour in batch["neighbours"][0].as_py()]
    print("like an evening sky:", ", ".join(names), flush=True)


if __name__ == "__main__":
    main()
