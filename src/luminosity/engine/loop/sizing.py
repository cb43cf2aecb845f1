"""How many elements the next bundle of a stage gets, and how long it may run."""

from __future__ import annotations

import math
import struct
from collections.abc import Callable, Iterable

from luminosity.engine.data.blocks import Block
from luminosity.engine.plan.codecs import ElementCodec

_SHORTEST_S = 0.02
_LONGEST_S = 1.0
# A bundle's results are seen when it is done. Kept to this part of the time that the stage has run, bundles delay
# the end of a run by no more than that, and their number grows only with the logarithm of its length.
_PART_OF_ELAPSED = 0.05
# A step that sorts what it gets gains more from a long bundle than its end loses.
_LONGEST_SORTED_S = 5.0
_PART_OF_ELAPSED_SORTED = 0.2
_GROWTH = 8
_SHORTEST_DEADLINE_S = 0.1
SINK_ELEMENTS = 1000
_WORTH_SEVERAL_FILES = 16_000_000  # bytes
_MOST_PATIENCE = 64

_SIZE = struct.Struct(">d")  # the last bytes of an element: what its restriction provider said
_MOST_ELEMENTS = 10_000


class BundleSize:
    """Starts at one element and grows to at most a second of work, or five where a step sorts it."""

    def __init__(self, is_sink: bool = False, sorts: bool = False) -> None:
        self._is_sink = is_sink
        self._longest = _LONGEST_SORTED_S if sorts else _LONGEST_S
        self._part_of_elapsed = _PART_OF_ELAPSED_SORTED if sorts else _PART_OF_ELAPSED
        self._started_at: float | None = None
        self._seconds_per_element: float | None = None
        self._last = 0
        self._patience = 1

    def target_seconds(self, now: float) -> float:
        if self._is_sink:
            return _LONGEST_S
        if self._started_at is None:
            return _SHORTEST_S
        return min(self._longest, max(_SHORTEST_S, self._part_of_elapsed * (now - self._started_at)))

    def next(self, now: float, queued: int, slots: int, queued_size: float = 0.0) -> int:
        """Elements for a bundle, of ``queued``, while this many slots could take, or will want, one.

        ``queued_size``: the bytes that these are, or stand for, as far as that is known.
        """
        if self._started_at is None:
            self._started_at = now
        if self._is_sink:
            return self._next_of_sink(queued, slots, queued_size)
        if self._seconds_per_element is None:
            return 1
        target = self.target_seconds(now)
        fitting = max(1, int(target / self._seconds_per_element))
        # The rest is shared out, unless it is too little to be worth sharing.
        fair = max(math.ceil(queued / max(1, slots)), int(_SHORTEST_S / self._seconds_per_element))
        return max(1, min(fitting, fair, self._last * _GROWTH))

    def _next_of_sink(self, queued: int, slots: int, queued_size: float) -> int:
        """A file is written per bundle: few bundles, and one alone where there is little to write."""
        if self._seconds_per_element is None:
            files = slots if queued_size >= _WORTH_SEVERAL_FILES else 1
            return min(math.ceil(queued / max(1, files)), SINK_ELEMENTS)
        if queued * self._seconds_per_element < _LONGEST_S / 2:
            return queued
        fitting = max(1, int(_LONGEST_S / self._seconds_per_element))
        return min(fitting, math.ceil(queued / max(1, slots)))

    def deadline_seconds(self, now: float) -> float:
        """When a bundle that started ``now`` should be asked to stop early."""
        return self._patience * max(_SHORTEST_DEADLINE_S, self.target_seconds(now))

    def was_split(self, *, has_output: bool) -> None:
        """A bundle was stopped early. If it had come to nothing yet, the next one gets more time to."""
        self._patience = max(1, self._patience // 2) if has_output else min(_MOST_PATIENCE, 2 * self._patience)

    def learn(self, elements: int, seconds: float) -> None:
        """A bundle of ``elements`` took ``seconds`` in a worker that had run the stage before."""
        if not elements:
            return
        measured = max(seconds / elements, 1e-7)
        known = self._seconds_per_element
        self._seconds_per_element = measured if known is None else 0.5 * (known + measured)
        self._last = max(elements, self._last // 2)

    def shrink(self) -> None:
        """A worker was lost: try less at once."""
        self._last = max(1, self._last // 2)


class SizedWork:
    """Sums up sizes. Where elements are too many to be looked at, nothing is known."""

    def __init__(self, codec: Callable[[str], ElementCodec]) -> None:
        self._codec = codec  # by read
        self._seen = 0
        self._total = 0.0
        self._done = 0.0

    @property
    def done(self) -> float:
        return self._done

    @property
    def total(self) -> float | None:
        """Of all that came."""
        is_known = self._seen <= _MOST_ELEMENTS and math.isfinite(self._total) and self._total > 0
        return self._total if is_known else None

    @property
    def left(self) -> float:
        """What is not done yet, as far as that is known."""
        return max(0.0, (self.total or 0.0) - self._done)

    def came(self, read_id: str, block: Block) -> None:
        self._total += self._size(read_id, (block,))

    def committed(self, taken: dict[str, list[Block]], left: Iterable[tuple[str, list[Block]]]) -> None:
        """A bundle of ``taken`` is done, but for ``left``."""
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
