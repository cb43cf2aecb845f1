"""The reads of ``bigquery_jobs.py``: tables and queries, over export files and directly."""

from __future__ import annotations

import datetime
import os
import unittest.mock
import uuid
from decimal import Decimal
from pathlib import Path
from typing import Any

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.testing.util import assert_that, equal_to

from luminosity.testing import FakeBigQuery

IN_PROCESS = ["--debug"]
TWO_WORKERS = ["--cpu_workers=2"]
TABLE = "project:dataset.read"
COLUMNS: list[dict[str, Any]] = [
    {"name": "id", "type": "INTEGER", "mode": "REQUIRED"},
    *(
        {"name": kind.lower(), "type": kind}
        for kind in ("STRING", "BYTES", "FLOAT", "BOOLEAN", "NUMERIC", "BIGNUMERIC")
    ),
    *({"name": kind.lower(), "type": kind} for kind in ("TIMESTAMP", "DATE", "TIME", "DATETIME")),
    {"name": "words", "type": "STRING", "mode": "REPEATED"},
    {
        "name": "authors",
        "type": "RECORD",
        "mode": "REPEATED",
        "fields": [
            {"name": "name", "type": "STRING"},
            {"name": "born", "type": "RECORD", "fields": [{"name": "year", "type": "INTEGER"}]},
        ],
    },
]
FULL: dict[str, Any] = {
    "string": "häßlich",
    "bytes": b"\x00\xff",
    "float": 0.1,
    "boolean": True,
    "numeric": Decimal("-1.000000001"),
    "bignumeric": Decimal(f"7.{1:038}"),
    "timestamp": datetime.datetime(2026, 1, 2, 3, 4, 5, 6, datetime.timezone.utc),
    "date": datetime.date(2026, 1, 2),
    "time": datetime.time(3, 4, 5, 6),
    "datetime": datetime.datetime(2026, 1, 2, 3, 4, 5, 6),
    "words": ["a", "b"],
    "authors": [{"name": "Ada", "born": {"year": 1815}}, {"name": None, "born": None}],
}
EMPTY: dict[str, Any] = {**dict.fromkeys(FULL), "words": [], "authors": []}
QUERY = "SELECT id, text, price, raw FROM dataset.read"
RESULT_COLUMNS = [
    {"name": name, "type": kind}
    for name, kind in {"id": "INTEGER", "text": "STRING", "price": "NUMERIC", "raw": "BYTES"}.items()
]
RESULT = [
    {"id": 1, "text": None, "price": Decimal("1.5"), "raw": b"a"},
    {"id": 2, "text": "b", "price": None, "raw": None},
]


def pipeline(*options: str) -> beam.Pipeline:
    fixed = ["--runner=luminosity.LuminosityRunner", "--progress=off", "--run_dir=off", "--job_name=nightly"]
    return beam.Pipeline(options=PipelineOptions([*fixed, "--project=project", *options]))


def files_of(folder: str) -> list[str]:
    return sorted(os.path.join(place, name) for place, _, names in os.walk(folder) for name in names)


def in_avro(row: dict[str, Any]) -> dict[str, Any]:
    """Return a row as Avro has it: times without a zone are texts."""
    return {**row, "datetime": row["datetime"] and row["datetime"].isoformat()}


def left(bigquery: FakeBigQuery, folder: str) -> dict[str, Any]:
    return {"files": len(files_of(folder)), "datasets": bigquery.datasets, "tables": bigquery.tables}


def read_a_table(bigquery: FakeBigQuery, folder: str) -> dict[str, Any]:
    """All types that a column may have, and more rows than a file gets, in two workers."""
    rows = [{"id": number, **(FULL if number % 2 else EMPTY)} for number in range(7)]
    bigquery.create_table(TABLE, COLUMNS, rows)
    with pipeline(*TWO_WORKERS) as p:
        found = p | beam.io.ReadFromBigQuery(table=TABLE, gcs_location=folder)
        assert_that(found, equal_to([in_avro(row) for row in rows]))
    return left(bigquery, folder)


def read_a_query(bigquery: FakeBigQuery, folder: str) -> dict[str, Any]:
    """A result in Avro files, and one in JSON files, whose bytes Beam leaves in base64."""
    bigquery.create_table(TABLE, COLUMNS)
    bigquery.prepare_query(QUERY, RESULT_COLUMNS, RESULT, reads=[TABLE])
    with pipeline(*IN_PROCESS, f"--temp_location={folder}") as p:
        avro = p | "avro" >> beam.io.ReadFromBigQuery(query=QUERY, use_standard_sql=True)
        assert_that(avro, equal_to(RESULT), label="is equal")
        as_json = p | "json" >> beam.io.ReadFromBigQuery(query=QUERY, use_standard_sql=True, use_json_exports=True)
        texts = [{**row, "raw": row["raw"] and b"YQ=="} for row in RESULT]
        assert_that(as_json, equal_to(texts), label="is equal in JSON")
    return left(bigquery, folder)


