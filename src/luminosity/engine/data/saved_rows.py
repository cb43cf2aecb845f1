"""What a checkpoint keeps of a part of a run: rows of bytes, blocks that they refer to, and input that waits for it."""

from __future__ import annotations

import marshal
import struct
from collections import deque
from collections.abc import Iterable, Iterator
from typing import Any, Protocol

from luminosity.engine.data.blocks import Block
from luminosity.engine.data.event_time import Holds

__all__ = ["MARSHAL_VERSION", "BlockReference", "BlockRows", "Changes", "SavedRows", "SingleRow", "StableInput"]

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


class StableInput:
    """Keeps the output of a Reshuffle until it is in a checkpoint, so that its readers get it again after a restart.

    Without this, steps before the Reshuffle could run again and produce other elements, while outside effects of the
    steps behind it are there already. Only the loop's thread uses it. Owns the blocks.

    ``is_patient`` says that its blocks need no early checkpoint.
    """

    def __init__(self, *, is_patient: bool = False) -> None:
        self.is_patient = is_patient
        self._blocks: deque[Block] = deque()
        self._submitted: deque[tuple[int, int]] = deque()  # checkpoint, and how many more of the blocks it has
        self._unsubmitted = 0  # blocks
        self.holds = Holds()
        self.bytes = 0

    @property
    def is_waiting(self) -> bool:
        """Whether there are blocks that no checkpoint has yet."""
        return self._unsubmitted > 0

    def add(self, block: Block) -> None:
        """Keep a block until a checkpoint has it. Takes over the block."""
        self._blocks.append(block)
        self._unsubmitted += 1
        self.holds.add(block.hold)
        self.bytes += block.weight

    def blocks(self) -> Iterable[Block]:
        """Return all blocks, which a checkpoint has in the queues of their readers."""
        return self._blocks

    def submitted(self, number: int) -> None:
        """Note that the checkpoint with this number has all blocks."""
        if self._unsubmitted:
            self._submitted.append((number, self._unsubmitted))
            self._unsubmitted = 0

    def take_saved(self, number: int) -> Iterator[Block]:
        """Remove and yield the blocks that the checkpoints up to this number have."""
        while self._submitted and self._submitted[0][0] <= number:
            for _ in range(self._submitted.popleft()[1]):
                block = self._blocks.popleft()
                self.holds.remove(block.hold)
                self.bytes -= block.weight
                yield block

    def release(self) -> None:
        """Release all blocks."""
        for block in self._blocks:
            block.release()
        self._blocks.clear()
