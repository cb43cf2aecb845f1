"""The jobs of a fake BigQuery: they load files, copy tables, export them, and bring prepared results of queries."""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, NamedTuple

from luminosity.testing.bigquery.exports import write_files
from luminosity.testing.bigquery.store import LOCATION, Answer, Key, Store, key_of, name_of, reference_of
from luminosity.testing.bigquery.tables import (
    Refused,
    RowRefused,
    StoredTable,
    checked_row,
    normal_fields,
    rows_of_file,
)

__all__ = ["Jobs", "Result"]


class Result(NamedTuple):
    """What a query returns."""

    table: StoredTable
    reads: tuple[Key, ...]  # the tables that the query names


class Jobs:
    """All jobs, each of which runs to its end at once. It has no lock: its owner holds one in every call."""

    def __init__(self, store: Store, rows_per_file: int) -> None:
        self.results: dict[str, Result] = {}  # by the text of the query
        self._store = store
        self._rows_per_file = rows_per_file
        self._done: dict[tuple[str, str], Answer] = {}

    def all(self) -> list[Answer]:
        """Return all jobs in order, but those that only asked whether they could run."""
        return list(self._done.values())

    def get(self, project: str, job: str) -> Answer:
        """Return a job, or raise :class:`Refused`."""
        try:
            return self._done[project, job]
        except KeyError:
            raise Refused(f"Not found: Job {project}:{job}", "notFound") from None

    def insert(self, project: str, body: Answer) -> Answer:
        """Run a job to its end. A job that fails is an answer, too: its status says why."""
        reference = {**body["jobReference"], "location": LOCATION}
        key = (project, reference["jobId"])
        if key in self._done:
            raise Refused(f"Already Exists: Job {project}:{LOCATION}.{reference['jobId']}", "duplicate")
        configuration = body["configuration"]
        kinds: dict[str, Callable[[Answer], Answer]] = {
            "load": self._load,
            "copy": self._copy,
            "extract": self._extract,
            "query": self._query,
        }
        kind = next((kind for kind in kinds if kind in configuration), None)
        if kind is None:
            raise Refused(f"FakeBigQuery runs {', '.join(kinds)} jobs, found {sorted(configuration)}", "notImplemented")
        status: Answer = {"state": "DONE"}
        statistics: Answer = {}
        result = self._result_of(configuration[kind]) if kind == "query" else None
        try:
            if result is not None:
                statistics = _statistics(result)
            if not configuration.get("dryRun"):
                statistics[kind] = {**statistics.get(kind, {}), **kinds[kind](configuration[kind])}
        except Refused as error:
            status["errorResult"] = {"reason": error.reason, "message": error.message}
            status["errors"] = [status["errorResult"]]
        job: Answer = {
            "kind": "bigquery#job",
            "id": f"{project}:{LOCATION}.{reference['jobId']}",
            "jobReference": reference,
            "configuration": configuration,
            "status": status,
            "statistics": statistics,
        }
        if not configuration.get("dryRun"):
            self._done[key] = job
        return job

    def _load(self, load: Answer) -> Answer:
        key = key_of(load["destinationTable"])
        fields = normal_fields((load.get("schema") or {}).get("fields", ()))
        table = self._store.tables.get(key)
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
        self._store.put(key, columns, rows, load, "WRITE_APPEND")
        return {"outputRows": str(len(rows))}

    def _copy(self, copy: Answer) -> Answer:
        sources = copy.get("sourceTables") or [copy["sourceTable"]]
        tables = [self._store.table(key_of(each)) for each in sources]
        rows = [row for table in tables for row in table.rows]
        self._store.put(key_of(copy["destinationTable"]), tables[0].fields, rows, copy, "WRITE_APPEND")
        return {"outputRows": str(len(rows))}

    def _extract(self, extract: Answer) -> Answer:
        table = self._store.table(key_of(extract["sourceTable"]))
        counts = write_files(table.fields, table.rows, extract, self._rows_per_file)
        return {"destinationUriFileCounts": [str(count) for count in counts]}

    def _query(self, query: Answer) -> Answer:
        if "destinationTable" not in query:
            raise Refused("FakeBigQuery puts results into a destinationTable, found none")
        table = self._result_of(query).table
        self._store.put(key_of(query["destinationTable"]), table.fields, list(table.rows), query, "WRITE_EMPTY")
        return {}

    def _result_of(self, query: Answer) -> Result:
        """Return the result of a query. A query without one is refused before it is a job, as a wrong one is."""
        text = query["query"]
        if text not in self.results:
            known = ", ".join(map(repr, self.results)) or "none"
            raise Refused(
                f"FakeBigQuery runs queries whose result is prepared, with prepare_query: {known}. Found {text!r}",
                "invalidQuery",
            )
        result = self.results[text]
        for key in result.reads:
            if key not in self._store.tables:
                raise Refused(f"Not found: Table {name_of(key)} was not found", "notFound")
        return result


def _statistics(result: Result) -> Answer:
    size = str(result.table.size)
    tables = [reference_of(key) for key in result.reads]
    return {"totalBytesProcessed": size, "query": {"totalBytesProcessed": size, "referencedTables": tables}}
