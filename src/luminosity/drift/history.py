"""Results of tests over time, in a SQLite file with one row per test that any SQLite tool can read."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Generator, Sequence
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, fields
from datetime import datetime, timezone
from math import nan
from typing import Any
from urllib.parse import quote

from luminosity._shared.text import list_some
from luminosity.drift.result import MMD, PastTest, utc_text
from luminosity.errors import DriftError

__all__ = ["MOST_ROWS", "DriftHistory", "Series"]

MOST_ROWS = 100_000  # rows of repeated tests in a file: about 80 MB

_APPLICATION = 0x4C554D44  # "LUMD" in the file's header marks a history of drift
_VERSION = 2  # 1 had no keys and verdicts; such a file is converted when it is opened
_WAIT_S = 30.0  # how long to wait for another process that writes at the same time
_CREATE = """
CREATE TABLE tests (
    time TEXT NOT NULL, reference TEXT NOT NULL, current TEXT NOT NULL, columns TEXT NOT NULL, kernel TEXT NOT NULL,
    statistic REAL, threshold REAL, mmd2 REAL, p_value REAL NOT NULL, level REAL NOT NULL,
    drift INTEGER NOT NULL, reference_rows INTEGER NOT NULL, current_rows INTEGER NOT NULL, settings TEXT NOT NULL,
    key TEXT NOT NULL, verdict TEXT NOT NULL
)
"""
_INDEX = "CREATE INDEX tests_of_one_kind ON tests (reference, columns, kernel)"
# Fields that came later are columns that may be null. The version stays: an older Luminosity names the columns that it
# knows when it reads and writes, and so ignores these.
_ADDED = {
    "window_start": "TEXT",
    "window_end": "TEXT",
    "bandwidth": "REAL",
    "floor_mmd2": "REAL",
    "report": "TEXT",
    "recorded_at": "TEXT",
    "once": "TEXT",
    "test": "TEXT",
    "effect": "REAL",
    "effect_name": "TEXT",
}
_ONCE_COLUMNS = "reference, columns, kernel, key, once"
_ONCE_INDEX = f"CREATE UNIQUE INDEX IF NOT EXISTS tests_once ON tests ({_ONCE_COLUMNS}) WHERE once IS NOT NULL"
_SERIES_INDEX = "CREATE INDEX IF NOT EXISTS tests_of_one_series ON tests (reference, key, columns, kernel, time)"
_PRUNED_AT_ONCE = 100  # rows beyond the limit before they are deleted: pruning is not worth it for every row
_FROM_VERSION_1 = (
    "ALTER TABLE tests RENAME TO old_tests",
    "DROP INDEX tests_of_one_kind",
    _CREATE,
    _INDEX,
    "INSERT INTO tests SELECT *, '', CASE drift WHEN 1 THEN 'drift' ELSE 'no drift' END FROM old_tests ORDER BY rowid",
    "DROP TABLE old_tests",
    f"PRAGMA user_version = {_VERSION}",
)


_NAMES = tuple(each.name for each in fields(PastTest))


@dataclass(frozen=True)
class Series:
    """Tests in a history that can be compared with each other."""

    reference: str
    columns: str
    kernel: str
    key: str


class DriftHistory:
    """A history of tests in a SQLite file, which is created by the first ``append``. Processes may share the file.

    ``limit`` bounds the file: of the rows that ``RecordDrift`` and ``lum drift watch`` write, the oldest are deleted if
    there are more. Rows of ``lum drift`` are never deleted. With ``read_only``, a file that exists is only read.

    >>> import tempfile
    >>> history = DriftHistory(os.path.join(tempfile.mkdtemp(), "drift.sqlite"))
    >>> history.last("reference.parquet")
    []
    """

    def __init__(self, path: str | os.PathLike[str], *, limit: int = MOST_ROWS, read_only: bool = False) -> None:
        if limit < 1:
            raise DriftError(f"found limit={limit}, expected at least one row")
        self._path = os.fspath(path)
        self._limit = limit
        self._read_only = read_only
        folder = os.path.dirname(os.path.abspath(self._path))
        if not os.path.isdir(folder):
            raise DriftError(f"{self._path}: can't keep a history there; there is no folder {folder}")
        # Check the file now: an error is more useful before a long test than after it.
        if os.path.exists(self._path):
            with self._opened():
                pass
        if read_only:
            return
        if not os.access(folder, os.W_OK) or (os.path.exists(self._path) and not os.access(self._path, os.W_OK)):
            raise DriftError(f"{self._path}: can't keep a history there; this user may not write to it and its folder")

    def append(self, *tests: PastTest) -> None:
        """Add tests to the file, all or none. A test with ``once`` replaces the row of the same series and ``once``."""
        now = utc_text(datetime.now(timezone.utc))
        rows = [
            {**asdict(test), "settings": json.dumps(test.settings), "recorded_at": test.recorded_at or now}
            for test in tests
        ]
        places = ", ".join(f":{name}" for name in _NAMES)
        changed = ", ".join(f"{name} = excluded.{name}" for name in _NAMES if name not in _ONCE_COLUMNS.split(", "))
        with self._opened() as database:
            database.execute("BEGIN IMMEDIATE")  # Two processes that write at once wait for each other.
            if not _version(database):
                database.execute(_CREATE)
                database.execute(_INDEX)
                database.execute(f"PRAGMA application_id = {_APPLICATION}")
                database.execute(f"PRAGMA user_version = {_VERSION}")
            _add_columns(database)
            database.executemany(
                f"INSERT INTO tests ({', '.join(_NAMES)}) VALUES ({places}) "
                f"ON CONFLICT ({_ONCE_COLUMNS}) WHERE once IS NOT NULL DO UPDATE SET {changed}",
                rows,
            )
            self._prune(database)
            database.execute("COMMIT")

    def last(
        self, reference: str, columns: str = "", kernel: str | None = None, most: int = 100, *, key: str = ""
    ) -> list[PastTest]:
        """Return the ``most`` newest tests against this reference, the oldest of them first."""
        of_kernel = ("", ()) if kernel is None else ("AND kernel = ? ", (kernel,))
        found = self._select(
            f"reference = ? AND columns = ? AND key = ? {of_kernel[0]}ORDER BY time DESC, rowid DESC LIMIT ?",
            (reference, columns, key, *of_kernel[1], most),
        )
        return [test for _, test in reversed(found)]

    def series(self, most: int = 10_000) -> list[Series]:
        """Return what was tested, sorted: each reference with its columns, kernels and keys."""
        names = ("reference", "columns", "kernel", "key")
        if not os.path.exists(self._path):
            return []
        with self._opened() as database:
            if not _version(database):
                return []
            known = _columns_of(database)
            chosen = ", ".join(name if name in known else "''" for name in names)
            rows = database.execute(
                f"SELECT DISTINCT {chosen} FROM tests ORDER BY 1, 4, 2, 3 LIMIT ?", (most,)
            ).fetchall()
        return [Series(*row) for row in rows]

    def after(self, number: int, reference: str, most: int = 10_000) -> list[tuple[int, PastTest]]:
        """Return the tests of a reference that were added after the row ``number``, with their numbers, in order."""
        return self._select("reference = ? AND rowid > ? ORDER BY rowid LIMIT ?", (reference, number, most))

    def newest(self, most: int = 10_000) -> list[PastTest]:
        """Return the newest test of each series; of ``most`` series, those with the newest tests first."""
        places = "row_number() OVER (PARTITION BY reference, columns, kernel, key ORDER BY time DESC, rowid DESC)"
        found = self._select(
            f"rowid IN (SELECT rowid FROM (SELECT rowid, {places} AS place FROM tests) WHERE place = 1) "
            "ORDER BY time DESC, rowid DESC LIMIT ?",
            (most,),
        )
        return [test for _, test in found]

    def newest_number(self) -> int:
        """Return the number of the newest row, or 0 if there is none."""
        if not os.path.exists(self._path):
            return 0
        with self._opened() as database:
            if not _version(database):
                return 0
            return database.execute("SELECT COALESCE(MAX(rowid), 0) FROM tests").fetchone()[0]

    def _select(self, condition: str, values: tuple[Any, ...]) -> list[tuple[int, PastTest]]:
        if not os.path.exists(self._path):
            return []
        with self._opened() as database:
            if not _version(database):
                return []
            known = _columns_of(database)
            names = [name for name in _NAMES if name in known]
            if "key" not in known:  # version 1, which a reader does not convert
                condition = condition.replace("AND key = ?", "AND '' = ?").replace("kernel, key ORDER", "kernel ORDER")
            rows = database.execute(f"SELECT rowid, {', '.join(names)} FROM tests WHERE {condition}", values).fetchall()
        return [(row[0], _test(names, row[1:])) for row in rows]

    def _prune(self, database: sqlite3.Connection) -> None:
        """Delete the oldest rows beyond the limit. SQLite uses their space for the next rows."""
        (count,) = database.execute("SELECT COUNT(*) FROM tests WHERE once IS NOT NULL").fetchone()
        if count > self._limit + min(_PRUNED_AT_ONCE, self._limit // 10):
            database.execute(
                "DELETE FROM tests WHERE rowid IN "
                "(SELECT rowid FROM tests WHERE once IS NOT NULL ORDER BY rowid LIMIT ?)",
                (count - self._limit,),
            )

    @contextmanager
    def _opened(self) -> Generator[sqlite3.Connection]:
        try:
            with closing(self._connect()) as database:
                # One transaction for all checks: another process may be creating the tables.
                database.execute("BEGIN")
                is_old = self._check(database)
                database.execute("COMMIT")
                if is_old and not self._read_only:
                    _convert(database)
                yield database
        except sqlite3.DatabaseError as error:
            raise DriftError(f"{self._path}: can't be used as a history of drift; {error}") from error

    def _connect(self) -> sqlite3.Connection:
        if not self._read_only:
            return sqlite3.connect(self._path, timeout=_WAIT_S, isolation_level=None)
        address = f"file:{quote(os.path.abspath(self._path))}?mode=ro"
        return sqlite3.connect(address, timeout=_WAIT_S, isolation_level=None, uri=True)

    def _check(self, database: sqlite3.Connection) -> bool:
        """Return whether the history is of version 1. Raise an error if the file is not a history."""
        application, version = _application(database), _version(database)
        if application == _APPLICATION and version in (1, _VERSION):
            return version == 1
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        if application == _APPLICATION:
            raise DriftError(
                f"{self._path}: found a history of version {version}, expected {_VERSION}; "
                "it was written by another version of Luminosity"
            )
        if application or version or tables:
            raise DriftError(
                f"{self._path}: found a database of something else (tables: {list_some(tables, 5) or 'none'}), "
                "expected a history of drift, or a file that does not exist yet"
            )
        return False


def _convert(database: sqlite3.Connection) -> None:
    database.execute("BEGIN IMMEDIATE")
    if _version(database) == 1:  # Another process may have converted it while this one waited.
        for statement in _FROM_VERSION_1:
            database.execute(statement)
    database.execute("COMMIT")


def _columns_of(database: sqlite3.Connection) -> set[str]:
    return {row[1] for row in database.execute("PRAGMA table_info(tests)")}


def _add_columns(database: sqlite3.Connection) -> None:
    """Add the columns that an older version of Luminosity did not write."""
    known = _columns_of(database)
    for name, kind in _ADDED.items():
        if name not in known:
            database.execute(f"ALTER TABLE tests ADD COLUMN {name} {kind}")
    database.execute(_ONCE_INDEX)
    database.execute(_SERIES_INDEX)


def _application(database: sqlite3.Connection) -> int:
    return database.execute("PRAGMA application_id").fetchone()[0]


def _version(database: sqlite3.Connection) -> int:
    return database.execute("PRAGMA user_version").fetchone()[0]


def _test(names: Sequence[str], row: Sequence[Any]) -> PastTest:
    values: dict[str, Any] = dict(zip(names, row, strict=True))
    values |= {"drift": bool(values["drift"]), "settings": json.loads(values["settings"])}
    values |= {name: nan for name in ("statistic", "mmd2") if values[name] is None}
    values["test"] = values.get("test") or MMD
    return PastTest(**values)
