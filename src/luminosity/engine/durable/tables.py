"""The tables of a checkpoint, whose rows carry checksums, and what damage to them is called.

SQLite checks neither the bytes of a database nor that its file is the one that was written last. So each row has a
checksum of all its columns, and ``meta`` has the number of the last transaction, which the mark beside the database
knows as well: see :class:`~luminosity.engine.durable.synced_log.SyncedLog`.
"""

from __future__ import annotations

import contextlib
import marshal
import os
import sqlite3
import zlib
from collections.abc import Generator, Iterable, Iterator, Mapping
from typing import Any, NamedTuple

from luminosity.engine.durable.names import unquoted
from luminosity.errors import CheckpointDamaged

__all__ = [
    "BLOCKS",
    "FILES",
    "KEPT",
    "NUMBER",
    "SAVEPOINTS",
    "SAVEPOINT_NOTE",
    "VERSION",
    "StoredContent",
    "as_damage",
    "check_files",
    "check_rows",
    "content_row",
    "damage_of_files",
    "damage_of_rows",
    "damaged",
    "file_sum",
    "files_of",
    "is_damage",
    "make_tables",
    "meta_rows",
    "remedy_for",
    "row_sums",
    "stored_contents",
    "stored_meta",
    "stored_rows",
    "version_of",
    "what_it_held",
]

# Of the tables below and of what is in them: version 1 named classes of modules that have moved, 2 had no checksums.
VERSION = 3
NUMBER = "number"  # in ``meta``: how many transactions were written
BLOCKS = "blocks"  # the folder of their files
KEPT = "kept"  # the folder of earlier states
SAVEPOINTS = "savepoints"  # the folder of those that the user has saved
SAVEPOINT_NOTE = "savepoint.json"  # in the folder of a savepoint alone
_FOR_SAVEPOINT = "take another savepoint, or put a copy of this one in its place"
FILES = "files"  # the owner of the rows that have the size and the checksum of each file, by its path below the folder
_PIECE_BYTES = 1 << 20  # of a file, read at once
_FIRST = 3  # so many problems of a database are named

_STATEMENTS = {
    "CREATE TABLE meta (key TEXT PRIMARY KEY, value TEXT, sum INTEGER) WITHOUT ROWID",
    "CREATE TABLE rows (owner TEXT, key BLOB, value BLOB, sum INTEGER, PRIMARY KEY (owner, key)) WITHOUT ROWID",
    "CREATE TABLE contents (id INTEGER PRIMARY KEY, data BLOB, path TEXT, base INT, size INT, is_packed INT, sum INT)",
}
_HELD = {
    "queue": "elements that wait: ",
    "gate": "elements that wait for side inputs: ",
    "state": "state of ",
    "timers": "timers of ",
    "grouping": "groups of ",
    "side": "the side input ",
    "metrics": "metrics of ",
    "stage": "watermarks of ",
    "source": "the positions of the source ",
    "groups": "values of large groups",
    FILES: "checksums of files",
}


class StoredContent(NamedTuple):
    """The data of blocks: bytes, or a file below the folder. Blocks refer to it by its number."""

    id: int
    data: bytes | None
    path: str | None  # relative to the folder
    base: int = 0  # where the data starts in the file
    size: int = 0
    is_packed: bool = False


def make_tables(rows: sqlite3.Connection) -> None:
    """Make the tables of a new database, all at once."""
    ((key, value, checksum),) = meta_rows({"version": str(VERSION)})
    rows.executescript(
        f"BEGIN IMMEDIATE; {'; '.join(_STATEMENTS)}; INSERT INTO meta VALUES ('{key}', '{value}', {checksum}); COMMIT;"
    )


def version_of(rows: sqlite3.Connection, database: str) -> int | None:
    """Return the version of the tables in a database, whichever it is; None if the database is empty."""
    if not rows.execute("SELECT count(*) FROM sqlite_master").fetchone()[0]:
        return None
    columns = {str(name) for _, name, *_ in rows.execute("PRAGMA table_info(meta)")}
    checksum = "sum" if "sum" in columns else "NULL"  # older versions have none
    found = rows.execute(f"SELECT value, {checksum} FROM meta WHERE key = 'version'").fetchone()
    try:
        value, checksum = found
        if checksum is None or _meta_sum("version", value) == checksum:
            return int(value)
    except (TypeError, ValueError):
        pass
    raise damaged(database, "has no version that can be read", "everything of the run")


