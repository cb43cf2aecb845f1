"""How many elements the next bundle of a stage gets, and how long it may run."""

from __future__ import annotations

import math

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
