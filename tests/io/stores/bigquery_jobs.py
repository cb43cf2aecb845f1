"""Write to a fake BigQuery and read from it in several ways, and print what came of each as JSON.

A script of its own: Beam's sink and sources need packages that other tests do without, because they slow every start of
Beam.
"""

from __future__ import annotations

import datetime
import json
import sys
import tempfile
from decimal import Decimal
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.io.gcp.bigquery_tools import RetryStrategy
from apache_beam.testing.util import assert_that, equal_to
from bigquery_reads import IN_PROCESS, READS, TWO_WORKERS, files_of, pipeline

from luminosity import RowsFromTable, bigquery_schema
from luminosity.testing import FakeBigQuery

TABLE = "project:dataset.reviews"
OLD = [{"id": 99, "text": "old"}]
COLUMNS = [{"name": "id", "type": "INTEGER"}, {"name": "text", "type": "STRING"}]

BATCH = pa.record_batch(
    {
        "id": [1, 2, 3],
        "text": ["fine", "häßlich", None],
        "meaning": pa.array([[1.0, 0.5], [0.25, 0.0], []], pa.list_(pa.float32())),
        "at": pa.array(
            [datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.timezone.utc)] * 3, pa.timestamp("us", "UTC")
        ),
        "day": [datetime.date(2026, 1, 2)] * 3,
        "price": pa.array([Decimal("1.50"), None, Decimal("-7.25")], pa.decimal128(10, 2)),
        "author": [{"name": "Ada", "likes": 3}, None, {"name": None, "likes": 0}],
    }
)


def write(folder: str, table: Any, **settings: Any) -> beam.PTransform:
    return beam.io.WriteToBigQuery(table, custom_gcs_temp_location=folder, validate=False, **settings)


def load_a_table(bigquery: FakeBigQuery, folder: str) -> dict[str, Any]:
    """All columns that a table may have, from two workers, in place of what the table had."""
    bigquery.create_table(TABLE, COLUMNS, OLD)
    schema = bigquery_schema(BATCH.schema)
    with pipeline(*TWO_WORKERS) as p:
        batches = p | beam.Create([BATCH.slice(0, 1), BATCH.slice(1, 1), BATCH.slice(2, 1)]) | beam.Reshuffle()
        _ = batches | RowsFromTable() | write(folder, TABLE, schema=schema, write_disposition="WRITE_TRUNCATE")
    found = sorted(bigquery.rows(TABLE), key=lambda row: row["id"])
    lines = [json.loads(line) for path in files_of(folder) for line in Path(path).read_text().splitlines()]
    return {
        "is_equal": found == BATCH.to_pylist(),
        "schema": schema,
        "files": files_of(folder),
        "ids_in_files": sorted(line["id"] for line in lines),
    }


def load_by_language(bigquery: FakeBigQuery, folder: str) -> dict[str, Any]:
    """A table for each language, from Avro files: temporary tables, which are copied and deleted."""
    rows = [{"id": number, "text": "de" if number % 2 else "fr"} for number in range(10)]
    bigquery.create_table("project:dataset.de", COLUMNS, OLD)
    with pipeline(*IN_PROCESS) as p:
        _ = (
            p
            | beam.Create(rows)
            | write(
                folder,
                lambda row: f"project:dataset.{row['text']}",
                schema={"fields": COLUMNS},
                temp_file_format="AVRO",
                test_client=bigquery.client,
            )
        )
    ids = {name: sorted(row["id"] for row in bigquery.rows(f"dataset.{name}")) for name in ("de", "fr")}
    return {"ids": ids, "tables": bigquery.tables}


def load_a_bad_row(bigquery: FakeBigQuery, folder: str) -> dict[str, Any]:
    bigquery.create_table(TABLE, COLUMNS, OLD)
    error = ""
    try:
        with pipeline(*IN_PROCESS) as p:
            rows = p | beam.Create([{"id": 1, "text": "fine"}, {"id": "seven", "text": "bad"}])
            _ = rows | write(folder, TABLE, schema={"fields": COLUMNS})
    except Exception as found:
        error = f"{type(found).__name__}: {found}"
    lines = [json.loads(line) for path in files_of(folder) for line in Path(path).read_text().splitlines()]
    return {"error": error, "rows": bigquery.rows(TABLE), "ids_in_files": [line["id"] for line in lines]}


def insert_rows(bigquery: FakeBigQuery, folder: str) -> dict[str, Any]:
    with pipeline(*IN_PROCESS) as p:
        rows = p | beam.Create([{"id": 1, "text": "fine"}, {"id": "seven", "text": "bad"}, {"id": 3, "text": "good"}])
        written = rows | write(
            folder,
            TABLE,
            schema={"fields": COLUMNS},
            method="STREAMING_INSERTS",
            insert_retry_strategy=RetryStrategy.RETRY_ON_TRANSIENT_ERROR,
        )
        refused = written.failed_rows_with_errors | beam.MapTuple(
            lambda _, row, errors: (row["id"], errors[0]["location"])
        )
        assert_that(refused, equal_to([("seven", "id")]))
    return {"ids": sorted(row["id"] for row in bigquery.rows(TABLE))}


def use_the_storage_api(bigquery: FakeBigQuery, folder: str) -> dict[str, Any]:
    try:
        _ = (
            pipeline()
            | beam.Create(OLD)
            | beam.io.WriteToBigQuery(TABLE, schema={"fields": COLUMNS}, method="STORAGE_WRITE_API")
        )
    except Exception as found:
        return {"error": f"{type(found).__name__}: {found}"}
    return {"error": ""}


def main() -> None:
    found: dict[str, Any] = {}
    for case in (load_a_table, load_by_language, load_a_bad_row, insert_rows, use_the_storage_api, *READS):
        with FakeBigQuery(rows_per_file=3) as bigquery, tempfile.TemporaryDirectory() as folder:
            found[case.__name__] = {**case(bigquery, folder), "jobs": bigquery.jobs}
    json.dump(found, sys.stdout)


if __name__ == "__main__":
    main()
