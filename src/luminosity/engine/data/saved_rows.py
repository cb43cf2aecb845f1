"""What a checkpoint keeps of a part of a run: rows of bytes, and blocks that these rows refer to."""

from __future__ import annotations

import marshal
import struct
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from luminosity.engine.data.blocks import Block

__all__ = ["MARSHAL_VERSION", "BlockReference", "BlockRows", "Changes", "SavedRows", "SingleRow"]

MARSHAL_VERSION = 2  # the last one that writes the same bytes for equal values, whatever else refers to them
_MOST_REFERENCES = 1000  # in a row: some tens of kilobytes
_INDEX = struct.Struct(">I")

# What ``marshal`` writes in place of a block: the number of its content, its range there, count, hold and weight.
BlockReference = tuple[Any, ...]


class Changes(Protocol):
    """Collects what has changed since the last checkpoint. Only the loop's thread uses it; nothing blocks.

    A row belongs to an owner, such as one grouping, and has a key that is unique there.
    """

    def put(self, owner: str, key: bytes, value: bytes) -> None:
        """Write a row, in place of the row with the same key."""
        ...

    def remove(self, owner: str, key: bytes) -> None:
        """Remove a row. There need not be one."""
        ...

    def remove_all(self, owner: str) -> None:
        """Remove all rows of an owner."""
        ...

    def refer(self, block: Block) -> BlockReference:
        """Return what to write in place of a block.

        The block's content stays in the checkpoint for as long as each later checkpoint refers to it. So call this for
        every block of a part in every checkpoint, also if the row with the reference need not be written again.
        """
        ...


class SavedRows(Protocol):
    """The rows of the checkpoint that a run continues from."""

    def rows(self, owner: str) -> Iterator[tuple[bytes, bytes]]:
        """Yield the keys and values of an owner's rows, in the order of their keys."""
        ...

    def block(self, reference: BlockReference) -> Block:
        """Return a block that was saved. The caller owns it."""
        ...


class SingleRow:
    """Writes one row whenever its value has changed. Only the loop's thread uses it."""

    def __init__(self, key: bytes) -> None:
        self.key = key
        self._value = b""

    def save(self, value: Any, changes: Changes, owner: str) -> None:
        """Write the row, unless it has this value. The value has plain types only."""
        if (packed := marshal.dumps(value, MARSHAL_VERSION)) != self._value:
            changes.put(owner, self.key, packed)
            self._value = packed

    def restore(self, value: bytes) -> Any:
        """Return the value of a row that a checkpoint has."""
        self._value = value
        return marshal.loads(value)


class BlockRows:
    """Writes the references to a list of blocks that only grows, each reference once.

    Each checkpoint adds rows for the blocks that are new. The key of a row is ``prefix`` and the index of its first
    block. Only the loop's thread uses it.
    """

    def __init__(self, prefix: bytes) -> None:
        self._prefix = prefix
        self._saved = 0  # blocks that rows refer to
        self._keys: list[bytes] = []

    def save(self, blocks: Iterable[Block], changes: Changes, owner: str) -> None:
        """Write the blocks that were added since the last call. ``blocks`` are all of them, in order."""
        references = [changes.refer(block) for block in blocks]
        for start in range(self._saved, len(references), _MOST_REFERENCES):
            key = self._prefix + _INDEX.pack(start)
            changes.put(owner, key, marshal.dumps(references[start : start + _MOST_REFERENCES]))
            self._keys.append(key)
        self._saved = len(references)

    def clear(self, changes: Changes, owner: str) -> None:
        """Remove all rows. The list begins again."""
        for key in self._keys:
            changes.remove(owner, key)
        self._keys.clear()
        self._saved = 0

    def restore(self, key: bytes, value: bytes, saved: SavedRows) -> list[Block]:
        """Return the blocks of one row. Call it for all rows whose keys begin with the prefix, in order."""
        references = marshal.loads(value)
        self._keys.append(key)
        self._saved += len(references)
        return [saved.block(reference) for reference in references]
