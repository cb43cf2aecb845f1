"""Looks into a checkpoint folder without taking part in its run."""

from __future__ import annotations

import contextlib
import json
import marshal
import os
import socket
import sqlite3
from collections.abc import Callable, Collection, Iterator
from dataclasses import dataclass, field
from pathlib import Path
from typing import Any

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.data.event_time import MAX, MIN
from luminosity.engine.data.world import THIS_MACHINE
from luminosity.engine.durable import tables
from luminosity.engine.durable.copies.copied import CopyNote
from luminosity.engine.durable.names import unquoted
from luminosity.engine.durable.place import DATABASE, LOCK, read_only, snapshot
from luminosity.engine.durable.tables import VERSION
from luminosity.engine.durable.upkeep.kept_states import kept_times
from luminosity.engine.durable.upkeep.savepoints import savepoints_of
from luminosity.engine.loop.metrics import RunMetrics
from luminosity.errors import CheckpointDamaged, CheckpointError

__all__ = ["Inspection", "SavedCounters", "StoredCopy", "StoredStep", "inspect", "saved_counters", "shown_step"]

SavedCounters = dict[str, dict[str, int]]
"""The counters of a checkpoint: namespace, name, value, summed over all steps."""

_MOST_CELLS = 500_000  # of a step whose keys are counted: some seconds
_PARTS_OF_STEPS = ("/Process", "/Precombine", "/Merge", "/Group", "/PairWithRestriction")  # that only the plan has


@dataclass
class StoredStep:
    """What a checkpoint has of one step."""

    name: str
    queued: int = 0  # elements that wait for it, those of running bundles among them
    queued_bytes: int = 0
    keys: int | None = None  # with state; None if it has no state, or too much to count
    cells: int = 0
    state_bytes: int = 0
    timers: int = 0
    group_rows: int = 0  # rows about groups and side inputs; their values may be in blocks
    group_bytes: int = 0
    watermark: float | None = None  # of its input, in seconds since 1970; None at the beginning and at the end of time


@dataclass(frozen=True)
class StoredCopy:
    """What a checkpoint folder notes about its copy."""

    address: str
    saved_at: float | None  # of the checkpoint that the copy has, in seconds since 1970; None: it has none yet
    error: str = ""  # why the last attempt to write it failed


@dataclass
class Inspection:
    """What is in a checkpoint folder."""

    folder: str
    pipeline: str
    state: str  # running, stopped, drained, finished, failed, savepoint; "killed" if it runs and nothing holds it
    generation: int  # how often the run was started
    saved_at: float | None  # seconds since 1970
    holder: dict[str, Any] | None  # the process that holds the folder now
    live_bytes: int  # of rows and blocks
    folder_bytes: int  # on the disk
    version: int = VERSION
    copy: StoredCopy | None = None
    kept: list[float] = field(default_factory=list[float])  # when earlier states were kept, in seconds since 1970
    savepoints: int = 0  # in the folder
    steps: list[StoredStep] = field(default_factory=list[StoredStep])

    @property
    def age_seconds(self) -> float | None:
        """How long ago the last checkpoint was saved."""
        return max(0.0, THIS_MACHINE.clock.time() - self.saved_at) if self.saved_at is not None else None


def inspect(folder: str) -> Inspection:
    """Return what is in a checkpoint folder. Works while a run holds it, and changes nothing.

    Raises :class:`CheckpointError` if the folder has no checkpoint, or one of a newer version.
    """
    with read_only(folder) as rows:
        return _inspect(folder, rows)


def saved_counters(folder: str, names: Collection[str]) -> SavedCounters | None:
    """Return the user counters with these names that a checkpoint has; None if nothing is saved, or can't be read."""
    database = os.path.join(folder, DATABASE)
    if not os.path.isfile(database):
        return None
    metrics, found = RunMetrics(), SavedCounters()
    try:
        with snapshot(database) as rows:
            if tables.version_of(rows, database) != VERSION or "saved_at" not in tables.stored_meta(rows, database):
                return None
            owners = rows.execute("SELECT DISTINCT owner FROM rows WHERE owner GLOB 'metrics/*'").fetchall()
            for (owner,) in owners:
                metrics.restore(owner, tables.stored_rows(rows, database, owner))
    except (sqlite3.Error, CheckpointDamaged):
        return None
    for (owner,) in owners:
        for namespaces in metrics.counters(owner, names).values():
            for namespace, counters in namespaces.items():
                of_namespace = found.setdefault(namespace, {})
                for name, count in counters.items():
                    of_namespace[name] = of_namespace.get(name, 0) + count
    return found


