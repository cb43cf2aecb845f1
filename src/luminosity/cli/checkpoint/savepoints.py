"""``lum checkpoint save``, ``list``, ``show`` and ``remove``: savepoints of a run."""

from __future__ import annotations

import json
import sys
import time
from collections.abc import Callable
from dataclasses import asdict
from datetime import datetime
from typing import TYPE_CHECKING, Any

from luminosity._shared.text import format_bytes
from luminosity.cli.common.exits import FAILED, fail
from luminosity.cli.common.output import output_console
from luminosity.errors import CheckpointFailed
from luminosity.runs.views import words

if TYPE_CHECKING:
    from luminosity.engine.durable.upkeep.savepoints import Savepoint

__all__ = ["list_all", "remove", "save", "show"]


def save(folder: str, name: str, *, as_json: bool = False) -> int:
    """Save a savepoint of a checkpoint folder, and say how a run begins with it; return the exit code.

    Raises :class:`CheckpointError` if there is nothing to save, if it is damaged, or if the name is taken.
    """
    from luminosity.engine.durable.upkeep.saving import save as save_it  # it imports Beam

    try:
        saved = save_it(folder, name)
    except CheckpointFailed as error:
        return fail("checkpoint", error, FAILED)
    if as_json:
        print(json.dumps({**_facts(saved.savepoint), "seconds": round(saved.seconds, 3)}, indent=2))
        return 0
    whole, own = saved.savepoint.sizes()
    print(
        f"saved {saved.savepoint.name} in {words.duration(saved.seconds)}: {format_bytes(whole)}, of which "
        f"{format_bytes(own)} are new on the disk"
    )
    print(f"start from it with --checkpoint_dir=NEW --savepoint={saved.savepoint.folder}")
    return 0


def list_all(folder: str, *, as_json: bool = False) -> int:
    """Print the savepoints of a checkpoint folder, the newest first; return the exit code."""
    from rich.table import Table

    from luminosity.engine.durable.place import read_only  # these import Beam
    from luminosity.engine.durable.upkeep.savepoints import Savepoint, savepoints_of, sweep

    sweep(folder)
    found = savepoints_of(folder)
    if not found:
        with read_only(folder):  # to tell a folder without savepoints from one that is no checkpoint
            pass
    good = [each for each in found if isinstance(each, Savepoint)]
    if as_json:
        print(json.dumps([_facts(each) for each in good], indent=2))
    elif not found:
        print(f"no savepoints: `lum checkpoint save {folder} NAME` saves one")
    elif good:
        table = Table(box=None, pad_edge=False)
        table.add_column("name", overflow="fold")
        for title in ("saved", "age", "size", "freed if removed"):
            table.add_column(title, no_wrap=True, justify="left" if title == "saved" else "right")
        for each in good:
            whole, own = each.sizes()
            when = f"{datetime.fromtimestamp(each.saved_at):%Y-%m-%d %H:%M:%S}"
            age = words.duration(max(0.0, time.time() - each.saved_at))
            table.add_row(each.name, when, age, format_bytes(whole), format_bytes(own))
        output_console().print(table)
    for each in found:
        if not isinstance(each, Savepoint):
            print(each.message, file=sys.stderr)
    return FAILED if len(good) < len(found) else 0


def show(folder: str, name: str, *, as_json: bool, print_checkpoint: Callable[[str], int]) -> int:
    """Print what is in a savepoint; return the exit code.

    Raises :class:`CheckpointError` if there is none, or if its note is damaged.
    """
    from luminosity.engine.durable.inspection import inspect  # these import Beam
    from luminosity.engine.durable.upkeep.savepoints import read_savepoint, savepoint_folder

    savepoint = read_savepoint(savepoint_folder(folder, name))
    if as_json:
        print(json.dumps({**asdict(inspect(savepoint.folder)), "savepoint": _facts(savepoint)}, indent=2))
        return 0
    whole, own = savepoint.sizes()
    print(
        f"{savepoint.name}, of the run in {savepoint.source}: {format_bytes(whole)}, of which {format_bytes(own)} are "
        "freed if it is removed"
    )
    print()
    return print_checkpoint(savepoint.folder)


def remove(folder: str, name: str) -> int:
    """Remove a savepoint, and say what that has freed; return the exit code.

    Raises :class:`CheckpointError` if there is none.
    """
    from luminosity.engine.durable.upkeep.savepoints import (  # it imports Beam
        remove_savepoint,
        savepoint_folder,
        sweep,
    )

    sweep(folder)
    path = savepoint_folder(folder, name)
    try:
        freed = remove_savepoint(path)
    except CheckpointFailed as error:
        return fail("checkpoint", error, FAILED)
    print(f"removed {path}, which has freed {format_bytes(freed)}")
    return 0


def _facts(savepoint: Savepoint) -> dict[str, Any]:
    whole, own = savepoint.sizes()
    return {**asdict(savepoint), "bytes": whole, "own_bytes": own}
