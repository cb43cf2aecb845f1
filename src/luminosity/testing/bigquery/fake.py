"""A BigQuery for tests, inside the test's process: jobs, streaming inserts and temporary datasets, without a cloud."""

from __future__ import annotations

import os
import re
import sys
import threading
from collections.abc import Callable, Iterable, Iterator, Mapping, Sequence
from http.server import ThreadingHTTPServer
from types import TracebackType
from typing import Any
from urllib.parse import unquote

from luminosity.errors import InvalidArgument
from luminosity.testing.bigquery.direct_reads import DirectReads
from luminosity.testing.bigquery.for_beam import READS_VARIABLE, VARIABLE
from luminosity.testing.bigquery.http import BigQueryClient, handler_of
from luminosity.testing.bigquery.jobs import Jobs, Result
from luminosity.testing.bigquery.store import LOCATION, Answer, Key, Store, key_of, name_of, reference_of
from luminosity.testing.bigquery.tables import Refused, RowRefused, StoredTable, checked_row, normal_fields

__all__ = ["FakeBigQuery"]

Reference = dict[str, str]

_POLL_S = 0.02  # how late the server notices that it is closed
_TABLE = re.compile(r"(?:(?P<project>[^:.]+)[:.])?(?P<dataset>\w+)\.(?P<table>[\w$-]+)")
_PREFIX = r"/bigquery/v2/projects/(?P<project>[^/]+)"
_IN_DATASET = _PREFIX + r"/datasets/(?P<dataset>[^/]+)"


