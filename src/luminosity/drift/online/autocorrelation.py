"""Whether rows that follow each other are more alike than rows farther apart: then false alarms come sooner than asked.

Likeness is the kernel's: with ``Linear()`` this is the autocorrelation of all columns together, with other kernels the
same in the space where the kernel is a product. It is what makes the statistic large by chance. The autocorrelation of
one number for each row, such as its mean kernel with the reference, would miss most of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Autocorrelation", "AutocorrelationWarning"]

_LAGS = (1, 2, 3, 5, 8)
_FAR = 16  # rows before; what is less alike there is compared with
_BLOCK = 8
_ENOUGH_ROWS = 200
_STANDARD_ERRORS = 4
_NEXT_LOOK = 1.25  # times as many rows: whoever looks after each row sees large values by chance more often


class AutocorrelationWarning(UserWarning):
    """Rows of a stream depend on those before them, so that its detector's calibration does not hold."""


class Autocorrelation:
    """For some lags, how much more alike a row is to the one so long before than to one far before.

    Both are compared with the same row, so that a stream that differs from the reference is not taken for a dependent
    one. The standard error comes from sums over blocks of rows: drift that sets in makes one or two of them large, and
    that is no more than one or two standard errors; dependence makes most of them large.
    """

    def __init__(self, window: int) -> None:
        self._far = min(window, _FAR)
        self.lags = tuple(lag for lag in _LAGS if lag < self._far)
        self._rows = 0
        self._open_block = self._excess = self._squares = np.zeros(len(self.lags))
        self._variance = 0.0
        self._look_at = _ENOUGH_ROWS
        self.found = False

    def add(self, kernel: Any, held: int) -> None:
        """From the kernel of each new row with ``held`` rows before it, then with all new ones."""
        new = np.arange(max(0, self._far - held), len(kernel))
        if len(new) == 0:
            return
        with_far = kernel[new, held + new - self._far].astype(np.float64)
        excess = np.stack([kernel[new, held + new - lag] - with_far for lag in self.lags])
        self._add_blocks(excess, self._rows % _BLOCK)
        self._excess = self._excess + excess.sum(axis=1)  # A new array: copies share the old one.
        self._variance += float((kernel[new, held + new] - with_far).sum())
        self._rows += len(new)
        if self._rows >= self._look_at:
            self._look_at = int(self._rows * _NEXT_LOOK)
            self.found = self.found or bool((np.abs(self._excess) > _STANDARD_ERRORS * np.sqrt(self._squares)).any())

    def _add_blocks(self, excess: Any, in_block: int) -> None:
        rows = excess.shape[1]
        starts = np.concatenate([[0], np.arange(_BLOCK - in_block, rows + 1, _BLOCK)])
        sums = np.add.reduceat(np.pad(excess, ((0, 0), (0, 1))), starts, axis=1)
        sums[:, 0] += self._open_block
        self._squares = self._squares + (sums[:, :-1] ** 2).sum(axis=1)
        self._open_block = sums[:, -1]

    @property
    def by_lag(self) -> dict[int, float]:
        if self._variance <= 0:
            return {}
        return {lag: float(excess / self._variance) for lag, excess in zip(self.lags, self._excess, strict=True)}
