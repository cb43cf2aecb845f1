"""The disk of a simulated run: what was synced is kept apart from what was not, and syncs may fail or take long.

The files are real ones, best in memory. A crash copies the folder of a checkpoint; a loss of power takes back from the
copy what was not synced, or a part of it.
"""

from __future__ import annotations

import contextlib
import errno
import os
import random
import shutil
from collections.abc import Callable, Generator
from pathlib import Path
from typing import Any
from unittest import mock

from luminosity.engine.durable import synced_log
from luminosity.engine.durable.place import DATABASE
from luminosity.engine.durable.synced_log import read_mark
from luminosity.engine.durable.tables import BLOCKS
from luminosity.engine.spill import files

__all__ = ["SimulatedDisk"]

_LOG = f"{DATABASE}-wal"
_SECTOR = 512  # bytes, which a disk writes as a whole
_LOG_SALTS = slice(16, 24)  # in the header of SQLite's log


class SimulatedDisk:
    """What is synced. ``before_sync`` is called before each sync, and ``before_spill`` before each file of data.

    Both may raise ``OSError``, as a disk would.
    """

    def __init__(self, before_sync: Callable[[], None], before_spill: Callable[[], None]) -> None:
        self._before_sync = before_sync
        self._before_spill = before_spill
        self._synced: set[str] = set()
        self.boots = 0

    @contextlib.contextmanager
    def in_place(self) -> Generator[None]:
        """Within the context, let this process sync and spill here."""
        stock_write = files.write_file

        def write_file(*args: Any, **kwargs: Any) -> Any:
            self._before_spill()
            return stock_write(*args, **kwargs)

        def sync(descriptor: int) -> None:
            self._before_sync()
            self._synced.add(os.readlink(f"/proc/self/fd/{descriptor}"))

        replaced: tuple[tuple[Any, str, Any], ...] = (
            (os, "fsync", sync),
            (files, "write_file", write_file),
            (synced_log, "boot_id", lambda: f"boot {self.boots}"),
        )
        with contextlib.ExitStack() as stack:
            for module, name, ours in replaced:
                stack.enter_context(mock.patch.object(module, name, ours))
            yield

    def crash(self, folder: Path, copy: Path, chance: random.Random, *, is_power_lost: bool) -> None:
        """Copy a checkpoint as the next start finds it."""
        shutil.copytree(folder, copy)
        (copy / f"{DATABASE}-shm").unlink(missing_ok=True)  # it is in memory only, and no process has it any more
        if not is_power_lost:
            kept = {str(path) for path in (folder / BLOCKS).rglob("*")} & self._synced
            self._synced = {str(copy / Path(path).relative_to(folder)) for path in kept}
            return
        self.boots += 1
        synced: set[str] = set()
        for path in sorted((copy / BLOCKS).rglob("*")):
            if not path.is_file():
                continue
            if str(folder / path.relative_to(copy)) in self._synced:
                synced.add(str(path))
            elif chance.random() < 0.5:
                path.unlink()
            else:
                _tear(path, 0, chance)
        self._synced = synced
        _cut_log(copy, chance)


def no_space() -> OSError:
    """Return the error of a full disk."""
    return OSError(errno.ENOSPC, os.strerror(errno.ENOSPC))


def _cut_log(copy: Path, chance: random.Random) -> None:
    """Leave parts of the database's log: at least what is noted as synced."""
    log, mark = copy / _LOG, read_mark(str(copy))
    if not log.exists() or mark is None:
        return
    data = log.read_bytes()
    _tear(log, mark.size if data[_LOG_SALTS] == mark.salts else 0, chance)


def _tear(path: Path, synced: int, chance: random.Random) -> None:
    """Leave of a file what a loss of power leaves: its first ``synced`` bytes, and some of the rest, with holes."""
    size = path.stat().st_size
    end = chance.randint(min(synced, size), size)
    os.truncate(path, end)
    if end <= synced or chance.random() < 0.5:
        return
    with path.open("r+b") as file:  # a disk writes sectors in any order
        for start in range(synced // _SECTOR * _SECTOR, end, _SECTOR):
            if chance.random() < 0.3:
                file.seek(max(start, synced))
                file.write(bytes(min(start + _SECTOR, end) - max(start, synced)))
