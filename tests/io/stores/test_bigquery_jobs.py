"""Beam's sink and sources for BigQuery on this runner: their jobs and files, and what a failure says and leaves."""

from __future__ import annotations

import json
import os
import subprocess
import sys
from pathlib import Path
from typing import Any

import pyarrow as pa
import pytest

from luminosity import bigquery_schema
from luminosity.errors import InvalidArgument, InvalidType
from tests.runners import IS_REFERENCE

HERE = Path(__file__).parent
REPOSITORY = HERE.parents[2]
PACKAGES = Path(sys.prefix) / "bigquery"  # where `make setup` puts what Beam's sink and source import
THE_LAST_ADDED = "google/cloud/bigquery_storage_v1"

pytestmark = pytest.mark.skipif(IS_REFERENCE, reason="the script names its runner")


def run(*command: Any) -> str:
    assert (PACKAGES / THE_LAST_ADDED).is_dir(), f"{PACKAGES} lacks packages: run make setup"
    path = os.pathsep.join([str(REPOSITORY / "src"), str(PACKAGES)])
    # Beam looks for the address of a Google machine: this proxy, which does not exist, keeps it on the loopback.
    away = {"http_proxy": "http://127.0.0.1:9", "no_proxy": "127.0.0.1"}
    done = subprocess.run(
        [sys.executable, *command],
        capture_output=True,
        text=True,
        timeout=240,
        env={**os.environ, **away, "PYTHONPATH": path},
    )
    assert done.returncode == 0, done.stderr
    return done.stdout


@pytest.fixture(scope="module")
def found() -> dict[str, Any]:
    return json.loads(run(HERE / "bigquery_jobs.py"))


def test_one_load_job_brings_all_rows_of_a_table(found: dict[str, Any]) -> None:
    case = found["load_a_table"]
    assert case["is_equal"], "rows are the same in the table as before, in every type"
    (job,) = case["jobs"]
    load = job["configuration"]["load"]
    assert sorted(load["sourceUris"]) == case["files"]
    assert case["ids_in_files"] == [1, 2, 3]
    assert load["sourceFormat"] == "NEWLINE_DELIMITED_JSON"
    assert load["writeDisposition"] == "WRITE_TRUNCATE"
    assert load["createDisposition"] == "CREATE_IF_NEEDED"
    assert load["destinationTable"] == {"projectId": "project", "datasetId": "dataset", "tableId": "reviews"}
    assert load["schema"] == case["schema"]
    assert job["jobReference"]["projectId"] == "project"
    assert job["jobReference"]["jobId"].startswith("beam_bq_job_LOAD_nightly_LOAD_STEP_")
    assert job["statistics"]["load"]["outputRows"] == "3"


def test_several_tables_are_loaded_aside_and_copied(found: dict[str, Any]) -> None:
    case = found["load_by_language"]
    loads = [job["configuration"]["load"] for job in case["jobs"] if "load" in job["configuration"]]
    copies = [job["configuration"]["copy"] for job in case["jobs"] if "copy" in job["configuration"]]
    assert {load["sourceFormat"] for load in loads} == {"AVRO"}
    temporary = {load["destinationTable"]["tableId"] for load in loads}
    assert {copy["sourceTable"]["tableId"] for copy in copies} == temporary
    assert sorted(copy["destinationTable"]["tableId"] for copy in copies) == ["de", "fr"]
    assert {copy["writeDisposition"] for copy in copies} == {"WRITE_APPEND"}
    assert kinds_of(case) == ["load", "load", "copy", "copy"], "no copy before all loads are done"
    assert case["ids"] == {"de": [1, 3, 5, 7, 9, 99], "fr": [0, 2, 4, 6, 8]}
    assert sorted(case["tables"]) == ["project:dataset.de", "project:dataset.fr"]


def test_a_bad_row_fails_the_run_and_leaves_table_and_files(found: dict[str, Any]) -> None:
    case = found["load_a_bad_row"]
    assert case["error"].startswith("StepFailed: ")
    assert "Cannot convert value to integer: 'seven' (field: id)" in case["error"]
    assert case["rows"] == [{"id": 99, "text": "old"}]
    assert case["ids_in_files"] == [1, "seven"]


def test_streaming_inserts_return_the_rows_that_are_refused(found: dict[str, Any]) -> None:
    assert found["insert_rows"]["ids"] == [1, 3]
    assert found["insert_rows"]["jobs"] == []


def test_the_storage_api_is_refused_while_the_pipeline_is_built(found: dict[str, Any]) -> None:
    error = found["use_the_storage_api"]["error"]
    assert error.startswith("UnsupportedPipeline: Beam runs StorageWriteToBigQuery")
    assert "method='FILE_LOADS'" in error


NOTHING_MORE = {"files": 0, "datasets": ["project:dataset"], "tables": ["project:dataset.read"]}


def kinds_of(case: dict[str, Any]) -> list[str]:
    kinds = {"copy", "extract", "load", "query"}
    return [next(iter(kinds & set(job["configuration"]))) for job in case["jobs"]]


def left_of(case: dict[str, Any]) -> dict[str, Any]:
    return {name: case[name] for name in NOTHING_MORE}


def test_a_table_is_exported_once_and_each_row_of_its_files_read_once(found: dict[str, Any]) -> None:
    case = found["read_a_table"]  # the script has compared the rows, with every type
    (job,) = case["jobs"]
    extract = job["configuration"]["extract"]
    assert (extract["destinationFormat"], extract["useAvroLogicalTypes"]) == ("AVRO", True)
    assert extract["sourceTable"] == {"projectId": "project", "datasetId": "dataset", "tableId": "read"}
    assert job["statistics"]["extract"]["destinationUriFileCounts"] == ["3"], "7 rows, of which 3 go into a file"
    assert left_of(case) == NOTHING_MORE