def _inspect(folder: str, rows: sqlite3.Connection) -> Inspection:
    database = os.path.join(folder, DATABASE)
    version = tables.version_of(rows, database) or 0
    if version > VERSION:
        raise CheckpointError(
            f"the checkpoint in {folder} has version {version}, and this release reads version {VERSION}",
            fix="look at it with the release that wrote it",
        )
    meta = _meta_without_sums(rows) if version < VERSION else tables.stored_meta(rows, database)

    def stored(owner: str) -> Iterator[tuple[bytes, bytes]]:
        if version < VERSION:
            return rows.execute("SELECT key, value FROM rows WHERE owner = ?", (owner,))
        return tables.stored_rows(rows, database, owner)

    holder = _holder(folder)
    state = meta.get("state", "empty")
    (of_rows,) = rows.execute(
        "SELECT coalesce(sum(length(owner) + length(key) + length(value)), 0) FROM rows"
    ).fetchone()
    (of_contents,) = rows.execute("SELECT coalesce(sum(coalesce(length(data), size)), 0) FROM contents").fetchone()
    return Inspection(
        folder=folder,
        pipeline=meta.get("pipeline", ""),
        state="killed" if state == "running" and holder is None else state,
        generation=int(meta.get("generation", 0)),
        saved_at=float(meta["saved_at"]) if "saved_at" in meta else None,
        holder=holder,
        live_bytes=of_rows + of_contents,
        folder_bytes=sum(_sizes(folder)),
        version=version,
        copy=_copy(folder),
        kept=kept_times(folder),
        savepoints=len(savepoints_of(folder)),
        steps=_steps(json.loads(meta["shape"]), rows, stored) if "shape" in meta else [],
    )


def _meta_without_sums(rows: sqlite3.Connection) -> dict[str, str]:
    """Return what is noted in a checkpoint of an older version, which has no checksums."""
    found = rows.execute("SELECT key, value FROM meta") if tables.version_of(rows, DATABASE) is not None else ()
    return {str(key): str(value) for key, value in found}


def _steps(
    shape: dict[str, Any], rows: sqlite3.Connection, stored_rows: Callable[[str], Iterator[tuple[bytes, bytes]]]
) -> list[StoredStep]:
    """Return the steps that have something in the checkpoint, with writers before readers."""
    found: dict[str, StoredStep] = {}

    def step(names: list[str]) -> StoredStep:
        shown = " + ".join(dict.fromkeys(shown_step(name, shape) for name in names))
        return found.setdefault(shown, StoredStep(shown))

    totals = rows.execute(
        "SELECT owner, count(*), sum(length(key) + length(value)) FROM rows GROUP BY owner ORDER BY owner"
    )
    for owner, count, size in totals.fetchall():
        kind, _, rest = owner.partition("/")
        name = rest.partition("/")[0]
        if kind in ("queue", "gate") and name in shape["reads"]:
            stored = step(list(shape["reads"][name]["consumers"]))
            for elements, data in _blocks(stored_rows(owner)) if kind == "queue" else ((count, size),):
                stored.queued += elements
                stored.queued_bytes += data
        elif kind == "state":
            stored = step([name])
            stored.cells, stored.state_bytes = count, size
            stored.keys = _count_keys(rows, owner) if count <= _MOST_CELLS else None
        elif kind == "timers":
            step([name]).timers += count
        elif kind == "grouping" or (kind == "side" and name in shape["buffers"]):
            is_side = kind == "side"
            stored = step([reader for reader, _ in shape["buffers"][name]["side_inputs"]] if is_side else [name])
            stored.group_rows, stored.group_bytes = stored.group_rows + count, stored.group_bytes + size
        elif kind == "stage" and name in shape["stages"]:
            consumers = [c for read in shape["stages"][name] for c in shape["reads"][read]["consumers"]]
            step(consumers).watermark = _watermark(stored_rows(owner))
    return [stored for stored in found.values() if stored != StoredStep(stored.name)]


def shown_step(name: str, shape: dict[str, Any]) -> str:
    """Return the name of a step as its author knows it."""
    full = shape["steps"].get(name, {}).get("name", unquoted(name))
    for part in _PARTS_OF_STEPS:
        full = full.removesuffix(part)
    return full


def _blocks(rows: Iterator[tuple[bytes, bytes]]) -> Iterator[tuple[int, int]]:
    """Yield the elements and bytes of the blocks in a queue."""
    for _, value in rows:
        for _, (_, _, size, count, *_) in marshal.loads(value):
            yield count, size


def _count_keys(rows: sqlite3.Connection, owner: str) -> int:
    keys: set[bytes] = set()
    for (cell_key,) in rows.execute("SELECT key FROM rows WHERE owner = ?", (owner,)):
        state_key: Any = beam_fn_api_pb2.StateKey.FromString(cell_key)
        keys.add(getattr(state_key, str(state_key.WhichOneof("type"))).key)
    return len(keys)


def _watermark(rows: Iterator[tuple[bytes, bytes]]) -> float | None:
    ((_, value),) = rows
    micros = marshal.loads(value)[0]
    return micros / 1e6 if MIN < micros < MAX else None


def _holder(folder: str) -> dict[str, Any] | None:
    """Return the process that holds the folder, if it lives. Does not try the lock: a run may just want it."""
    try:
        holder = json.loads(Path(folder, LOCK).read_text())
        if holder["host"] == socket.gethostname():
            os.kill(holder["pid"], 0)
        return holder
    except PermissionError:
        return None  # the process has ended, and its number belongs to another user's
    except (OSError, ValueError, KeyError, TypeError):
        return None


def _copy(folder: str) -> StoredCopy | None:
    note = CopyNote.read(folder)
    if note is None or not note.address:
        return None
    return StoredCopy(note.address, float(note.saved_at) if note.saved_at else None, note.error)


def _sizes(folder: str) -> Iterator[int]:
    seen: set[int] = set()  # kept states have links to the same files
    for path, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(FileNotFoundError):  # a run may remove it just now
                found = os.stat(os.path.join(path, name))
                if found.st_ino not in seen:
                    seen.add(found.st_ino)
                    yield found.st_size