def read_all(bigquery: FakeBigQuery, folder: str) -> dict[str, Any]:
    """Requests that are elements: a table and a query."""
    bigquery.create_table(TABLE, RESULT_COLUMNS, RESULT)
    bigquery.prepare_query(QUERY, RESULT_COLUMNS, RESULT, reads=[TABLE])
    requests = [beam.io.ReadFromBigQueryRequest(table=TABLE), beam.io.ReadFromBigQueryRequest(query=QUERY)]
    with pipeline(*TWO_WORKERS) as p:
        found = p | beam.Create(requests) | beam.io.ReadAllFromBigQuery(gcs_location=folder)
        assert_that(found, equal_to(RESULT * 2))
    return left(bigquery, folder)


def fail_to_export(bigquery: FakeBigQuery, folder: str) -> dict[str, Any]:
    """No job can write into a file as if it was a folder."""
    bigquery.create_table(TABLE, RESULT_COLUMNS, RESULT)
    bigquery.prepare_query(QUERY, RESULT_COLUMNS, RESULT, reads=[TABLE])
    place = Path(folder, "file")
    place.write_text("")
    found: dict[str, Any] = {}
    for name, source in {"table": {"table": TABLE}, "query": {"query": QUERY}, "none": {"table": TABLE + "s"}}.items():
        try:
            with pipeline(*IN_PROCESS) as p:
                _ = p | beam.io.ReadFromBigQuery(gcs_location=str(place), **source)
        except Exception as error:
            found[name] = f"{type(error).__name__}: {error}"
    return {**found, **left(bigquery, folder)}


def export_again(bigquery: FakeBigQuery, folder: str) -> dict[str, Any]:
    """An attempt whose worker was lost has left a file that this export does not write anew."""
    bigquery.create_table(TABLE, RESULT_COLUMNS, RESULT)
    read = uuid.UUID("12345678123456781234567812345678")
    old = Path(folder, str(read)[:10], "bigquery-table-dump-000000000007.json")
    old.parent.mkdir()
    old.write_text('{"id": "7"}\n')
    with pipeline(*IN_PROCESS) as p:
        with unittest.mock.patch("apache_beam.io.gcp.bigquery.uuid", uuid4=lambda: read):
            found = p | beam.io.ReadFromBigQuery(table=TABLE, gcs_location=folder, use_json_exports=True)
        ids = found | beam.Map(lambda row: row["id"])
        assert_that(ids, equal_to([1, 2]))
    return left(bigquery, folder)


def fail_after_export(bigquery: FakeBigQuery, folder: str) -> dict[str, Any]:
    """A step after the source fails at one row."""
    bigquery.create_table(TABLE, RESULT_COLUMNS, RESULT)
    bigquery.prepare_query(QUERY, RESULT_COLUMNS, RESULT, reads=[TABLE])
    error = ""
    try:
        with pipeline(*IN_PROCESS) as p:
            rows = p | beam.io.ReadFromBigQuery(query=QUERY, gcs_location=folder)
            _ = rows | beam.Map(lambda row: 1 / (row["id"] - 2))
    except Exception as found:
        error = f"{type(found).__name__}: {found}"
    return {"error": error, **left(bigquery, folder)}


def read_directly(bigquery: FakeBigQuery, folder: str) -> dict[str, Any]:
    """A table in Avro from two workers and in Arrow, whose times without a zone are datetimes; a query."""
    rows = [{"id": number, **(FULL if number % 2 else EMPTY)} for number in range(7)]
    bigquery.create_table(TABLE, COLUMNS, rows)
    bigquery.prepare_query(QUERY, RESULT_COLUMNS, RESULT, reads=[TABLE])
    with pipeline(*TWO_WORKERS) as p:
        avro = p | "avro" >> _direct(table=TABLE)
        assert_that(avro, equal_to([in_avro(row) for row in rows]))
        arrow = p | "arrow" >> _direct(
            table=TABLE, use_native_datetime=True, selected_fields=["id", "datetime", "bignumeric"]
        )
        chosen = [{name: row[name] for name in ("id", "datetime", "bignumeric")} for row in rows]
        assert_that(arrow, equal_to(chosen), label="is equal in Arrow")
        assert_that(p | "query" >> _direct(query=QUERY), equal_to(RESULT), label="is equal in a query")
    return left(bigquery, folder)


def _direct(**settings: Any) -> beam.PTransform:
    return beam.io.ReadFromBigQuery(method="DIRECT_READ", **settings)


def fail_to_read_directly(bigquery: FakeBigQuery, folder: str) -> dict[str, Any]:
    bigquery.create_table(TABLE, RESULT_COLUMNS, RESULT)
    try:
        with pipeline(*IN_PROCESS) as p:
            _ = p | _direct(table=TABLE, selected_fields=["none"])
    except Exception as error:
        return {"error": f"{type(error).__name__}: {error}"}
    return {"error": ""}


READS = (
    read_a_table,
    read_a_query,
    read_all,
    fail_to_export,
    export_again,
    fail_after_export,
    read_directly,
    fail_to_read_directly,
)
