"""How many examples are prepared at once."""

from __future__ import annotations

__all__ = ["BlockSize"]

_FIRST = 64
_LARGEST = 1024
_LARGEST_BYTES = 16_000_000
_SLOW_S = 0.1
_QUICK_S = 0.04  # Twice as many would not be slow.
_TRY_AGAIN_AFTER = 16  # blocks
_ALIKE = 1.5  # Two times that differ by less are those of a call, whatever the number of its examples.


class BlockSize:
    """Large blocks cost less per example; but the device waits for the first ones, and so they must not take long.

    A machine that is busy just now makes blocks smaller than they have to be. So they are made larger again from time
    to time: where a call costs the same for one example and for many, small ones would be ruinous. If that costs much,
    no size is quick, and blocks are made as large as they may be.
    """

    def __init__(self) -> None:
        self.examples = _FIRST
        self._steady = 0
        self._before = (_FIRST, 0.0)
        """The number before the last change, and how long such a block took."""

    def learn(self, examples: int, size: int, seconds: float) -> None:
        """From a block of so many examples and bytes, and the time that it took."""
        if seconds > _SLOW_S:
            self._change(2 * self.examples if self._is_that_of_a_call(seconds) else self.examples // 2, seconds)
        elif examples >= self.examples:  # The last block of a bundle may be quick because it is small.
            self._steady += 1
            if seconds < _QUICK_S or self._steady >= _TRY_AGAIN_AFTER:
                self._change(2 * self.examples, seconds)
        self.examples = max(1, min(self.examples, _LARGEST_BYTES * examples // max(size, 1)))

    def _is_that_of_a_call(self, seconds: float) -> bool:
        """Whether the last change has shown that smaller blocks take about as long as larger ones."""
        before, took = self._before
        return seconds > took / _ALIKE if before > self.examples else seconds < took * _ALIKE

    def _change(self, examples: int, seconds: float) -> None:
        examples = max(1, min(examples, _LARGEST))
        if examples != self.examples:
            self._before = (self.examples, seconds)
        self.examples = examples
        self._steady = 0
