"""How many examples are prepared at once."""

from __future__ import annotations

__all__ = ["BlockSize"]

_FIRST = 64
_LARGEST = 1024
_LARGEST_BYTES = 16_000_000
_SLOW_S = 0.1
_QUICK_S = 0.04  # Twice as many would not be slow.
_TRY_AGAIN_AFTER = 16  # blocks


class BlockSize:
    """Large blocks cost less per example; but the device waits for the first ones, and so they must not take long.

    A machine that is busy just now makes blocks smaller than they have to be. So they are made larger again from time
    to time: where a call costs the same for one example and for many, small ones would be ruinous.
    """

    def __init__(self) -> None:
        self.examples = _FIRST
        self._steady = 0

    def learn(self, examples: int, size: int, seconds: float) -> None:
        """From a block of so many examples and bytes, and the time that it took."""
        if seconds > _SLOW_S:
            self._change(max(self.examples // 2, 1))
        elif examples >= self.examples:  # The last block of a bundle may be quick because it is small.
            self._steady += 1
            if seconds < _QUICK_S or self._steady >= _TRY_AGAIN_AFTER:
                self._change(min(2 * self.examples, _LARGEST))
        self.examples = max(1, min(self.examples, _LARGEST_BYTES * examples // max(size, 1)))

    def _change(self, examples: int) -> None:
        self.examples = examples
        self._steady = 0
