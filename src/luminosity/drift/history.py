"""What tests found over time, in a small file of SQLite: one row a test, and any tool of SQLite can look at it."""

from __future__ import annotations

import json
import os
import sqlite3
from collections.abc import Generator, Mapping
from contextlib import closing, contextmanager
from dataclasses import asdict, astuple, dataclass, field, fields
from datetime import datetime, timezone
from typing import Any

from luminosity.drift.result import MMDTestResult
from luminosity.errors import DriftError

__all__ = ["DriftHistory", "PastTest"]

_APPLICATION = 0x4C554D44  # "LUMD", in the file's header: it is ours
_VERSION = 1
_WAIT_S = 30.0  # for another process that writes at the same moment
_CREATE = """
CREATE TABLE tests (
    time TEXT NOT NULL, reference TEXT NOT NULL, current TEXT NOT NULL, columns TEXT NOT NULL, kernel TEXT NOT NULL,
    statistic REAL NOT NULL, threshold REAL, mmd2 REAL NOT NULL, p_value REAL NOT NULL, level REAL NOT NULL,
    drift INTEGER NOT NULL, reference_rows INTEGER NOT NULL, current_rows INTEGER NOT NULL, settings TEXT NOT NULL
)
"""
_INDEX = "CREATE INDEX tests_of_one_kind ON tests (reference, columns, kernel)"


@dataclass(frozen=True)
class PastTest:
    """``reference``, ``columns`` and ``kernel`` say which tests can be compared; ``time`` is UTC as ISO 8601 has it."""

    time: str
    reference: str
    current: str
    columns: str
    kernel: str
    statistic: float
    threshold: float | None  # what the statistic must exceed to be called drift, where the result tells
    mmd2: float
    p_value: float
    level: float
    drift: bool
    reference_rows: int
    current_rows: int
    settings: Mapping[str, Any] = field(default_factory=dict[str, Any])

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
    ) -> PastTest:
        """``kernel`` is as it was asked for: a bandwidth that the data decides differs from run to run."""
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
        )

    def as_dict(self) -> dict[str, Any]:
        return asdict(self)


_COLUMNS = ", ".join(each.name for each in fields(PastTest))


class DriftHistory:
    """A file that is made when it is first written to.

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
        # Whether it is ours, and can be written to, is better known before a long test than after it.
        if os.path.exists(self._path):
            with self._opened():
                pass
        if not os.access(folder, os.W_OK) or (os.path.exists(self._path) and not os.access(self._path, os.W_OK)):
            raise DriftError(f"{self._path}: can't keep a history there; no right to write to it and its folder")

    def append(self, test: PastTest) -> None:
        *plain, settings = astuple(test)
        with self._opened() as database:
            database.execute("BEGIN IMMEDIATE")  # Two that come at once wait for each other.
            if not _version(database):
                database.execute(_CREATE)
                database.execute(_INDEX)
                database.execute(f"PRAGMA application_id = {_APPLICATION}")
                database.execute(f"PRAGMA user_version = {_VERSION}")
            places = ", ".join("?" * (len(plain) + 1))
            database.execute(f"INSERT INTO tests ({_COLUMNS}) VALUES ({places})", (*plain, json.dumps(settings)))
            database.execute("COMMIT")

    def last(self, reference: str, columns: str = "", kernel: str | None = None, most: int = 100) -> list[PastTest]:
        """The newest tests against this reference, the oldest of them first."""
        if not os.path.exists(self._path):
            return []
        with self._opened() as database:
            if not _version(database):
                return []
            found = database.execute(
                f"SELECT {_COLUMNS} FROM tests WHERE reference = ? AND columns = ? AND (? IS NULL OR kernel = ?) "
                "ORDER BY time DESC, rowid DESC LIMIT ?",
                (reference, columns, kernel, kernel, most),
            ).fetchall()
        return [_test(row) for row in reversed(found)]

    @contextmanager
    def _opened(self) -> Generator[sqlite3.Connection]:
        try:
            with closing(sqlite3.connect(self._path, timeout=_WAIT_S, isolation_level=None)) as database:
                # What is asked is answered of one moment: another process may be making the tables.
                database.execute("BEGIN")
                self._check(database)
                database.execute("COMMIT")
                yield database
        except sqlite3.DatabaseError as error:
            raise DriftError(f"{self._path}: can't be used as a history of drift; {error}") from error

    def _check(self, database: sqlite3.Connection) -> None:
        application, version = _application(database), _version(database)
        if (application, version) == (_APPLICATION, _VERSION):
            return
        tables = [name for (name,) in database.execute("SELECT name FROM sqlite_master WHERE type = 'table'")]
        if application == _APPLICATION:
            raise DriftError(
                f"{self._path}: is a history of version {version}, expected {_VERSION}; "
                "it was written by another version of Luminosity"
            )
        if application or version or tables:
            raise DriftError(
                f"{self._path}: is a database of something else (tables: {', '.join(tables[:5]) or 'none'}), "
                "expected a history of drift, or a file that is not there yet"
            )


def _application(database: sqlite3.Connection) -> int:
    return database.execute("PRAGMA application_id").fetchone()[0]


def _version(database: sqlite3.Connection) -> int:
    return database.execute("PRAGMA user_version").fetchone()[0]


def _test(row: tuple[Any, ...]) -> PastTest:
    values: dict[str, Any] = dict(zip((each.name for each in fields(PastTest)), row, strict=True))
    values |= {"drift": bool(values["drift"]), "settings": json.loads(values["settings"])}
    return PastTest(**values)
