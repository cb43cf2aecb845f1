"""A Lance dataset, and the ways to add staged rows to it. Each can be repeated with the same result."""

from __future__ import annotations

import contextlib
import json
import os
from collections.abc import Collection, Generator, Hashable
from typing import Any

import pyarrow as pa
import pyarrow.compute as pc
from apache_beam.io.filesystems import FileSystems

from luminosity.errors import Fix, StoreError, may_pass
from luminosity.extras import require
from luminosity.io.folders import lock_folder
from luminosity.io.stores.points import DELETED
from luminosity.io.stores.staging import StagedRows

__all__ = ["NOTE_SUFFIX", "LanceTable", "last_of_each", "literal"]

NOTE_SUFFIX = ".note.json"
"""The names of the notes of panes end like this."""
_APPENDED = -1  # the version in a note whose rows are in the dataset
_KEYS_AT_ONCE = 1_000  # deleted by one statement: keeps its text short
_LOCK_TIMEOUT_S = 600.0  # how long another job may take to create the dataset with all its rows


class LanceTable:
    """A Lance dataset, which need not exist yet."""

    def __init__(self, path: str) -> None:
        lancedb = require("lancedb", "lance")
        self._path = path
        folder, name = os.path.split(path)
        self._name = name.removesuffix(".lance")
        with self.errors():
            self._database = lancedb.connect(folder or ".")

    def rows(self) -> Any:
        """Return all rows as a ``pyarrow.Table``, or None if the dataset does not exist."""
        with self.errors():
            table = self._opened()
            return None if table is None else table.to_arrow()

    def opened(self) -> Any:
        """Return the dataset as lancedb opens it, or None if it does not exist."""
        with self.errors():
            return self._opened()

    def overwrite(self, rows: Any) -> None:
        """Replace all rows by those of a ``pyarrow.RecordBatchReader``."""
        with self.errors():
            self._database.create_table(self._name, rows, mode="overwrite")

    def clear(self) -> None:
        """Remove all rows, and keep the columns. Does nothing if the dataset does not exist."""
        with self.errors():
            table = self._opened()
            if table is not None:
                self._database.create_table(self._name, schema=table.schema, mode="overwrite")

    def is_begun(self, note: str) -> bool:
        """Return whether a call before this one was made with the same note: what is there may be its own work."""
        with self.errors():
            if _read_note(note) is not None:
                return True
            _write_note(note, 0)
            return False

    def append(self, rows: StagedRows, count: int, note: str) -> None:
        """Append rows once, even if a worker died while appending: the note holds the version before."""
        with self.errors():
            table = self._opened()
            before = _read_note(note)
            if before is None:
                before = 0 if table is None else table.version
                _write_note(note, before)
            elif table is not None and self._was_appended(table, before, count):
                return
            if table is None:
                if self._was_made(rows.reader()):
                    return
                table = self._opened()
            self._check(table, rows.schema)
            table.add(rows.reader())

    def append_pane(self, rows: StagedRows, count: int, note: str) -> None:
        """Append the rows of a pane of a stream once, although other panes are appended by other workers.

        Panes of a run are appended one after the other. So if a worker dies while it appends, the next one can tell
        from the note of that pane whether its rows are in the dataset. Remove the note when the step is committed.
        """
        folder = os.path.dirname(note)
        with self.errors(), lock_folder(folder, _LOCK_TIMEOUT_S):
            self._settle(folder)
            if _read_note(note) == _APPENDED:
                return
            table = self._opened()
            _write_note(note, 0 if table is None else table.version, count)
            if table is not None or not self._was_made(rows.reader()):
                table = self._opened()
                self._check(table, rows.schema)
                table.add(rows.reader())
            _write_note(note, _APPENDED)

    def _settle(self, folder: str) -> None:
        """Find out whether the panes whose workers died were appended."""
        for found in FileSystems.match([FileSystems.join(folder, f"*{NOTE_SUFFIX}")])[0].metadata_list:
            before, table = _read_note(found.path), self._opened()
            if before is not None and before != _APPENDED:
                if table is not None and self._was_appended(table, before, _read_count(found.path)):
                    _write_note(found.path, _APPENDED)
                else:
                    FileSystems.delete([found.path])

    def merge(
        self, rows: StagedRows, key: str, newer: Collection[Hashable] = (), schema: pa.Schema | None = None
    ) -> set[Hashable]:
        """Merge file by file, since a key may occur only once in what Lance merges. Returns the keys of all rows.

        Rows with keys in ``newer`` are left out. ``schema`` is that of the dataset if it differs from that of the rows.
        """
        keys: set[Hashable] = set()
        kept = schema or pa.schema([field for field in rows.schema if field.name != DELETED])
        with self.errors():
            table = self._opened()
            if table is None:
                self._was_made(kept.empty_table().to_reader())
                table = self._opened()
            self._check(table, kept)
            for path in rows.paths:
                found = last_of_each(rows.reader(path).read_all(), key)
                keys.update(found[key].to_pylist())
                if newer and not keys.isdisjoint(newer):
                    found = found.filter(pa.array([value not in newer for value in found[key].to_pylist()]))
                marks = pc.field(DELETED) if DELETED in found.schema.names else None
                changed = found if marks is None else found.filter(marks.is_null() | ~marks)
                if changed.num_rows:
                    merging = table.merge_insert(key).when_matched_update_all().when_not_matched_insert_all()
                    merging.execute(changed.select(kept.names).cast(kept))
                if marks is not None:
                    _delete(table, key, found.filter(marks)[key].to_pylist())
        return keys

    def _opened(self) -> Any:
        """Return the dataset, or None if it does not exist."""
        return self._database.open_table(self._name) if FileSystems.exists(self._path) else None

    def _was_made(self, rows: Any) -> bool:
        """Create the dataset with these rows; return False if another job has created it in the meantime.

        The lock is needed because Lance silently keeps only the rows of the second of two jobs that create a dataset.
        """
        with lock_folder(os.path.dirname(self._path) or ".", _LOCK_TIMEOUT_S):
            if self._opened() is not None:
                return False
            self._database.create_table(self._name, rows)
            return True

    def _was_appended(self, table: Any, before: int, count: int) -> bool:
        """Return whether a version since then has ``count`` more rows than the version before it."""
        rows = {0: 0} | {each["version"]: int(each["metadata"]["total_rows"]) for each in table.list_versions()}
        return any(rows[version] - rows.get(version - 1, 0) == count for version in rows if version > before)

    def _check(self, table: Any, schema: Any) -> None:
        there, new = ({field.name: field.type for field in columns} for columns in (table.schema, schema))
        if there != new:
            differences = [
                f"column {name!r}: found {new.get(name, 'none')}, expected {there.get(name, 'none')}"
                for name in {**there, **new}
                if there.get(name) != new.get(name)
            ]
            raise StoreError(
                f"{self._path} has other columns than the new rows: {'; '.join(differences)}",
                fix=Fix("write to another dataset, or replace this one with mode='overwrite'"),
            )

    @contextlib.contextmanager
    def errors(self) -> Generator[None]:
        """Name the dataset in errors of Lance."""
        try:
            yield
        except (ValueError, RuntimeError, OSError) as error:
            if isinstance(error, StoreError):
                raise
            raise StoreError(f"{self._path}: {error}", may_pass=may_pass(error)) from error


