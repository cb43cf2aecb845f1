"""A stage's waiting input. A stateful stage has several shards, each with keys of its own."""

from __future__ import annotations

from collections import deque
from collections.abc import Iterable, Iterator

from luminosity.engine.data.blocks import Block
from luminosity.engine.data.timers import TimerStore
from luminosity.engine.data.watermarks import Holds
from luminosity.engine.loop.bundle import Bundle
from luminosity.engine.plan.codecs import ElementCodec


class Shard:
    """Queues of blocks, one per read. In an exclusive shard one bundle runs at a time, in the order of its input."""

    def __init__(self, reads: Iterable[str], is_exclusive: bool) -> None:
        self._queues: dict[str, deque[Block]] = {read_id: deque() for read_id in reads}
        self.is_exclusive = is_exclusive
        self.retries: deque[Bundle] = deque()
        self.timers = TimerStore()
        self.holds = Holds()
        self.count = 0
        self.bytes = 0
        self.running = 0

    def is_free(self) -> bool:
        return not self.is_exclusive or not self.running

    def is_idle(self) -> bool:
        return not (self.count or self.running or self.retries or self.timers)

    def append(self, read_id: str, block: Block) -> None:
        self._queues[read_id].append(block)
        self._account(block, 1)

    def prepend(self, read_id: str, blocks: Iterable[Block]) -> None:
        """Put back what a bundle did not process."""
        for block in reversed(list(blocks)):
            self._queues[read_id].appendleft(block)
            self._account(block, 1)

    def take(self, codecs: dict[str, ElementCodec], elements: int, max_bytes: int) -> dict[str, list[Block]]:
        """Remove and return up to ``elements``, and at least one, from the front."""
        taken: dict[str, list[Block]] = {}
        size = 0
        for read_id, queue in self._queues.items():
            while queue and elements > 0 and (size < max_bytes or not taken):
                block = queue.popleft()
                self._account(block, -1)
                if block.count > elements:
                    block, rest = block.cut(codecs[read_id], elements)
                    queue.appendleft(rest)
                    self._account(rest, 1)
                elements -= block.count
                size += block.weight
                taken.setdefault(read_id, []).append(block)
        return taken

    def waiting_blocks(self) -> Iterator[Block]:
        """Those that will be taken last, first."""
        for queue in self._queues.values():
            yield from reversed(queue)

    def release(self) -> None:
        for queue in self._queues.values():
            for block in queue:
                block.release()
            queue.clear()
        for bundle in self.retries:
            bundle.release()

    def _account(self, block: Block, sign: int) -> None:
        self.count += sign * block.count
        self.bytes += sign * block.weight
        if sign > 0:
            self.holds.add(block.hold)
        else:
            self.holds.remove(block.hold)
