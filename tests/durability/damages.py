"""Checkpoint folders that are damaged at random, but always in the same way for the same seed."""

from __future__ import annotations

import contextlib
import os
import random
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

from luminosity.engine.durable.store import CheckpointFolder, StoredContent, Transaction

__all__ = ["DAMAGES", "damage", "everything_in", "make"]

_PAGE = 4096
_OWNERS = ("queue/a|b", "state/Count", "timers/Count/ts-end", "grouping/Group", "metrics/a", "stage/a")


def make(path: Path, chance: random.Random, *, is_killed: bool) -> None:
    """Write a checkpoint of some hundred rows and a few files. A killed one has a log that is not written back."""
    folder = CheckpointFolder(str(path if not is_killed else path.with_name(f"{path.name}-alive")))
    os.makedirs(os.path.join(folder.blocks, "1"))
    for number in range(1, 31):
        rows: dict[tuple[str, bytes], bytes | None] = {
            (owner, b"%d" % key): chance.randbytes(chance.randrange(1, 200))
            for owner in _OWNERS
            for key in chance.sample(range(200), 5)
        }
        file = os.path.join(folder.blocks, "1", f"w1.{number}")
        Path(file).write_bytes(chance.randbytes(chance.randrange(1, 9_000)))
        relative = os.path.relpath(file, folder.path)
        contents = [
            StoredContent(2 * number, chance.randbytes(chance.randrange(6_000)), None),
            StoredContent(2 * number + 1, None, relative, size=os.path.getsize(file)),
        ]
        meta = {"state": "running", "saved_at": f"{number}", "shape": "{}"}
        folder.write(Transaction(number, rows, contents=contents, files=[file], meta=meta))
        if number in (10, 20):
            folder.sync()
        if number == 10:
            folder._write_back()  # pyright: ignore[reportPrivateUsage]  # so that a killed one has a database and a log
    if is_killed:
        shutil.copytree(folder.path, path)
        (path / "checkpoint.sqlite-shm").unlink()
    folder.close()
    if is_killed:
        shutil.rmtree(folder.path)


def everything_in(path: Path) -> Any:
    """Return all that a start gets from a checkpoint folder."""
    with contextlib.closing(CheckpointFolder(str(path))) as folder:
        folder.check_files()
        meta = {key: value for key, value in folder.meta().items() if key != "version"}
        rows = {owner: list(folder.rows(owner)) for owner in sorted(folder.owners())}
        contents = sorted(folder.contents())
    files = {c.path: Path(path, c.path).read_bytes() for c in contents if c.path is not None}
    return meta, rows, contents, files


def _flip_bits(file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    for _ in range(chance.choice([1, 1, 2, 10])):
        data[chance.randrange(len(data))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def _flip_a_bit_of_the_header(file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    data[chance.randrange(min(len(data), 200))] ^= 1 << chance.randrange(8)
    file.write_bytes(data)


def _truncate(file: Path, chance: random.Random) -> None:
    os.truncate(file, chance.randrange(file.stat().st_size))


def _empty(file: Path, chance: random.Random) -> None:
    os.truncate(file, 0)


def _lengthen(file: Path, chance: random.Random) -> None:
    with open(file, "ab") as opened:
        opened.write(chance.randbytes(chance.choice([1, 24, _PAGE, 3 * _PAGE])))


def _zero_a_part(file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    start = chance.randrange(len(data))
    length = chance.choice([1, 16, 512, _PAGE])
    data[start : start + length] = bytes(len(data[start : start + length]))
    file.write_bytes(data)


def _copy_a_page(file: Path, chance: random.Random) -> None:
    data = bytearray(file.read_bytes())
    pages = max(1, len(data) // _PAGE)
    old, new = (_PAGE * chance.randrange(pages) for _ in range(2))
    data[new : new + _PAGE] = data[old : old + _PAGE]
    file.write_bytes(data)


def _remove(file: Path, chance: random.Random) -> None:
    file.unlink()


def _swap_with_another(file: Path, chance: random.Random) -> None:
    folder = next(parent for parent in file.parents if (parent / "lock").exists())
    other = chance.choice([each for each in _files(folder) if each != file])
    first, second = file.read_bytes(), other.read_bytes()
    file.write_bytes(second)
    other.write_bytes(first)


DAMAGES: dict[str, Callable[[Path, random.Random], None]] = {
    "bits": _flip_bits,
    "a bit of the header": _flip_a_bit_of_the_header,
    "cut off": _truncate,
    "empty": _empty,
    "longer": _lengthen,
    "zeros": _zero_a_part,
    "a page of another place": _copy_a_page,
    "missing": _remove,
    "swapped": _swap_with_another,
}


def _files(folder: Path) -> list[Path]:
    """Return the files of a folder that have something in them, but those of kept states."""
    found = [path for path in sorted(folder.rglob("*")) if path.is_file() and path.name != "lock"]
    found = [path for path in found if "kept" not in path.parts]
    return [path for path in found if path.stat().st_size]


def damage(folder: Path, chance: random.Random) -> tuple[str, str]:
    """Damage a file of a folder; return its name, and how."""
    files = _files(folder)
    # Each kind of file as often as the others, though there are many of blocks.
    kind = chance.choice(sorted({_kind(path) for path in files}))
    file = chance.choice([path for path in files if _kind(path) == kind])
    how = chance.choice(sorted(DAMAGES))
    DAMAGES[how](file, chance)
    return kind, how


def _kind(path: Path) -> str:
    return "blocks" if path.name.startswith("w1.") else path.name
