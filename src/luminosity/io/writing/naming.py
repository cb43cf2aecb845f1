"""Which temporary files become which final ones."""

from __future__ import annotations

import hashlib
from collections import Counter
from typing import NamedTuple

from luminosity.io.writing import files
from luminosity.io.writing.table_file import Written
from luminosity.io.writing.target import Target

__all__ = ["Move", "final_names"]


class Move(NamedTuple):
    """Several sources are joined to one file."""

    sources: tuple[Written, ...]
    final: str


def final_names(target: Target, written: list[Written]) -> list[Move]:
    """Depends on what was written and on nothing else, so that a second try comes to the same."""
    with_rows = [file for file in written if file.rows] or written[:1]
    with_rows.sort(key=lambda file: (file.partition, file.path))
    if target.is_one_file:
        return [Move(tuple(with_rows), target.path)] if with_rows else []
    # Names that no other run gives, where its files are already there.
    mark = f"-{_digest(with_rows)}" if target.if_exists == "append" else ""
    counts = Counter(file.partition for file in with_rows)
    numbers: Counter[str] = Counter()
    moves: list[Move] = []
    for file in with_rows:
        name = f"part-{numbers[file.partition]:05}-of-{counts[file.partition]:05}{mark}{target.suffix}"
        numbers[file.partition] += 1
        moves.append(Move((file,), files.join(target.path, file.partition, name)))
    return moves


def _digest(written: list[Written]) -> str:
    return hashlib.sha256("\n".join(file.path for file in written).encode()).hexdigest()[:12]
