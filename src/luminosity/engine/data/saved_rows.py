"""What a checkpoint keeps of a part of a run: rows of bytes, and blocks that these rows refer to."""

from __future__ import annotations

from collections.abc import Iterator
from typing import Any, Protocol

from luminosity.engine.data.blocks import Block

__all__ = ["BlockReference", "Changes", "SavedRows"]

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