def test_a_query_goes_through_a_temporary_table(found: dict[str, Any]) -> None:
    case = found["read_a_query"]
    assert kinds_of(case) == ["query", "extract"] * 2
    for query, extract in zip(case["jobs"][::2], case["jobs"][1::2], strict=True):
        destination = query["configuration"]["query"]["destinationTable"]
        assert destination["datasetId"].startswith("beam_temp_dataset_")
        assert extract["configuration"]["extract"]["sourceTable"] == destination
    formats = {job["configuration"]["extract"]["destinationFormat"] for job in case["jobs"][1::2]}
    assert formats == {"AVRO", "NEWLINE_DELIMITED_JSON"}
    assert left_of(case) == NOTHING_MORE


def test_requests_for_tables_and_queries_may_be_elements(found: dict[str, Any]) -> None:
    case = found["read_all"]
    assert sorted(kinds_of(case)) == ["extract", "extract", "query"]
    assert left_of(case) == {**NOTHING_MORE, "files": 2}, "Beam leaves the files of ReadAllFromBigQuery"


def test_an_export_that_fails_says_why(found: dict[str, Any]) -> None:
    case = found["fail_to_export"]
    for source in ("table", "query"):
        assert case[source].startswith("StepFailed: step 'ReadFromBigQuery/Read")
        assert "Access Denied: File" in case[source]
    assert "Not found: Table project:dataset.reads" in case["none"]
    assert kinds_of(case) == ["extract", "query", "extract"]
    assert left_of(case) == {**NOTHING_MORE, "files": 1}, "the file in place of a folder is not ours"


def test_files_of_an_earlier_attempt_are_not_read(found: dict[str, Any]) -> None:
    assert left_of(found["export_again"]) == NOTHING_MORE  # the script has compared the rows


def test_a_step_that_fails_leaves_the_files_of_an_export_but_no_dataset(found: dict[str, Any]) -> None:
    case = found["fail_after_export"]
    assert "ZeroDivisionError" in case["error"]
    assert left_of(case) == {**NOTHING_MORE, "files": 1}


def test_direct_reads_bring_tables_and_queries(found: dict[str, Any]) -> None:
    case = found["read_directly"]  # the script has compared the rows, in Avro and in Arrow
    assert kinds_of(case) == ["query"]
    assert left_of(case) == NOTHING_MORE
    assert "selected fields do not exist in the table schema: none" in found["fail_to_read_directly"]["error"]


def test_the_example_runs_offline() -> None:
    example = REPOSITORY / "examples" / "stores" / "bigquery.py"
    lines = run("-m", "luminosity.cli.main", "run", example, "--cpu_workers=1").splitlines()
    assert lines[0] == "load job: 10 rows, 1 files in NEWLINE_DELIMITED_JSON, WRITE_APPEND"
    assert len(lines) == 11
    assert "crimson [0.86, 0.08, 0.24]" in lines


def test_columns_that_bigquery_has() -> None:
    kinds = {
        "flag": pa.bool_(),
        "count": pa.uint32(),
        "share": pa.float16(),
        "price": pa.decimal128(38, 9),
        "precise": pa.decimal256(60, 30),
        "word": pa.dictionary(pa.int8(), pa.string()),
        "picture": pa.large_binary(),
        "day": pa.date32(),
        "hour": pa.time64("us"),
        "at": pa.timestamp("us", "UTC"),
        "local": pa.timestamp("us"),
        "parts": pa.large_list(pa.struct([pa.field("name", pa.string(), nullable=False)])),
    }
    fields = bigquery_schema(pa.schema([*kinds.items(), pa.field("id", pa.int64(), nullable=False)]))["fields"]
    found = {field["name"]: (field["type"], field["mode"]) for field in fields}
    assert found.pop("id") == ("INTEGER", "REQUIRED")
    assert found.pop("parts") == ("RECORD", "REPEATED")
    assert {mode for _, mode in found.values()} == {"NULLABLE"}
    names = "BOOLEAN INTEGER FLOAT NUMERIC BIGNUMERIC STRING BYTES DATE TIME TIMESTAMP DATETIME"
    assert [kind for kind, _ in found.values()] == names.split()
    assert fields[-2]["fields"] == [{"name": "name", "type": "STRING", "mode": "REQUIRED"}]


@pytest.mark.parametrize(
    ("columns", "message"),
    [
        ({"n": pa.uint64()}, "cast the column to int64"),
        ({"n": pa.list_(pa.list_(pa.int8()))}, "has no lists of lists"),
        ({"n": pa.struct([("m", pa.map_(pa.string(), pa.int8()))])}, "column 'n.m' has the type map"),
        ({"n": pa.null()}, "give the column the type"),
        ({"n": pa.duration("s")}, "for which BigQuery has no type"),
        ({"n": pa.decimal256(76, 2)}, "38 digits before and 38 after"),
        ({"my column": pa.int8()}, "rename it"),
        ({"n": pa.int8(), "N": pa.int8()}, "found the columns 'n' and 'N'"),
    ],
)
def test_columns_that_bigquery_does_not_have(columns: dict[str, Any], message: str) -> None:
    with pytest.raises((InvalidArgument, InvalidType), match=message):
        bigquery_schema(pa.schema(list(columns.items())))
