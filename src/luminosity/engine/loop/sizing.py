"""Chooses how many elements a stage's next bundle gets, from how long earlier ones took and how much work is left."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable

from luminosity.engine.data.blocks import Block
from luminosity.engine.plan.codecs import ElementCodec

__all__ = ["SINK_ELEMENTS", "BundleSize", "SizedWork"]

SINK_ELEMENTS = 1000  # worth a file, as long as the sink's speed is unknown

_SHORTEST_S = 0.02  # shorter bundles cost more in messages than in work
_LONGEST_S = 1.0  # longer bundles gain nothing, and a retry repeats more
# A bundle takes at most this part of the time that its stage has run. The end of the run is then delayed by no more
# than that, and the number of bundles grows with the logarithm of the run's length.
_PART_OF_ELAPSED = 0.05
# A step that sorts its bundle gains more from a long bundle than the end of the run loses.
_LONGEST_SORTED_S = 5.0
_PART_OF_ELAPSED_SORTED = 0.2
_GROWTH = 8  # a bundle has at most 8 times the elements of the one before, whose speed may have been luck
_SHORTEST_DEADLINE_S = 0.1  # below this, timing noise would cause splits
_WORTH_SEVERAL_FILES = 16_000_000  # bytes of a sink's first input that are worth one file per slot
_MOST_PATIENCE = 64  # times the target: also a slow start of a source fits

_SIZE = struct.Struct(">d")  # the last bytes of an element: the size that its restriction provider reported
_MOST_ELEMENTS = 10_000  # decoding more would slow the loop down


class BundleSize:
    """Chooses the size of a stage's bundles.

    It starts at one element and grows to at most a second of work, or five seconds if a step sorts its bundle.
    """

    def __init__(self, is_sink: bool = False, sorts: bool = False) -> None:
        self._is_sink = is_sink
        self._longest = _LONGEST_SORTED_S if sorts else _LONGEST_S
        self._part_of_elapsed = _PART_OF_ELAPSED_SORTED if sorts else _PART_OF_ELAPSED
        self._started_at: float | None = None
        self._seconds_per_element: float | None = None
        self._last = 0
        self._patience = 1

    def target_seconds(self, now: float) -> float:
        """Return how long a bundle that starts now should take."""
        if self._is_sink:
            return _LONGEST_S
        if self._started_at is None:
            return _SHORTEST_S
        return min(self._longest, max(_SHORTEST_S, self._part_of_elapsed * (now - self._started_at)))

    def next(self, now: float, queued: int, slots: int, queued_size: float = 0.0) -> int:
        """Return the number of elements for the next bundle.

        ``queued`` elements wait, and ``slots`` slots can take, or will want, a bundle. ``queued_size`` is the size of
        the queued elements, or of the work that they stand for, in bytes, as far as that is known.
        """
        if self._started_at is None:
            self._started_at = now
        if self._is_sink:
            return self._next_of_sink(queued, slots, queued_size)
        if self._seconds_per_element is None:
            return 1
        target = self.target_seconds(now)
        fitting = max(1, int(target / self._seconds_per_element))
        # The slots share what is queued, unless it is too little to be worth sharing.
        fair = max(math.ceil(queued / max(1, slots)), int(_SHORTEST_S / self._seconds_per_element))
        return max(1, min(fitting, fair, self._last * _GROWTH))

    def _next_of_sink(self, queued: int, slots: int, queued_size: float) -> int:
        """Return the size of a sink's bundle. Each bundle writes a file, so bundles should be few and large."""
        if self._seconds_per_element is None:
            files = slots if queued_size >= _WORTH_SEVERAL_FILES else 1
            return min(math.ceil(queued / max(1, files)), SINK_ELEMENTS)
        if queued * self._seconds_per_element < _LONGEST_S / 2:
            return queued
        fitting = max(1, int(_LONGEST_S / self._seconds_per_element))
        return min(fitting, math.ceil(queued / max(1, slots)))

    def deadline_seconds(self, now: float) -> float:
        """Return after how many seconds a bundle that starts now should be asked to split."""
        return self._patience * max(_SHORTEST_DEADLINE_S, self.target_seconds(now))

    def was_split(self, *, has_output: bool) -> None:
        """Note that a bundle was split. If it had no output yet, the next one gets more time."""
        self._patience = max(1, self._patience // 2) if has_output else min(_MOST_PATIENCE, 2 * self._patience)

    def learn(self, elements: int, seconds: float) -> None:
        """Learn the stage's speed from a bundle that took ``seconds`` in a worker that had run the stage before."""
        if not elements:
            return
        measured = max(seconds / elements, 1e-7)
        known = self._seconds_per_element
        self._seconds_per_element = measured if known is None else 0.5 * (known + measured)
        self._last = max(elements, self._last // 2)

    def shrink(self) -> None:
        """Halve the next bundle, because a worker was lost."""
        self._last = max(1, self._last // 2)


class SizedWork:
    """Tracks how much of a splittable stage's work is done, in the sizes of its restrictions.

    If there are too many elements to decode, the total is unknown.
    """

    def __init__(self, codec: Callable[[str], ElementCodec]) -> None:
        self._codec = codec  # by read id
        self._seen = 0
        self._total = 0.0
        self._done = 0.0

    @property
    def done(self) -> float:
        """The size of the committed work."""
        return self._done

    @property
    def total(self) -> float | None:
        """The size of all work that arrived, or None if it is unknown."""
        is_known = self._seen <= _MOST_ELEMENTS and math.isfinite(self._total) and self._total > 0
        return self._total if is_known else None

    @property
    def left(self) -> float:
        """The size of the work that is left, or 0 if it is unknown."""
        return max(0.0, (self.total or 0.0) - self._done)

    def arrived(self, read_id: str, block: Block) -> None:
        """Count a block from upstream."""
        self._total += self._size(read_id, (block,))

    def committed(self, taken: dict[str, list[Block]], left: Iterable[tuple[str, list[Block]]]) -> None:
        """Count a committed bundle that took ``taken`` and left ``left``."""
        self._done += sum(self._size(read_id, blocks) for read_id, blocks in taken.items())
        self._done -= sum(self._size(read_id, blocks) for read_id, blocks in left)

    def _size(self, read_id: str, blocks: Iterable[Block]) -> float:
        total = 0.0
        for block in blocks:
            self._seen += block.count
            if self._seen <= _MOST_ELEMENTS:
                elements = self._codec(read_id).elements(block.data())
                total += sum(_SIZE.unpack(value[-_SIZE.size :])[0] for _, value in elements)
        return total
