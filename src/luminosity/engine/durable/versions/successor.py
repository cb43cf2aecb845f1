"""What a drained run leaves to the run that comes after it: the positions at which its sources have ended."""

from __future__ import annotations

import json
import logging
import marshal
import os
from collections.abc import Iterable, Iterator
from typing import Any

from luminosity.engine.durable import tables
from luminosity.engine.durable.checkpointer import inlined
from luminosity.engine.durable.names import SOURCES, Names
from luminosity.engine.durable.place import DATABASE, read_only
from luminosity.engine.durable.store import CheckpointFolder, Transaction
from luminosity.engine.durable.tables import VERSION
from luminosity.engine.loop.stage import StageRun
from luminosity.errors import CheckpointError

__all__ = ["continue_from", "source_rows"]

_LOGGER = logging.getLogger(__name__)


def source_rows(stages: Iterable[StageRun], names: Names) -> Iterator[tuple[str, bytes]]:
    """Yield owners and rows of what endless sources have left to read. Call it before a drain cuts that off."""
    for stage in stages:
        if not (stage.plan.is_splittable and stage.plan.is_unbounded):
            continue
        for read in stage.plan.reads:
            blocks = [block for shard in stage.shards for block in shard.queued(read.transform_id)]
            blocks += [block for _, read_id, block in stage.delayed.entries() if read_id == read.transform_id]
            if blocks:
                left = [(0.0, inlined(block)) for block in blocks]
                yield f"{SOURCES}{names.of_read(stage.plan, read)}", marshal.dumps(left)


def continue_from(folder: CheckpointFolder, before: str) -> None:
    """Let a run in a new folder begin where the sources of the drained run in the folder ``before`` have ended.

    Raises :class:`CheckpointError` if that run was not drained, or if its sources can't be continued.
    """
    database = os.path.join(before, DATABASE)
    with read_only(before) as rows:
        if (version := tables.version_of(rows, database)) not in (VERSION, None):
            raise CheckpointError(
                f"the checkpoint in {before} has version {version}, and this release reads version {VERSION}",
                fix="drain that run with this release",
            )
        meta: dict[str, str] = {}
        sources: list[tuple[str, bytes]] = []
        if version is not None:  # None: the start was killed before it made the tables
            meta = tables.stored_meta(rows, database)
            found = rows.execute("SELECT DISTINCT owner FROM rows WHERE owner GLOB ?", (f"{SOURCES}*",)).fetchall()
            sources = [(owner, row) for (owner,) in found for _, row in tables.stored_rows(rows, database, owner)]
    state = meta.get("state", "empty")
    if state != "drained":
        raise CheckpointError(
            f"the run in {before} is {state}, expected one that was drained",
            fix=f"end it with lum drain {before}, or continue it in its own folder, with its state and windows",
        )
    if not sources:
        raise CheckpointError(
            f"the run in {before} has left no positions of sources: it had no source without an end",
            fix="leave out --continue_from",
        )
    queues = {owner.removeprefix(SOURCES): row for owner, row in sources}
    shape = _of_sources(json.loads(meta["shape"]), set(queues), before)
    rows_now = {(f"queue/{name}", b""): row for name, row in queues.items()}
    meta_now = {"shape": json.dumps(shape), "saved_at": meta["saved_at"], "state": "stopped"}
    folder.write(Transaction(0, rows=dict(rows_now), meta=meta_now))
    _LOGGER.warning("beginning where the sources of the run in %s have ended", before)


def _of_sources(shape: dict[str, Any], continued: set[str], before: str) -> dict[str, Any]:
    """Return the shape of a drained pipeline as if it had nothing but the sources that are continued.

    What else begins with an impulse is new: it is sent again.
    """
    reads: dict[str, Any] = shape["reads"]
    sources = {step for name in continued for step in reads[name]["consumers"]}
    above = _all_before(shape["steps"], sources)
    kept = {name: reads[name] for name in continued}
    for name, read in reads.items():
        if read["is_impulse"] and read["producer"] in above:
            if others := _others_behind(shape["steps"], read["producer"], above, sources):
                raise CheckpointError(
                    f"the run in {before} can't be continued: {others[0]!r} reads what also feeds a source",
                    fix="give the source a Create of its own",
                )
            kept[name] = read
    return {**shape, "reads": kept, "stages": {}, "buffers": {}}


def _all_before(steps: dict[str, Any], names: set[str]) -> set[str]:
    """Return all steps whose output gets to one of ``names``."""
    found: set[str] = set()
    waiting = list(names)
    while waiting:
        new = set(steps.get(waiting.pop(), {"after": []})["after"]) - found
        found |= new
        waiting += new
    return found


def _others_behind(steps: dict[str, Any], first: str, above: set[str], sources: set[str]) -> list[str]:
    """Return the names of steps that get elements from ``first``, but not through one of ``sources``."""
    reached = {first}
    found: list[str] = []
    waiting = [first]
    while waiting:
        step = waiting.pop()
        for name, details in steps.items():
            if step not in details["after"] or name in reached or name in sources or not details.get("runs"):
                continue
            if name not in above:
                found.append(details["name"])
            reached.add(name)
            waiting.append(name)
    return sorted(found)