def row_sums(rows: Iterable[tuple[str, bytes, bytes]]) -> Iterator[tuple[str, bytes, bytes, int]]:
    """Yield rows with their checksums."""
    crc32, seeds = zlib.crc32, dict[str, int]()
    for owner, key, value in rows:
        if (seed := seeds.get(owner)) is None:
            seeds[owner] = seed = crc32(owner.encode())
        # With the length, so that no byte of the key counts as one of the value.
        yield owner, key, value, crc32(value, crc32(key, seed ^ len(key)))


def stored_rows(rows: sqlite3.Connection, database: str, owner: str) -> Iterator[tuple[bytes, bytes]]:
    """Yield the keys and values of an owner's rows, in the order of their keys."""
    crc32, seed = zlib.crc32, zlib.crc32(owner.encode())
    with as_damage(database, what_it_held(owner)):
        found = rows.execute("SELECT key, value, sum FROM rows WHERE owner = ? ORDER BY key", (owner,))
        for key, value, checksum in found:
            try:
                is_sound = crc32(value, crc32(key, seed ^ len(key))) == checksum
            except TypeError:  # A damaged row may have text or a number instead of bytes.
                is_sound = False
            if not is_sound:
                raise damaged(database, "has a row that differs from what was written", what_it_held(owner))
            yield key, value


def content_row(content: StoredContent) -> tuple[Any, ...]:
    """Return the row of the data of a block."""
    return *content, _content_sum(content)


def stored_contents(rows: sqlite3.Connection, database: str) -> Iterator[StoredContent]:
    """Yield the data of all blocks."""
    held = "the data of blocks: elements that wait, groups, or side inputs"
    with as_damage(database, held):
        for *fields, is_packed, checksum in rows.execute(
            "SELECT id, data, path, base, size, is_packed, sum FROM contents"
        ):
            content = StoredContent(*fields, is_packed=bool(is_packed))
            if type(content.data) not in (bytes, type(None)) or _content_sum(content) != checksum:
                raise damaged(database, f"has other data of block {content.id} than was written", held)
            yield content


def _content_sum(content: StoredContent) -> int:
    fields = (
        f"{content.id} {content.path} {content.base} {content.size} {int(content.is_packed)} {content.data is None}"
    )
    return zlib.crc32(content.data or b"", zlib.crc32(fields.encode(errors="surrogatepass")))


def meta_rows(meta: Mapping[str, str]) -> list[tuple[str, str, int]]:
    """Return the rows of what is noted about the checkpoint as a whole."""
    return [(key, value, _meta_sum(key, value)) for key, value in meta.items()]


def stored_meta(rows: sqlite3.Connection, database: str) -> dict[str, str]:
    """Return what is noted about the checkpoint as a whole."""
    found: dict[str, str] = {}
    held = "what the run notes about itself"
    with as_damage(database, held):
        for key, value, checksum in rows.execute("SELECT key, value, sum FROM meta"):
            if type(key) is not str or type(value) is not str or _meta_sum(key, value) != checksum:
                raise damaged(database, f"has another {key!r} than was written", held)
            found[key] = value
    return found


def _meta_sum(key: str, value: str) -> int:
    return zlib.crc32(f"{key}\0{value}".encode(errors="surrogatepass"))


def check_rows(rows: sqlite3.Connection, database: str, least: int) -> int:
    """Return the number of the last transaction; raise if a row is missing or differs from what was written.

    ``least`` is the number of a transaction that the database has for sure. Reads the whole database but the data of
    blocks, which :func:`stored_contents` checks.
    """
    for problem in damage_of_rows(rows, database, least):
        raise problem
    return int(stored_meta(rows, database).get(NUMBER, 0))


def damage_of_rows(rows: sqlite3.Connection, database: str, least: int) -> Iterator[CheckpointDamaged]:
    """Yield what :func:`check_rows` looks for. If pages do not fit together, the rows are not looked at."""
    everything = "everything of the run"
    try:
        made = {str(sql) for (sql,) in rows.execute("SELECT sql FROM sqlite_master WHERE sql IS NOT NULL")}
        if made != _STATEMENTS:
            yield damaged(database, "has other tables than were made", everything)
            return
        found = [str(line).strip() for (line,) in rows.execute(f"PRAGMA quick_check({_FIRST})")]
        if found != ["ok"]:
            yield damaged(database, f"has pages that do not fit together ({'; '.join(found)})", everything)
            return
        number = int(stored_meta(rows, database).get(NUMBER, 0))
        if number < least:
            found = f"and its log end with transaction {number}, and transaction {least} was written"
            yield damaged(database, found, "what the run did last")
        owners = [owner for (owner,) in rows.execute("SELECT DISTINCT owner FROM rows")]
    except CheckpointDamaged as error:
        yield error
        return
    except sqlite3.Error as error:
        yield damaged(database, f"can't be read: {error}", everything)
        return
    for owner in owners:
        if type(owner) is not str:
            yield damaged(database, "has rows of nothing", everything)
            continue
        try:
            for _ in stored_rows(rows, database, owner):
                pass
        except CheckpointDamaged as error:
            yield error


