"""The rules of the fake BigQuery, over its REST API. For Beam's sink and sources, see tests/io/stores."""

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


def extract(bigquery: FakeBigQuery, job: str, uri: str, **settings: Any) -> dict[str, Any]:
    settings = {"sourceTable": TABLE, "destinationUris": [uri], **settings}
    body = {"jobReference": {"projectId": "project", "jobId": job}, "configuration": {"extract": settings}}
    return send(bigquery, "POST", "jobs", body)[1]


def test_an_extract_job_writes_a_file_even_of_no_rows(bigquery: FakeBigQuery, tmp_path: Path) -> None:
    bigquery.create_table("dataset.words", COLUMNS)
    kind = {"destinationFormat": "NEWLINE_DELIMITED_JSON"}
    job = extract(bigquery, "a", str(tmp_path / "rows-*.json"), **kind)
    assert job["statistics"] == {"extract": {"destinationUriFileCounts": ["1"]}}
    assert (tmp_path / "rows-000000000000.json").read_text() == ""
    send(bigquery, "POST", "datasets/dataset/tables/words/insertAll", {"rows": [{"json": ROW}]})
    extract(bigquery, "b", str(tmp_path / "one"), **kind)
    assert (tmp_path / "one").read_text() == '{"id": "1", "words": ["a"]}\n'


@pytest.mark.parametrize(
    ("settings", "message"),
    [
        ({}, "found CSV"),
        ({"destinationFormat": "AVRO"}, "with useAvroLogicalTypes"),
        ({"destinationFormat": "AVRO", "compression": "SNAPPY"}, "without compression, found SNAPPY"),
        ({"destinationUris": ["a-*", "b-*"]}, "one address"),
        ({"sourceTable": {**TABLE, "tableId": "none"}}, "Not found: Table project:dataset.none"),
    ],
)
def test_an_extract_job_that_fails_says_why(
    settings: dict[str, Any], message: str, bigquery: FakeBigQuery, tmp_path: Path
) -> None:
    bigquery.create_table("dataset.words", COLUMNS)
    job = extract(bigquery, "a", str(tmp_path / "rows"), **settings)
    assert message in job["status"]["errorResult"]["message"]
    assert list(tmp_path.iterdir()) == []


def test_a_query_returns_what_is_prepared_once_its_tables_exist(bigquery: FakeBigQuery) -> None:
    bigquery.prepare_query("SELECT *", COLUMNS, [ROW], reads=["dataset.words"])
    query = {"query": "SELECT *", "destinationTable": {**TABLE, "tableId": "result"}}
    job = {"jobReference": {"projectId": "project", "jobId": "q"}, "configuration": {"query": query}}
    assert send(bigquery, "POST", "jobs", job)[0] == 404
    bigquery.create_table("dataset.words", COLUMNS)
    dry = {**job, "configuration": {"query": {"query": "SELECT *"}, "dryRun": True}}
    _, found = send(bigquery, "POST", "jobs", dry)
    assert found["statistics"]["query"]["referencedTables"] == [TABLE]
    assert bigquery.jobs == []
    assert send(bigquery, "POST", "jobs", job)[1]["status"] == {"state": "DONE"}
    assert bigquery.rows("dataset.result") == [ROW]
    with pytest.raises(InvalidArgument, match="does not fit the columns: Missing required field: id"):
        bigquery.prepare_query("SELECT id", COLUMNS, [{"words": []}])


def test_a_dataset_is_deleted_with_its_tables_if_asked_to(bigquery: FakeBigQuery) -> None:
    reference = {"projectId": "project", "datasetId": "more"}
    send(bigquery, "POST", "datasets", {"datasetReference": reference, "labels": {"kind": "temporary"}})
    assert send(bigquery, "POST", "datasets", {"datasetReference": reference})[0] == 409
    bigquery.create_table("more.words", COLUMNS)
    _, found = send(bigquery, "GET", "datasets?filter=labels.kind:temporary")
    assert [each["datasetReference"] for each in found["datasets"]] == [reference]
    assert send(bigquery, "DELETE", "datasets/more")[0] == 400
    assert send(bigquery, "DELETE", "datasets/more?deleteContents=True")[0] == 200
    assert (bigquery.datasets, bigquery.tables) == (["project:dataset"], [])


def test_what_it_does_not_have_it_refuses(bigquery: FakeBigQuery) -> None:
    assert send(bigquery, "GET", "datasets/dataset/tables/none")[0] == 404
    assert send(bigquery, "GET", "queries/some")[0] == 501
    query = {"jobReference": {"projectId": "project", "jobId": "q"}, "configuration": {"query": {"query": "SELECT 1"}}}
    status, found = send(bigquery, "POST", "jobs", query)
    assert (status, found["error"]["errors"][0]["reason"]) == (400, "invalidQuery")
    assert "with prepare_query: none. Found 'SELECT 1'" in found["error"]["message"]
    other = {**query, "configuration": {"undelete": {}}}
    status, found = send(bigquery, "POST", "jobs", other)
    message = "FakeBigQuery runs load, copy, extract, query jobs, found ['undelete']"
    assert (status, found["error"]["message"]) == (501, message)
    with pytest.raises(InvalidArgument, match=r"expected dataset\.table"):
        bigquery.rows("words")