def last_of_each(rows: Any, key: str) -> Any:
    """Return the last row of each key.

    >>> last_of_each(pa.table({"id": [1, 2, 1], "n": [1, 2, 3]}), "id")["n"].to_pylist()
    [2, 3]
    """
    places = {value: place for place, value in enumerate(rows[key].to_pylist())}
    return rows if len(places) == len(rows) else rows.take(pa.array(sorted(places.values())))


def _delete(table: Any, key: str, values: list[Any]) -> None:
    for first in range(0, len(values), _KEYS_AT_ONCE):
        shown = ", ".join(literal(value) for value in values[first : first + _KEYS_AT_ONCE])
        table.delete(f"`{key}` IN ({shown})")


def literal(value: int | str) -> str:
    """Return a value as SQL.

    >>> literal("it's"), literal(7), literal(True)
    ("'it''s'", '7', 'true')
    """
    if isinstance(value, bool):
        return str(value).lower()
    return str(value) if isinstance(value, int) else "'" + value.replace("'", "''") + "'"


def _read_note(path: str) -> int | None:
    if not FileSystems.exists(path):
        return None
    with FileSystems.open(path, "application/octet-stream") as file:
        written = file.read()
    # An empty note is from a worker that died before it appended rows.
    return json.loads(written)["version"] if written else None


def _read_count(path: str) -> int:
    with FileSystems.open(path, "application/octet-stream") as file:
        return json.loads(file.read())["rows"]


def _write_note(path: str, version: int, rows: int = 0) -> None:
    with FileSystems.create(path, "application/octet-stream") as file:
        file.write(json.dumps({"version": version, "rows": rows}).encode())