def file_sum(path: str) -> tuple[int, int]:
    """Return the size and the checksum of a file."""
    size = checksum = 0
    with open(path, "rb", buffering=0) as file:
        while piece := file.read(_PIECE_BYTES):
            checksum = zlib.crc32(piece, checksum)
            size += len(piece)
    return size, checksum


def files_of(rows: sqlite3.Connection, database: str) -> set[str]:
    """Return the files that contents and large groups refer to, relative to the folder of the database."""
    with as_damage(database, "the data of blocks"):
        found = {str(path) for (path,) in rows.execute("SELECT path FROM contents WHERE path IS NOT NULL")}
    return found | {str(marshal.loads(row)[0]) for _, row in stored_rows(rows, database, "groups")}


def check_files(rows: sqlite3.Connection, database: str) -> None:
    """Raise if a file that the rows refer to is missing, or differs from what was written. Reads all of them."""
    for _, problem in damage_of_files(rows, database):
        raise problem


def damage_of_files(rows: sqlite3.Connection, database: str) -> Iterator[tuple[str, CheckpointDamaged]]:
    """Yield what :func:`check_files` looks for, with the paths of the files, relative to the folder."""
    paths = sorted(files_of(rows, database))
    noted = dict(stored_rows(rows, database, FILES))
    for path in paths:
        if (problem := _damage_of_file(database, path, noted.get(path.encode()))) is not None:
            yield path, problem


def _damage_of_file(database: str, path: str, noted: bytes | None) -> CheckpointDamaged | None:
    held = "data of blocks: elements that wait, groups, or side inputs"
    if noted is None:
        return damaged(database, f"has no checksum of {path}", held)
    full = os.path.join(os.path.dirname(database), path)
    size, checksum = marshal.loads(noted)
    try:
        found_size, found = file_sum(full)
    except FileNotFoundError:
        return damaged(full, "is missing", held)
    except OSError as error:
        return damaged(full, f"can't be read: {error.strerror or error}", held)
    if found_size != size:
        return damaged(full, f"has {found_size:,} bytes, and {size:,} were written", held)
    return damaged(full, "has other bytes than were written", held) if found != checksum else None


def what_it_held(owner: str) -> str:
    """Return what the rows of an owner are, in words.

    >>> what_it_held("state/Orders%2FCount"), what_it_held("groups")
    ("state of 'Orders/Count'", 'values of large groups')
    """
    kind, _, name = owner.partition("/")
    held = _HELD.get(kind, f"rows of {kind!r}")
    return held + (repr(unquoted(name.partition("/")[0])) if name else "")


def damaged(path: str, found: str, held: str) -> CheckpointDamaged:
    """Return the error for a damaged file of a checkpoint. ``held`` says what it held."""
    folder = os.path.dirname(path)
    if os.path.basename(os.path.dirname(folder)) == BLOCKS:  # a file of blocks, by the number of the start
        folder = os.path.dirname(os.path.dirname(folder))
    of_savepoint = os.path.exists(os.path.join(folder, SAVEPOINT_NOTE)) or os.path.basename(path) == SAVEPOINT_NOTE
    what = "savepoint" if of_savepoint else "checkpoint"
    fix = _FOR_SAVEPOINT if of_savepoint else remedy_for(folder)
    return CheckpointDamaged(f"the {what} is damaged: {path} {found}; it held {held}", fix=fix)


def remedy_for(folder: str) -> str:
    """Return what helps if the checkpoint in a folder is damaged."""
    if os.path.isdir(os.path.join(folder, KEPT)):
        return f"go back to the last good state with `lum checkpoint {folder} --restore last`"
    if os.path.isdir(place := os.path.join(folder, SAVEPOINTS)) and os.listdir(place):
        return f"go back to a savepoint: `lum checkpoint list {folder}` names them"
    return "put a copy of the folder in its place, or begin again with --restart"


def is_damage(error: sqlite3.Error) -> bool:
    """Return whether SQLite complains about the bytes of a database, and not about the disk or another process."""
    text = str(error)
    return not isinstance(error, sqlite3.OperationalError) or text.startswith(("no such", "malformed", "Could not"))


@contextlib.contextmanager
def as_damage(database: str, held: str) -> Generator[None]:
    """Raise :class:`CheckpointDamaged` in place of an error of SQLite while a database is read."""
    try:
        yield
    except sqlite3.Error as error:
        found = f"can't be read: {error}"
        raise damaged(database, found, held) from error
