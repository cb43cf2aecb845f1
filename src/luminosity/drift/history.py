"""Results of tests over time, in a SQLite file with one row per test that any SQLite tool can read."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, dataclass, field, fields
from datetime import datetime, timezone
from math import nan
from typing import Any

from luminosity._text import list_some
from luminosity.drift.result import MMDTestResult
from luminosity.errors import DriftError

__all__ = ["DriftHistory", "PastTest"]

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
_FROM_VERSION_1 = (
    "ALTER TABLE tests RENAME TO old_tests",
    "DROP INDEX tests_of_one_kind",
    _CREATE,
    _INDEX,
    "INSERT INTO tests SELECT *, '', CASE drift WHEN 1 THEN 'drift' ELSE 'no drift' END FROM old_tests ORDER BY rowid",
    "DROP TABLE old_tests",
    f"PRAGMA user_version = {_VERSION}",
)


@dataclass(frozen=True)
class PastTest:
    """One test in a history.

    Tests with the same ``reference``, ``columns``, ``kernel`` and ``key`` can be compared. ``time`` is UTC in ISO 8601.
    ``threshold`` is what the statistic must exceed to be called drift, if the result has that quantile. ``key`` is what
    was tested of the columns, such as ``language=de``, or empty. ``statistic`` and ``mmd2`` are NaN if a key is gone or
    new. ``verdict`` is that of the result.
    """

    time: str
    reference: str
    current: str
    columns: str
    kernel: str
    statistic: float
    threshold: float | None
    mmd2: float
    p_value: float
    level: float
    drift: bool
    reference_rows: int
    current_rows: int
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])
    key: str = ""
    verdict: str = ""

    def __post_init__(self) -> None:
        if not self.verdict:
            object.__setattr__(self, "verdict", "drift" if self.drift else "no drift")

    @classmethod
    def of(
        cls,
        result: MMDTestResult,
        *,
        reference: str,
        current: str,
        columns: str = "",
        kernel: str | None = None,
        settings: Mapping[str, Any] | None = None,
        time: datetime | None = None,
        key: str = "",
    ) -> PastTest:
        """Return the entry for a result.

        ``kernel`` is the kernel as you requested it: a bandwidth chosen from the data differs between tests.
        """
        return cls(
            time=(time or datetime.now(timezone.utc)).astimezone(timezone.utc).isoformat(timespec="milliseconds"),
            reference=reference,
            current=current,
            columns=columns,
            kernel=kernel if kernel is not None else ", ".join(each.kernel for each in result.kernels),
            statistic=result.statistic,
            threshold=result.null_quantiles.get(round(1 - result.level, 9)),
            mmd2=result.mmd2,
            p_value=result.p_value,
            level=result.level,
            drift=result.drift,
            reference_rows=result.reference_rows,
            current_rows=result.current_rows,
            settings=settings or {},
            key=key,
            verdict=result.verdict,
        )

    def as_dict(self) -> dict[str, Any]:
        """Return the fields as a dictionary."""
        return asdict(self)


_COLUMNS = ", ".join(each.name for each in fields(PastTest))


class DriftHistory:
    """A history of tests in a SQLite file, which is created by the first ``append``. Processes may share the file.

    >>> import tempfile
    >>> history = DriftHistory(os.path.join(tempfile.mkdtemp(), "drift.sqlite"))
    >>> history.last("reference.parquet")
    []
    """

    def __init__(self, path: str | os.PathLike[str]) -> None:
        self._path = os.fspath(path)
        folder = os.path.dirname(os.path.abspath(self._path))
        if not os.path.isdir(folder):
            raise DriftError(f"{self._path}: can't keep a history there; there is no folder {folder}")
        # Check the file now: an error is more useful before a long test than after it.
        if os.path.exists(self._path):
            with self._opened():
                pass
        if not os.access(folder, os.W_OK) or (os.path.exists(self._path) and not os.access(self._path, os.W_OK)):
            raise DriftError(f"{self._path}: can't keep a history there; this user may not write to it and its folder")

    def append(self, *tests: PastTest) -> None:
        """Add tests to the file, all or none."""
        rows = [{**asdict(test), "settings": json.dumps(test.settings)} for test in tests]
        with self._opened() as database:
            database.execute("BEGIN IMMEDIATE")  # Two processes that write at once wait for each other.
            if not _version(database):
                database.execute(_CREATE)
                database.execute(_INDEX)
                database.execute(f"PRAGMA application_id = {_APPLICATION}")
                database.execute(f"PRAGMA user_version = {_VERSION}")
            places = ", ".join(f":{name}" for name in _COLUMNS.split(", "))
            database.executemany(f"INSERT INTO tests ({_COLUMNS}) VALUES ({places})", rows)
            database.execute("COMMIT")

    def last(
        self, reference: str, columns: str = "", kernel: str | None = None, most: int = 100, *, key: str = ""
    ) -> list[PastTest]:
        """Return the ``most`` newest tests against this reference, the oldest of them first."""
        if not os.path.exists(self._path):
            return []
        with self._opened() as database:
            if not _version(database):
                return []
            found = database.execute(
                f"SELECT {_COLUMNS} FROM tests WHERE reference = ? AND columns = ? AND (? IS NULL OR kernel = ?) "
                "AND key = ? ORDER BY time DESC, rowid DESC LIMIT ?",
                (reference, columns, kernel, kernel, key, most),
            ).fetchall()
        return [_test(row) for row in reversed(found)]

    @contextmanager
    def _opened(self) -> Generator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self._path, timeout=_WAIT_S, isolation_level=None)) as database:
                # One transaction for all checks: another process may be creating the tables.
                database.execute("BEGIN")
                is_old = self._check(database)
                database.execute("COMMIT")
                if is_old:
                    _convert(database)
                yield database
        except sqlite3.DatabaseError as error:
            raise DriftError(f"{self._path}: can't be used as a history of drift; {error}") from error

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


def _application(database: sqlite3.Connection) -> int:
    return database.execute("PRAGMA application_id").fetchone()[0]


def _version(database: sqlite3.Connection) -> int:
    return database.execute("PRAGMA user_version").fetchone()[0]


def _test(row: tuple[Any, ...]) -> PastTest:
    values: dict[str, Any] = dict(zip((each.name for each in fields(PastTest)), row, strict=True))
    values |= {"drift": bool(values["drift"]), "settings": json.loads(values["settings"])}
    values |= {name: nan for name in ("statistic", "mmd2") if values[name] is None}
    return PastTest(**values)
