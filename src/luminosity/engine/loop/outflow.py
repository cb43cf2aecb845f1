"""What a stage gives to the queues behind it: learnt, expected and counted, so that they keep to their limit."""

from __future__ import annotations

from collections.abc import Iterable

from luminosity.engine.loop.buffers import BufferRun


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

    def begin(self, elements: int) -> Given:
        """A bundle of so many elements starts."""
        return Given(self._queues, {key: int(size * elements) for key, size in self._bytes_per_element.items()})

    def learn(self, given: Given, elements: int) -> None:
        if not elements:
            return
        for buffer_id, size in given.sizes.items():
            known = self._bytes_per_element.get(buffer_id, size / elements)
            self._bytes_per_element[buffer_id] = 0.5 * (known + size / elements)


class Given:
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
