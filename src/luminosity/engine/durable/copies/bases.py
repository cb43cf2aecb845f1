"""Reads all of a checkpoint while the run goes on, as the first parts of a copy."""

from __future__ import annotations

import os
import sqlite3
from collections.abc import Generator
from pathlib import Path

from luminosity.engine.durable.copies.objects import Changes
from luminosity.engine.durable.place import DATABASE
from luminosity.engine.durable.tables import NUMBER, as_damage, stored_contents, stored_meta, stored_rows

__all__ = ["parts_of", "reader"]

_OWN_META = frozenset({"version", NUMBER})  # what each checkpoint folder notes for itself
_PART_BYTES = 16 << 20  # bounds the memory for a part


def reader(folder: str) -> sqlite3.Connection:
    """Return a connection that sees the checkpoint as it is now, whatever is written later. The caller closes it."""
    uri = f"{Path(folder, DATABASE).absolute().as_uri()}?mode=ro"
    rows = sqlite3.connect(uri, uri=True, check_same_thread=False, isolation_level=None)
    try:
        rows.execute("BEGIN")
        rows.execute("SELECT count(*) FROM meta").fetchone()  # The transaction begins with the first statement.
    except BaseException:
        rows.close()
        raise
    return rows


def parts_of(folder: str, rows: sqlite3.Connection) -> Generator[Changes]:
    """Yield everything in a checkpoint, in parts that are not large. Any thread may go through them.

    Raises :class:`CheckpointDamaged` if something is not what was written: damage is not to be copied.
    """
    database = os.path.join(folder, DATABASE)
    part = Changes()
    with as_damage(database, "everything of the run"):
        owners = [str(owner) for (owner,) in rows.execute("SELECT DISTINCT owner FROM rows")]
    for owner in owners:
        for key, value in stored_rows(rows, database, owner):
            part.put((owner, key), value)
            if part.size > _PART_BYTES:
                yield part
                part = Changes()
    for content in stored_contents(rows, database):
        part.put_content(content)
        if part.size > _PART_BYTES:
            yield part
            part = Changes()
    meta = stored_meta(rows, database)
    part.meta = {key: value for key, value in meta.items() if key not in _OWN_META}
    yield part
