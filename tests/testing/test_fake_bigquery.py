"""The rules of the fake BigQuery, over its REST API. tests/io/stores/test_bigquery_loads.py has Beam's sink."""

from __future__ import annotations

import json
import urllib.error
import urllib.request
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import pytest

from luminosity.errors import InvalidArgument
from luminosity.testing import FakeBigQuery

COLUMNS = [{"name": "id", "type": "INT64", "mode": "REQUIRED"}, {"name": "words", "type": "STRING", "mode": "REPEATED"}]
ROW = {"id": 1, "words": ["a"]}
TABLE = {"projectId": "project", "datasetId": "dataset", "tableId": "words"}


@pytest.fixture
def bigquery() -> Iterator[FakeBigQuery]:
    with FakeBigQuery() as fake:
        yield fake


def send(bigquery: FakeBigQuery, method: str, path: str, body: Any = None) -> tuple[int, Any]:
    request = urllib.request.Request(
        f"{bigquery.url}/bigquery/v2/projects/project/{path}",
        method=method,
        data=None if body is None else json.dumps(body).encode(),
    )
    try:
        with urllib.request.urlopen(request, timeout=30) as response:
            return response.status, json.load(response)
    except urllib.error.HTTPError as error:
        with error:
            return error.code, json.load(error)


def load(bigquery: FakeBigQuery, job: str, **settings: Any) -> dict[str, Any]:
    settings = {"destinationTable": TABLE, "sourceFormat": "NEWLINE_DELIMITED_JSON", **settings}
    body = {"jobReference": {"projectId": "project", "jobId": job}, "configuration": {"load": settings}}
    status, found = send(bigquery, "POST", "jobs", body)
    return found["status"].get("errorResult", {}) if status == 200 else found["error"]


def test_a_load_job_obeys_its_dispositions(bigquery: FakeBigQuery, tmp_path: Path) -> None:
    file = tmp_path / "rows"
    file.write_text(json.dumps(ROW) + "\n")
    given: dict[str, Any] = {"sourceUris": [str(file)], "schema": {"fields": COLUMNS}}
    assert load(bigquery, "a", **given, createDisposition="CREATE_NEVER")["reason"] == "notFound"
    assert bigquery.tables == []
    assert load(bigquery, "b", **given) == {}
    assert load(bigquery, "c", **given, writeDisposition="WRITE_EMPTY")["reason"] == "duplicate"
    assert load(bigquery, "d", **given) == {}
    assert bigquery.rows("dataset.words") == [ROW, ROW]
    assert load(bigquery, "e", **given, writeDisposition="WRITE_TRUNCATE") == {}
    assert bigquery.rows("project:dataset.words") == [ROW]
    assert [job["jobReference"]["jobId"] for job in bigquery.jobs] == ["a", "b", "c", "d", "e"]


def test_a_job_runs_once(bigquery: FakeBigQuery, tmp_path: Path) -> None:
    """So a step of Beam that is retried loads nothing twice: its jobs keep their names."""
    file = tmp_path / "rows"
    file.write_text(json.dumps(ROW) + "\n")
    assert load(bigquery, "a", sourceUris=[str(file)], schema={"fields": COLUMNS}) == {}
    refused = load(bigquery, "a", sourceUris=[str(file)], schema={"fields": COLUMNS})
    assert refused["code"] == 409
    assert refused["message"] == "Already Exists: Job project:US.a"
    assert bigquery.rows("dataset.words") == [ROW]


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "No schema specified on job or table."),
        ({"autodetect": True}, "does not guess columns"),
        ({"schema": {"fields": COLUMNS}, "sourceUris": ["/no/such/file"]}, "Not found: URI /no/such/file"),
        ({"schema": {"fields": COLUMNS}, "sourceFormat": "CSV"}, "found CSV"),
        ({"schema": {"fields": COLUMNS[:1]}}, "no such field: words."),
        ({"schema": {"fields": [*COLUMNS, {"name": "x", "type": "STRING", "mode": "REQUIRED"}]}}, "required field: x"),
        ({"schema": {"fields": COLUMNS}, "destinationTable": {**TABLE, "datasetId": "other"}}, "Dataset project:other"),
    ],
)
def test_a_load_job_that_is_refused_says_why(
    settings: dict[str, Any], message: str, bigquery: FakeBigQuery, tmp_path: Path
) -> None:
    file = tmp_path / "rows"
    file.write_text(json.dumps(ROW) + "\n")
    assert message in load(bigquery, "a", **{"sourceUris": [str(file)], **settings})["message"]
    assert bigquery.tables == []


def test_other_columns_than_the_table_has_are_refused(bigquery: FakeBigQuery, tmp_path: Path) -> None:
    file = tmp_path / "rows"
    file.write_text('{"id": 1}\n')
    bigquery.create_table("dataset.words", COLUMNS, [ROW])
    found = load(bigquery, "a", sourceUris=[str(file)], schema={"fields": COLUMNS[:1]})
    assert found["message"].endswith("Table project:dataset.words. Field words is missing in new schema")
    assert bigquery.rows("dataset.words") == [ROW]


def test_inserts_skip_bad_rows_only_if_asked_to_and_know_repeated_ids(bigquery: FakeBigQuery) -> None:
    bigquery.create_table("dataset.words", COLUMNS)
    rows = [{"insertId": "x", "json": ROW}, {"insertId": "y", "json": {"id": None, "words": None}}]
    path = "datasets/dataset/tables/words/insertAll"
    _, refused = send(bigquery, "POST", path, {"rows": rows})
    assert [(each["index"], each["errors"][0]["reason"]) for each in refused["insertErrors"]] == [
        (1, "invalid"),
        (0, "stopped"),
    ]
    assert bigquery.rows("dataset.words") == []
    for _ in range(2):
        _, refused = send(bigquery, "POST", path, {"rows": rows, "skipInvalidRows": True})
        assert [each["index"] for each in refused["insertErrors"]] == [1]
        assert bigquery.rows("dataset.words") == [ROW]


def test_what_it_does_not_have_it_refuses(bigquery: FakeBigQuery) -> None:
    assert send(bigquery, "GET", "datasets/dataset/tables/none")[0] == 404
    assert send(bigquery, "GET", "queries/some")[0] == 501
    query = {"jobReference": {"projectId": "project", "jobId": "q"}, "configuration": {"query": {"query": "SELECT 1"}}}
    status, found = send(bigquery, "POST", "jobs", query)
    assert (status, found["error"]["message"]) == (501, "FakeBigQuery runs load and copy jobs, found ['query']")
    with pytest.raises(InvalidArgument, match=r"expected dataset\.table"):
        bigquery.rows("words")
