"""What lies between stages while a run lasts, and how far event time has come there."""

from __future__ import annotations

import time
from collections.abc import Iterable, Iterator

from luminosity.engine.data.blocks import Block
from luminosity.engine.data.grouping import Grouping
from luminosity.engine.data.sideinputs import SideInputData
from luminosity.engine.data.watermarks import MAX
from luminosity.engine.loop.spill_policy import SpillPolicy
from luminosity.engine.loop.stage import StageRun

_MOST_QUEUE_BYTES = 64 << 20
_LEAST_QUEUE_BYTES = 1 << 20
_QUEUES_PART = 2  # of the budget, what all queues together may take before they hold back their writers


def queue_limit(memory_limit: int, buffers: int) -> int:
    """What may wait in one queue."""
    share = memory_limit // (_QUEUES_PART * max(1, buffers))
    return max(_LEAST_QUEUE_BYTES, min(_MOST_QUEUE_BYTES, share))


class BufferRun:
    def __init__(self, grouping: Grouping | None, limit: int, spill_policy: SpillPolicy) -> None:
        self.grouping = grouping
        self.limit = limit
        self._spill_policy = spill_policy
        self.writers: list[StageRun] = []
        self.readers: list[tuple[StageRun, str]] = []
        self.side_input: SideInputData | None = None
        self.uncommitted_bytes = 0  # of bundles that run: there, or to be expected
        self._is_exhausted = grouping is None

    def side_input_data(self) -> Iterator[bytes]:
        """All that came through, encoded, for whoever copies it."""
        return self.side_input.data() if self.side_input is not None else iter(())

    def deliver(self, block: Block) -> None:
        """Take over a committed block."""
        if self.grouping is not None:
            self.grouping.add(block)
        else:
            self._fan_out(block)

    def watermark(self) -> int:
        """That of everything which is still to come out; a grouping comes out when all of its input is there."""
        watermark = min((writer.output_watermark for writer in self.writers), default=MAX)
        if self.grouping is not None and not self._is_exhausted:
            return min(watermark, self.grouping.earliest, MAX - 1)
        return watermark

    def pump(self, deadline: float) -> bool:
        """Move a grouping's input and output on, at most until ``deadline``; whether there was something to move."""
        if self._is_exhausted or self.grouping is None:
            return False
        has_moved = False
        while time.monotonic() < deadline:
            if self.grouping.pending:
                self.grouping.absorb()
                self._spill_policy.check()
            elif self._is_complete() and self._wants_more():
                block = self.grouping.next_block()
                if block is None:
                    self._is_exhausted = True
                    return True
                self._fan_out(block)
            else:
                return has_moved
            has_moved = True
        return has_moved

    def _is_complete(self) -> bool:
        return all(writer.output_watermark >= MAX for writer in self.writers)

    def _wants_more(self) -> bool:
        """Whether someone is there to take a grouping's next groups; till then they stay where they are."""
        if self.side_input is not None or not self.readers:
            return True
        ready = [stage for stage, _ in self.readers if stage.is_ready]
        return bool(ready) and all(stage.queued_bytes <= self.limit // 2 for stage in ready)

    def fraction_out(self) -> float:
        """Of what writers have given, the part that readers have got."""
        if self._is_exhausted or self.grouping is None:
            return 1.0
        table = self.grouping.table
        return table.values_out / table.values_in if self._is_complete() and table.values_in else 0.0

    def holds_back(self) -> StageRun | None:
        """The reader for whose sake its writers should wait: it could run, and has enough to do.

        A reader that can't run yet never holds back, since it may be waiting for what its writers are doing. Half of
        the limit is left for what bundles write that run already.
        """
        if self.grouping is not None:
            return None
        for stage, _ in self.readers:
            if stage.is_ready and stage.queued_bytes + self.uncommitted_bytes > self.limit // 2:
                return stage
        return None

    def room(self) -> int:
        """What may still come without going beyond the limit."""
        queued = max((stage.queued_bytes for stage, _ in self.readers if stage.is_ready), default=0)
        return max(0, self.limit - queued - self.uncommitted_bytes)

    def release(self) -> None:
        if self.grouping is not None:
            self.grouping.release()
        if self.side_input is not None:
            self.side_input.release()

    def _fan_out(self, block: Block) -> None:
        for stage, read_id in self.readers:
            stage.add(read_id, block.share())
        if self.side_input is not None:
            self.side_input.add(block.share())
        block.release()
        self._spill_policy.check()


class Outflow:
    """Of one stage."""

    def __init__(self, buffers: Iterable[tuple[bytes, BufferRun]]) -> None:
        # A grouping takes any amount.
        self._queues = {buffer_id: buffer for buffer_id, buffer in buffers if buffer.grouping is None}
        self._bytes_per_element: dict[bytes, float] = {}

    def is_held_back(self) -> bool:
        return any(queue.holds_back() for queue in self._queues.values())

    def most_elements(self, bundles: int) -> int | None:
        """How many elements each of ``bundles`` may take without giving more than there is room for."""
        most = [
            queue.room() / self._bytes_per_element[buffer_id] / bundles
            for buffer_id, queue in self._queues.items()
            if self._bytes_per_element.get(buffer_id)
        ]
        return max(1, int(min(most))) if most else None

    def begin(self, elements: int) -> PendingOutput:
        """A bundle of so many elements starts."""
        return PendingOutput(self._queues, {key: int(size * elements) for key, size in self._bytes_per_element.items()})

    def learn(self, pending: PendingOutput, elements: int) -> None:
        if not elements:
            return
        for buffer_id, size in pending.sizes.items():
            known = self._bytes_per_element.get(buffer_id, size / elements)
            self._bytes_per_element[buffer_id] = 0.5 * (known + size / elements)


class PendingOutput:
    """What one attempt at a bundle gives: what is expected of it counts as if it were there."""

    def __init__(self, queues: dict[bytes, BufferRun], expected: dict[bytes, int]) -> None:
        self._queues = queues
        self._counted = expected
        self.sizes: dict[bytes, int] = {}
        for buffer_id, size in expected.items():
            queues[buffer_id].uncommitted_bytes += size

    def add(self, buffer_id: bytes, size: int) -> bool:
        """Count a block; whether whoever reads it has enough to do by now."""
        queue = self._queues.get(buffer_id)
        if queue is None:
            return False
        self.sizes[buffer_id] = total = self.sizes.get(buffer_id, 0) + size
        counted = self._counted.get(buffer_id, 0)
        if total > counted:
            queue.uncommitted_bytes += total - counted
            self._counted[buffer_id] = total
        return total > counted and queue.holds_back() is not None

    def end(self) -> None:
        """It is committed, or given up: nothing of it is on its way."""
        for buffer_id, size in self._counted.items():
            self._queues[buffer_id].uncommitted_bytes -= size
        self._counted = {}
