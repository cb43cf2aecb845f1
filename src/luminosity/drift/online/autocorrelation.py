"""Whether rows that follow each other are more alike than rows far apart: then false alarms come sooner than asked.

Likeness is the kernel's: with ``Linear()`` this is the autocorrelation of all columns together, with other kernels the
same in the space where the kernel is a product. It is what makes the window's statistic larger by chance, so nothing
that matters is missed; the autocorrelation of one number for each row would miss most of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Autocorrelation", "AutocorrelationWarning"]

_LAGS = (1, 2, 3, 5, 8)
_ENOUGH_ROWS = 200
_STANDARD_ERRORS = 4
_NEXT_LOOK = 1.25  # times as many rows: who looks after each row sees large values by chance more often


class AutocorrelationWarning(UserWarning):
    """Rows of a stream depend on those before them, so that its detector's calibration does not hold."""


class Autocorrelation:
    """Sums over the rows seen: for some lags, how much more alike a row is to that one than to one a window before.

    Both are compared with the same row, so that a stream that differs from the reference is not taken for a dependent
    one.
    """

    def __init__(self, window: int) -> None:
        self._window = window
        self.lags = tuple(lag for lag in _LAGS if lag < window)
        self._rows = 0
        self._excess = np.zeros(len(self.lags))
        self._squares = np.zeros(len(self.lags))
        self._variance = 0.0
        self._look_at = _ENOUGH_ROWS
        self.found = False

    def add(self, kernel: Any, held: int) -> None:
        """From the kernel of each new row with ``held`` rows before it, then with all new ones."""
        new = np.arange(max(0, self._window - held), len(kernel))
        if len(new) == 0:
            return
        with_far = kernel[new, held + new - self._window].astype(np.float64)
        excess = np.stack([kernel[new, held + new - lag] - with_far for lag in self.lags])
        self._excess = self._excess + excess.sum(axis=1)  # A new array: copies share the old one.
        self._squares = self._squares + (excess * excess).sum(axis=1)
        self._variance += float((kernel[new, held + new] - with_far).sum())
        self._rows += len(new)
        if self._rows >= self._look_at:
            self._look_at = int(self._rows * _NEXT_LOOK)
            self.found = self.found or bool((np.abs(self._excess) > _STANDARD_ERRORS * np.sqrt(self._squares)).any())

    @property
    def by_lag(self) -> dict[int, float]:
        if self._variance <= 0:
            return {}
        return {lag: float(excess / self._variance) for lag, excess in zip(self.lags, self._excess, strict=True)}
