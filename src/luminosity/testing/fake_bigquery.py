"""A BigQuery for tests, inside the test's process: load jobs, copy jobs and streaming inserts, without a cloud."""

from __future__ import annotations

import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http.server import ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote

from luminosity.errors import InvalidArgument
from luminosity.testing.bigquery_http import BigQueryClient, handler_of
from luminosity.testing.bigquery_tables import (
    Refused,
    RowRefused,
    StoredTable,
    checked_row,
    normal_fields,
    rows_of_file,
)

__all__ = ["FakeBigQuery"]

Reference = dict[str, str]
Answer = dict[str, Any]

_LOCATION = "US"
_POLL_S = 0.02  # how late the server notices that it is closed
_TABLE = re.compile(r"(?:(?P<project>[^:.]+)[:.])?(?P<dataset>\w+)\.(?P<table>[\w$-]+)")
_PREFIX = r"/bigquery/v2/projects/(?P<project>[^/]+)"
_IN_DATASET = _PREFIX + r"/datasets/(?P<dataset>[^/]+)"


class FakeBigQuery:
    """A BigQuery for tests, inside this process: it keeps tables in memory and records every job.

    Pass its ``client`` to Beam's sink. The workers of a pipeline reach it over the loopback. Leave the ``with``
    block, and it is gone::

        with FakeBigQuery() as bigquery:
            with beam.Pipeline() as pipeline:
                rows = pipeline | beam.Create([{"id": 1, "text": "fine"}])
                rows | beam.io.WriteToBigQuery(
                    "project:dataset.reviews", schema="id:INTEGER,text:STRING", method="FILE_LOADS",
                    custom_gcs_temp_location="/tmp/loads", validate=False, test_client=bigquery.client,
                )
            assert bigquery.rows("dataset.reviews") == [{"id": 1, "text": "fine"}]
            (job,) = bigquery.jobs

    ``validate=False`` lets Beam write the files of load jobs to a folder instead of ``gs://``. Rows, columns and
    dispositions are checked as BigQuery does: a load job with a bad row loads nothing, and a streaming insert
    returns the rows that it refuses.

    It is not a full BigQuery: it runs no queries, knows no partitions, and does not guess columns. Requests for these
    are refused with a message. ``beam.io.ReadFromBigQuery`` takes no client, and can't read from it.

    >>> with FakeBigQuery() as bigquery:
    ...     bigquery.create_table("dataset.words", [{"name": "word", "type": "STRING"}], [{"word": "yes"}])
    ...     bigquery.rows("dataset.words"), bigquery.tables
    ([{'word': 'yes'}], ['project:dataset.words'])

    Args:
        project: the project of tables whose name has none.
        datasets: the datasets of the project that exist.
    """

    def __init__(self, project: str = "project", datasets: Iterable[str] = ("dataset",)) -> None:
        self._project = project
        self._lock = threading.Lock()
        self._datasets = {(project, name) for name in datasets}
        self._tables: dict[tuple[str, str, str], StoredTable] = {}
        self._jobs: dict[tuple[str, str], Answer] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(self._answer))
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=[_POLL_S], name="fake-bigquery", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> FakeBigQuery:
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        self.close()

    def close(self) -> None:
        """Stop the server and drop all tables. A second call does nothing."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
        # Beam remembers in each process which tables it has created; the next fake has none of them.
        beams: Any = sys.modules.get("apache_beam.io.gcp.bigquery")
        if beams is not None:
            beams._KNOWN_TABLES.clear()

    @property
    def url(self) -> str:
        """The address of the REST API, for clients that take one: ``http://127.0.0.1:40001``."""
        return f"http://127.0.0.1:{self._server.server_port}"

    @property
    def client(self) -> BigQueryClient:
        """The ``test_client`` for ``beam.io.WriteToBigQuery``; needs ``pip install 'apache-beam[gcp]'``."""
        return BigQueryClient(self.url, self._project)

    @property
    def jobs(self) -> list[dict[str, Any]]:
        """All jobs in order, as the REST API returns them: ``configuration`` as requested, ``status`` and so on."""
        with self._lock:
            return list(self._jobs.values())

    @property
    def tables(self) -> list[str]:
        """The names of all tables that exist, temporary ones, too: ``project:dataset.table``."""
        with self._lock:
            return [_name(key) for key in self._tables]

    def rows(self, table: str) -> list[dict[str, Any]]:
        """Return the rows of a table, in the order in which they arrived; times are datetimes."""
        key = self._key(table)
        with self._lock:
            if key not in self._tables:
                there = ", ".join(_name(each) for each in self._tables) or "no tables"
                raise InvalidArgument(f"found no table {_name(key)}, expected one that exists: there are {there}")
            return list(self._tables[key].rows)

    def create_table(
        self, table: str, fields: Sequence[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        """Create a table with these columns, as the REST API describes them, and rows."""
        key = self._key(table)
        columns = normal_fields(fields)
        with self._lock:
            if key in self._tables:
                raise InvalidArgument(f"found the table {table!r}, expected a name that is not taken")
            if key[:2] not in self._datasets:
                raise InvalidArgument(f"found no dataset {key[1]!r}, expected one of FakeBigQuery(datasets=...)")
            try:
                self._tables[key] = StoredTable(columns, [checked_row(row, columns) for row in rows])
            except RowRefused as error:
                raise InvalidArgument(f"found a row that does not fit the columns: {error.message}") from error

    def _key(self, table: str) -> tuple[str, str, str]:
        found = _TABLE.fullmatch(table)
        if found is None:
            raise InvalidArgument(f"found the table {table!r}, expected dataset.table or project:dataset.table")
        return found["project"] or self._project, found["dataset"], found["table"]

    def _table(self, key: tuple[str, str, str]) -> StoredTable:
        if key not in self._tables:
            raise Refused(f"Not found: Table {_name(key)}", "notFound")
        return self._tables[key]

    def _answer(self, method: str, path: str, body: Answer) -> Answer:
        """Respond to a request. Threads of the server call it."""
        for expected, pattern, respond in self._routes():
            found = re.fullmatch(pattern, path)
            if found and method == expected:
                names = {name: unquote(value) for name, value in found.groupdict().items()}
                with self._lock:
                    return respond(names, body)
        raise Refused(f"FakeBigQuery has no {method} {path}", "notImplemented")

    def _routes(self) -> Iterator[tuple[str, str, Callable[[Reference, Answer], Answer]]]:
        yield "POST", _PREFIX + "/jobs", self._insert_job
        yield "GET", _PREFIX + "/jobs/(?P<job>[^/]+)", self._get_job
        yield "GET", _IN_DATASET, self._get_dataset
        yield "POST", _IN_DATASET + "/tables", self._insert_table
        yield "GET", _IN_DATASET + "/tables/(?P<table>[^/]+)", self._get_table
        yield "DELETE", _IN_DATASET + "/tables/(?P<table>[^/]+)", self._delete_table
        yield "GET", _IN_DATASET + "/tables/(?P<table>[^/]+)/data", self._list_rows
        yield "POST", _IN_DATASET + "/tables/(?P<table>[^/]+)/insertAll", self._insert_rows

    def _get_dataset(self, names: Reference, body: Answer) -> Answer:
        self._check_dataset(names["project"], names["dataset"])
        return {"datasetReference": {"projectId": names["project"], "datasetId": names["dataset"]}}

    def _check_dataset(self, project: str, dataset: str) -> None:
        if (project, dataset) not in self._datasets:
            raise Refused(f"Not found: Dataset {project}:{dataset}", "notFound")

    def _get_table(self, names: Reference, body: Answer) -> Answer:
        key = _named(names)
        table = self._table(key)
        return {"tableReference": _reference(key), "schema": {"fields": table.fields}, "numRows": str(len(table.rows))}

    def _insert_table(self, names: Reference, body: Answer) -> Answer:
        key = _key_of(body["tableReference"])
        self._check_dataset(*key[:2])
        if key in self._tables:
            raise Refused(f"Already Exists: Table {_name(key)}", "duplicate")
        self._tables[key] = StoredTable(normal_fields(body["schema"]["fields"]))
        return body

    def _delete_table(self, names: Reference, body: Answer) -> Answer:
        key = _named(names)
        self._table(key)
        del self._tables[key]
        return {}

    def _list_rows(self, names: Reference, body: Answer) -> Answer:
        return {"totalRows": str(len(self._table(_named(names)).rows))}

    def _insert_rows(self, names: Reference, body: Answer) -> Answer:
        table = self._table(_named(names))
        errors: list[Answer] = []
        good: list[tuple[str | None, dict[str, Any]]] = []
        for index, row in enumerate(body["rows"]):
            try:
                fits = checked_row(row["json"], table.fields, ignore_unknown=body.get("ignoreUnknownValues", False))
                good.append((row.get("insertId"), fits))
            except RowRefused as error:
                problem = {"reason": "invalid", "location": error.column, "message": error.message}
                errors.append({"index": index, "errors": [problem]})
        if errors and not body.get("skipInvalidRows"):
            bad = {each["index"] for each in errors}
            stopped = [{"reason": "stopped", "location": "", "message": ""}]
            errors += [{"index": each, "errors": stopped} for each in range(len(body["rows"])) if each not in bad]
            good = []
        for insert_id, row in good:
            if insert_id is None or insert_id not in table.insert_ids:
                table.rows.append(row)
            if insert_id is not None:
                table.insert_ids.add(insert_id)
        return {"insertErrors": errors} if errors else {}

    def _get_job(self, names: Reference, body: Answer) -> Answer:
        try:
            return self._jobs[names["project"], names["job"]]
        except KeyError:
            raise Refused(f"Not found: Job {names['project']}:{names['job']}", "notFound") from None

    def _insert_job(self, names: Reference, body: Answer) -> Answer:
        """Run a job to its end. A job that fails is an answer, too: its status says why."""
        reference = {**body["jobReference"], "location": _LOCATION}
        key = (names["project"], reference["jobId"])
        if key in self._jobs:
            raise Refused(f"Already Exists: Job {names['project']}:{_LOCATION}.{reference['jobId']}", "duplicate")
        configuration = body["configuration"]
        kinds = {"load": self._load, "copy": self._copy}
        kind = next((kind for kind in kinds if kind in configuration), None)
        if kind is None:
            raise Refused(f"FakeBigQuery runs load and copy jobs, found {sorted(configuration)}", "notImplemented")
        status: Answer = {"state": "DONE"}
        statistics: Answer = {}
        try:
            statistics = {kind: {"outputRows": str(kinds[kind](configuration[kind]))}}
        except Refused as error:
            status["errorResult"] = {"reason": error.reason, "message": error.message}
            status["errors"] = [status["errorResult"]]
        self._jobs[key] = {
            "kind": "bigquery#job",
            "id": f"{names['project']}:{_LOCATION}.{reference['jobId']}",
            "jobReference": reference,
            "configuration": configuration,
            "status": status,
            "statistics": statistics,
        }
        return self._jobs[key]

    def _load(self, load: Answer) -> int:
        key = _key_of(load["destinationTable"])
        fields = normal_fields((load.get("schema") or {}).get("fields", ()))
        table = self._tables.get(key)
        if not fields and table is None:
            raise Refused(
                "FakeBigQuery does not guess columns: pass schema="
                if load.get("autodetect")
                else "No schema specified on job or table."
            )
        columns = fields or (table.fields if table is not None else [])
        rows: list[dict[str, Any]] = []
        for uri in load["sourceUris"]:
            for number, row in enumerate(rows_of_file(uri, load.get("sourceFormat") or "CSV"), 1):
                try:
                    rows.append(checked_row(row, columns, ignore_unknown=load.get("ignoreUnknownValues", False)))
                except RowRefused as error:
                    raise Refused(f"Error while reading data, row {number} of {uri}: {error.message}") from error
        return self._store(key, columns, rows, load)

    def _copy(self, copy: Answer) -> int:
        sources = copy.get("sourceTables") or [copy["sourceTable"]]
        tables = [self._table(_key_of(each)) for each in sources]
        rows = [row for table in tables for row in table.rows]
        return self._store(_key_of(copy["destinationTable"]), tables[0].fields, rows, copy)

    def _store(
        self, key: tuple[str, str, str], fields: list[dict[str, Any]], rows: list[dict[str, Any]], job: Answer
    ) -> int:
        """Put the rows of a job into its table, as the dispositions say: all of them or, with an error, none."""
        self._check_dataset(*key[:2])
        table = self._tables.get(key)
        disposition = job.get("writeDisposition") or "WRITE_APPEND"
        if table is None:
            if job.get("createDisposition") == "CREATE_NEVER":
                raise Refused(f"Not found: Table {_name(key)}", "notFound")
            self._tables[key] = StoredTable(fields, rows)
        elif disposition == "WRITE_TRUNCATE":
            self._tables[key] = StoredTable(fields, rows)
        elif disposition == "WRITE_EMPTY" and table.rows:
            raise Refused(f"Already Exists: Table {_name(key)}", "duplicate")
        else:
            table.check_same_columns(fields, _name(key))
            table.rows += rows
        return len(rows)


def _named(names: Reference) -> tuple[str, str, str]:
    """Return the table that the path of a request names."""
    return names["project"], names["dataset"], names["table"]


def _name(key: tuple[str, str, str]) -> str:
    return "{}:{}.{}".format(*key)


def _key_of(reference: Reference) -> tuple[str, str, str]:
    return reference["projectId"], reference["datasetId"], reference["tableId"]


def _reference(key: tuple[str, str, str]) -> Reference:
    return {"projectId": key[0], "datasetId": key[1], "tableId": key[2]}
