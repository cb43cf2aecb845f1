"""What the bundles of a stage have used: CPU time, memory, bytes of output, and a sample of how long they take."""

from __future__ import annotations

import random
from dataclasses import dataclass

__all__ = ["BundleSample", "StageUsage"]

_MOST_SAMPLED = 64  # bundles of a stage: enough for a spread, small in a record


@dataclass
class StageUsage:
    """Sums over the attempts of a stage's bundles since the run started. Only the loop's thread uses it."""

    failed: int = 0  # attempts, because user code raised or because the worker was lost
    cpu_seconds: float = 0.0  # this and the following: of committed bundles
    peak_resident: int = 0
    output_bytes: int = 0

    def __post_init__(self) -> None:
        self.sample = BundleSample(_MOST_SAMPLED)

    def committed(self, seconds: float, elements: int, cpu_seconds: float, resident: int, output_bytes: int) -> None:
        """Count a committed bundle."""
        self.cpu_seconds += cpu_seconds
        self.peak_resident = max(self.peak_resident, resident)
        self.output_bytes += output_bytes
        self.sample.add(seconds, elements)


class BundleSample:
    """Seconds and elements of at most ``most`` bundles, each of which is kept with the same chance.

    The choice is the same in every run with the same number of bundles.

    >>> sample = BundleSample(most=2)
    >>> for number in range(100):
    ...     sample.add(seconds=number / 10, elements=number)
    >>> len(sample.kept), all(seconds == elements / 10 for seconds, elements in sample.kept)
    (2, True)
    """

    def __init__(self, most: int) -> None:
        self._most = most
        self._seen = 0
        self._random = random.Random(0)
        self.kept: list[tuple[float, int]] = []

    def add(self, seconds: float, elements: int) -> None:
        """Note one more bundle."""
        self._seen += 1
        if len(self.kept) < self._most:
            self.kept.append((seconds, elements))
        elif (place := self._random.randrange(self._seen)) < self._most:
            self.kept[place] = seconds, elements
