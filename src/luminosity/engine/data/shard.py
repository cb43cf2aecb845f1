"""The waiting input of a stage. A stateful stage has several shards, each with its own keys."""

from __future__ import annotations

import heapq
import itertools
from collections import deque
from collections.abc import Callable, Iterable, Iterator, Sequence
from typing import Protocol, TypeVar

from luminosity.engine.data import wire
from luminosity.engine.data.blocks import Block, BlockStore
from luminosity.engine.data.event_time import CellExpiry, Holds
from luminosity.engine.data.timers import TimerStore
from luminosity.engine.plan.codecs import ElementCodec, KeyedElement

__all__ = ["DelayedInput", "Shard", "by_shard", "cut_by_shard"]

_T = TypeVar("_T")

_SETTLED_S = 1.0  # a shard stays with its worker for this long: the worker's cache of its state is lost with each move
_tokens = itertools.count(1)


class _Worker(Protocol):
    has_exited: bool


class Shard:
    """Queues of blocks, one for each read, with the timers of the same keys.

    In an exclusive shard one bundle runs at a time, in the order of the input, so that a key's elements are never in
    two bundles at once. Owns the blocks.
    """

    def __init__(self, reads: Iterable[str], is_exclusive: bool, index: int = 0) -> None:
        self.index = index  # among the shards of its stage
        self._queues: dict[str, deque[Block]] = {read_id: deque() for read_id in reads}
        self.is_exclusive = is_exclusive
        self.retries = 0  # bundles with its keys that wait for another attempt, which come before other input
        self.waiting_since = 0.0  # since when its input waits for a bundle
        self.timers = TimerStore()
        self.cell_expiry = CellExpiry()
        self.holds = Holds()
        self.count = 0  # queued elements
        self.bytes = 0  # queued weight: the elements' bytes and those that they refer to
        self.running = 0  # bundles
        self.had_timers = False  # whether its last bundle had timers, not input
        self.turn = 0  # rises with each bundle of the stage: the shard with the lowest is next
        self.last_worker: _Worker | None = None
        self._state_token = b""
        self._moved_at = -_SETTLED_S

    def may_move(self, now: float) -> bool:
        """Return whether the next bundle may go to another worker than the last one."""
        return self.last_worker is None or self.last_worker.has_exited or now - self._moved_at >= _SETTLED_S

    @property
    def has_worker(self) -> bool:
        """Whether the worker lives that had the last bundle."""
        return self.last_worker is not None and not self.last_worker.has_exited

    def state_token(self, worker: _Worker, now: float) -> bytes:
        """Return the token under which ``worker``, which gets the next bundle, may cache the state of these keys.

        Under one token, a worker sees exactly the writes of its own committed bundles, and of all that were committed
        before the token was made: another worker that gets the shard in between, and an attempt that fails, end it.
        """
        if worker is not self.last_worker:
            if self.last_worker is not None:
                self._moved_at = now
            self.last_worker = worker
            self.renew_state_token()
        return self._state_token

    def renew_state_token(self) -> None:
        """Let no worker use what it has cached of this shard's state: an attempt has failed, and its writes with it."""
        self._state_token = b"%d" % next(_tokens)

    def is_free(self) -> bool:
        """Return whether a bundle with queued input or timers may start."""
        return not self.is_exclusive or not (self.running or self.retries)

    def is_idle(self) -> bool:
        """Return whether nothing is queued, running, to be retried or scheduled."""
        return not (self.count or self.running or self.retries or self.timers)

    def append(self, read_id: str, block: Block, now: float) -> None:
        """Queue a block behind all others of the same read."""
        if not self.count:
            self.waiting_since = now
        self._queues[read_id].append(block)
        self._account(block, 1)

    def prepend(self, read_id: str, blocks: Iterable[Block]) -> None:
        """Queue blocks that a bundle did not process before all others of the same read."""
        for block in reversed(list(blocks)):
            self._queues[read_id].appendleft(block)
            self._account(block, 1)

    def take(self, codecs: dict[str, ElementCodec], elements: int, max_bytes: int) -> dict[str, list[Block]]:
        """Remove and return up to ``elements``, but at least one, from the front of the queues."""
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

    def take_one(self, may_take: Callable[[Block], bool]) -> dict[str, list[Block]]:
        """Remove and return the first queued block that ``may_take`` accepts. Returns nothing if there is none."""
        for read_id, queue in self._queues.items():
            for position, block in enumerate(queue):
                if may_take(block):
                    del queue[position]
                    self._account(block, -1)
                    return {read_id: [block]}
        return {}

    def queued(self, read_id: str) -> Iterable[Block]:
        """Return the queued blocks of a read, the one that will be taken first first."""
        return self._queues[read_id]

    def waiting_blocks(self) -> Iterator[Block]:
        """Yield the queued blocks, the one that will be taken last first."""
        for queue in self._queues.values():
            yield from reversed(queue)

    def release(self) -> None:
        """Release all queued blocks."""
        for queue in self._queues.values():
            for block in queue:
                block.release()
            queue.clear()

    def _account(self, block: Block, sign: int) -> None:
        self.count += sign * block.count
        self.bytes += sign * block.weight
        if sign > 0:
            self.holds.add(block.hold)
        else:
            self.holds.remove(block.hold)