class FakeBigQuery:
    """A BigQuery for tests, inside this process: it keeps tables in memory and records every job.

    In the ``with`` block, ``BIGQUERY_EMULATOR_HOST`` leads to it: Beam's sink and sources find it, also in workers, and
    so does Google's client. Leave the block, and it is gone::

        with FakeBigQuery() as bigquery:
            bigquery.create_table("dataset.reviews", [{"name": "text", "type": "STRING"}], [{"text": "fine"}])
            with beam.Pipeline() as pipeline:
                rows = pipeline | beam.io.ReadFromBigQuery(table="project:dataset.reviews", gcs_location="/tmp/files")
                rows | beam.io.WriteToBigQuery(
                    "project:dataset.copies", schema="text:STRING", method="FILE_LOADS",
                    custom_gcs_temp_location="/tmp/files", validate=False,
                )
            assert bigquery.rows("dataset.copies") == [{"text": "fine"}]
            extract, load = bigquery.jobs

    Files go to a folder instead of ``gs://``: the source takes one, the sink with ``validate=False``. Rows, columns and
    dispositions are checked as BigQuery does: a load job with a bad row loads nothing, and a streaming insert
    returns the rows that it refuses.

    It is not a full BigQuery: it returns what ``prepare_query`` says for a query, knows no partitions, and does not
    guess columns. Requests for what it does not have are refused with a message.

    >>> with FakeBigQuery() as bigquery:
    ...     bigquery.create_table("dataset.words", [{"name": "word", "type": "STRING"}], [{"word": "yes"}])
    ...     bigquery.rows("dataset.words"), bigquery.tables
    ([{'word': 'yes'}], ['project:dataset.words'])

    Args:
        project: the project of tables whose name has none.
        datasets: the datasets of the project that exist.
        rows_per_file: how many rows a file of an extract job gets, and a stream of a direct read.
    """

    def __init__(
        self, project: str = "project", datasets: Iterable[str] = ("dataset",), rows_per_file: int = 10_000
    ) -> None:
        if rows_per_file < 1:
            raise InvalidArgument(f"found rows_per_file={rows_per_file}, expected 1 or more")
        self._project = project
        self._lock = threading.Lock()
        self._store = Store(project, datasets)
        self._jobs = Jobs(self._store, rows_per_file)
        self._reads = DirectReads(self._copy_of, rows_per_file)
        self._environment: dict[str, str | None] = {}
        self._server = ThreadingHTTPServer(("127.0.0.1", 0), handler_of(self._answer))
        self._server.daemon_threads = True
        self._thread = threading.Thread(
            target=self._server.serve_forever, args=[_POLL_S], name="fake-bigquery", daemon=True
        )
        self._thread.start()

    def __enter__(self) -> FakeBigQuery:
        variables = {VARIABLE: self.url, READS_VARIABLE: self._reads.host}
        self._environment = {name: os.environ.get(name) for name in variables}
        os.environ.update(variables)
        return self

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, trace: TracebackType | None
    ) -> None:
        for name, value in self._environment.items():
            if value is None:
                os.environ.pop(name, None)
            else:
                os.environ[name] = value
        self.close()

    def close(self) -> None:
        """Stop the server and drop all tables. A second call does nothing."""
        if self._thread.is_alive():
            self._server.shutdown()
            self._thread.join()
            self._server.server_close()
            self._reads.close()
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
            return self._jobs.all()

    @property
    def tables(self) -> list[str]:
        """The names of all tables that exist, temporary ones, too: ``project:dataset.table``."""
        with self._lock:
            return [name_of(key) for key in self._store.tables]

    @property
    def datasets(self) -> list[str]:
        """The names of all datasets that exist, temporary ones, too: ``project:dataset``."""
        with self._lock:
            return self._store.datasets

    def rows(self, table: str) -> list[dict[str, Any]]:
        """Return the rows of a table, in the order in which they arrived; times are datetimes."""
        key = self._key(table)
        with self._lock:
            if key not in self._store.tables:
                there = ", ".join(name_of(each) for each in self._store.tables) or "no tables"
                raise InvalidArgument(f"found no table {name_of(key)}, expected one that exists: there are {there}")
            return list(self._store.tables[key].rows)

    def create_table(
        self, table: str, fields: Sequence[Mapping[str, Any]], rows: Iterable[Mapping[str, Any]] = ()
    ) -> None:
        """Create a table with these columns, as the REST API describes them, and rows."""
        key = self._key(table)
        columns = normal_fields(fields)
        with self._lock:
            if key in self._store.tables:
                raise InvalidArgument(f"found the table {table!r}, expected a name that is not taken")
            if "{}:{}".format(*key) not in self._store.datasets:
                raise InvalidArgument(f"found no dataset {key[1]!r}, expected one of FakeBigQuery(datasets=...)")
            self._store.tables[key] = _filled(columns, rows)

    def prepare_query(
        self,
        query: str,
        fields: Sequence[Mapping[str, Any]],
        rows: Iterable[Mapping[str, Any]],
        reads: Iterable[str] = (),
    ) -> None:
        """Say what a query returns, in these columns. ``reads`` are the tables that it names: they must exist then."""
        result = Result(_filled(normal_fields(fields), rows), tuple(map(self._key, reads)))
        with self._lock:
            self._jobs.results[query] = result

    def _key(self, table: str) -> Key:
        found = _TABLE.fullmatch(table)
        if found is None:
            raise InvalidArgument(f"found the table {table!r}, expected dataset.table or project:dataset.table")
        return found["project"] or self._project, found["dataset"], found["table"]

    def _copy_of(self, key: Key) -> StoredTable:
        """Return a table as it is now, for a direct read."""
        with self._lock:
            table = self._store.table(key)
            return StoredTable(table.fields, list(table.rows))

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
        yield "GET", _PREFIX + "/datasets", self._list_datasets
        yield "POST", _PREFIX + "/datasets", self._insert_dataset
        yield "GET", _IN_DATASET, self._get_dataset
        yield "DELETE", _IN_DATASET, self._delete_dataset
        yield "POST", _IN_DATASET + "/tables", self._insert_table
        yield "GET", _IN_DATASET + "/tables/(?P<table>[^/]+)", self._get_table
        yield "DELETE", _IN_DATASET + "/tables/(?P<table>[^/]+)", self._delete_table
        yield "GET", _IN_DATASET + "/tables/(?P<table>[^/]+)/data", self._list_rows
        yield "POST", _IN_DATASET + "/tables/(?P<table>[^/]+)/insertAll", self._insert_rows

    def _list_datasets(self, names: Reference, body: Answer) -> Answer:
        return {"datasets": self._store.datasets_with(names["project"], body.get("filter", ""))}

    def _insert_dataset(self, names: Reference, body: Answer) -> Answer:
        return self._store.create_dataset(body)

    def _get_dataset(self, names: Reference, body: Answer) -> Answer:
        return self._store.dataset(names["project"], names["dataset"])

    def _delete_dataset(self, names: Reference, body: Answer) -> Answer:
        with_tables = body.get("deleteContents", "").lower() == "true"
        self._store.delete_dataset(names["project"], names["dataset"], with_tables=with_tables)
        return {}

    def _get_table(self, names: Reference, body: Answer) -> Answer:
        key = _named(names)
        table = self._store.table(key)
        return {
            "tableReference": reference_of(key),
            "schema": {"fields": table.fields},
            "numRows": str(len(table.rows)),
            "numBytes": str(table.size),
            "location": LOCATION,
        }

    def _insert_table(self, names: Reference, body: Answer) -> Answer:
        key = key_of(body["tableReference"])
        self._store.dataset(*key[:2])
        if key in self._store.tables:
            raise Refused(f"Already Exists: Table {name_of(key)}", "duplicate")
        self._store.tables[key] = StoredTable(normal_fields(body["schema"]["fields"]))
        return body

    def _delete_table(self, names: Reference, body: Answer) -> Answer:
        key = _named(names)
        self._store.table(key)
        del self._store.tables[key]
        return {}

    def _list_rows(self, names: Reference, body: Answer) -> Answer:
        return {"totalRows": str(len(self._store.table(_named(names)).rows))}

    def _insert_rows(self, names: Reference, body: Answer) -> Answer:
        table = self._store.table(_named(names))
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
        return self._jobs.get(names["project"], names["job"])

    def _insert_job(self, names: Reference, body: Answer) -> Answer:
        return self._jobs.insert(names["project"], body)


def _filled(columns: list[Answer], rows: Iterable[Mapping[str, Any]]) -> StoredTable:
    try:
        return StoredTable(columns, [checked_row(row, columns) for row in rows])
    except RowRefused as error:
        raise InvalidArgument(f"found a row that does not fit the columns: {error.message}") from error


def _named(names: Reference) -> Key:
    """Return the table that the path of a request names."""
    return names["project"], names["dataset"], names["table"]
