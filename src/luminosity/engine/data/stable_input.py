"""Blocks behind a Reshuffle that wait until a checkpoint has them."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from luminosity.engine.data.blocks import Block
from luminosity.engine.data.watermarks import Holds

__all__ = ["StableInput"]


class StableInput:
    """Keeps the output of a Reshuffle until it is in a checkpoint, so that its readers get it again after a restart.

    Without this, steps before the Reshuffle could run again and produce other elements, while outside effects of the
    steps behind it are there already. Only the loop's thread uses it. Owns the blocks.
    """

    def __init__(self) -> None:
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