def cut_by_shard(
    block: Block, elements: Iterable[KeyedElement], shards: Sequence[Shard], store: BlockStore
) -> Iterator[tuple[Shard, Block]]:
    """Yield the elements of each shard as a block of their own, in place of ``block``, which had them."""
    parts: dict[int, list[bytes]] = {}
    key_hash, count = wire.key_hash, len(shards)
    for element in elements:  # without a function of our own for each element
        parts.setdefault(key_hash(element.key) % count, []).append(element.encoded)
    for index, encoded in parts.items():
        # If the elements refer to a large group's values, each part keeps the block, and thereby the values, alive.
        data = b"".join(encoded)
        weight = block.weight if len(parts) == 1 else len(data)
        part = store.of_bytes(
            data,
            len(encoded),
            block.hold,
            weight=weight,
            on_free=block.share().release if block.has_references else None,
            token=block.token,
        )
        yield shards[index], part
    block.release()


def by_shard(
    items: Iterable[_T], key: Callable[[_T], bytes], members: Sequence[Shard], shards: Sequence[Shard]
) -> Iterable[tuple[Shard, Iterable[_T]]]:
    """Return the items of each of a bundle's shards, its ``members``, given the encoded key of an item."""
    if len(members) == 1:
        return ((members[0], items),)
    found: dict[Shard, list[_T]] = {}
    for item in items:
        shard = shards[wire.shard_index(key(item), len(shards))]
        found.setdefault(shard if shard in members else members[0], []).append(item)
    return found.items()


class DelayedInput:
    """Residuals that a source gave back and that wait until they are due. Owns their blocks."""

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, str, Block]] = []
        self._order = itertools.count()
        self.holds = Holds()

    def __len__(self) -> int:
        return len(self._heap)

    def add(self, read_id: str, block: Block, due_at: float) -> None:
        """Keep a residual until ``due_at``."""
        heapq.heappush(self._heap, (due_at, next(self._order), read_id, block))
        self.holds.add(block.hold)

    def blocks(self) -> Iterator[Block]:
        """Yield all residuals."""
        return (block for _, _, _, block in self._heap)

    def entries(self) -> Iterator[tuple[float, str, Block]]:
        """Yield all residuals, with the times at which they are due and the ids of their reads."""
        return ((due_at, read_id, block) for due_at, _, read_id, block in self._heap)

    def next_due(self) -> float:
        """Return when the next residual is due."""
        return self._heap[0][0] if self._heap else float("inf")

    def take_due(self, now: float) -> Iterator[tuple[str, Block]]:
        """Remove and yield the residuals that are due, each with its read id."""
        while self._heap and self._heap[0][0] <= now:
            _, _, read_id, block = heapq.heappop(self._heap)
            self.holds.remove(block.hold)
            yield read_id, block

    def release(self) -> None:
        """Release all residuals."""
        for block in self.blocks():
            block.release()
