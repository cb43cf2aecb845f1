"""Finds out whether rows depend on the rows before them: false alarms then come sooner than calibrated.

Rows that follow each other are compared with rows farther apart. Similarity is measured by the kernel: with
``Linear()`` this is the autocorrelation of all columns together, with other kernels the same in the kernel's feature
space. This similarity is what makes the statistic large by chance. The autocorrelation of one number per row, such as
its mean kernel with the reference, would miss most of it.
"""

from __future__ import annotations

from typing import Any

import numpy as np

__all__ = ["Autocorrelation", "AutocorrelationWarning"]

_LAGS = (1, 2, 3, 5, 8)  # rows before
_FAR = 16  # rows before: the distance that lags are compared with
_STRETCH = 8  # rows whose sum is one value for the standard error
_ENOUGH_ROWS = 200  # rows before the first decision
_STANDARD_ERRORS = 4  # how far from zero an excess must be
_NEXT_LOOK = 1.25  # times as many rows: a decision after each row would see large values by chance more often


class AutocorrelationWarning(UserWarning):
    """The rows of a stream depend on the rows before them, so that the detector's calibration does not hold."""


class Autocorrelation:
    """Measures, for some lags, how much more similar a row is to the row at that lag than to a row far before it.

    Both are compared with the same row, so that a stream that differs from the reference is not taken for a dependent
    one. The standard error comes from sums over stretches of rows: drift that sets in makes one or two of them large,
    which is no more than one or two standard errors; dependence makes most of them large.
    """

    def __init__(self, window: int) -> None:
        self._far = min(window, _FAR)
        self.lags = tuple(lag for lag in _LAGS if lag < self._far)
        self._rows = 0
        self._open_stretch = self._excess = self._squares = np.zeros(len(self.lags))
        self._variance = 0.0
        self._look_at = _ENOUGH_ROWS
        self.found = False

    def add(self, kernel: Any, held: int) -> None:
        """Add new rows. ``kernel`` holds their values with the ``held`` rows before them, then with all new rows."""
        new = np.arange(max(0, self._far - held), len(kernel))
        if len(new) == 0:
            return
        with_far = kernel[new, held + new - self._far].astype(np.float64)
        excess = np.stack([kernel[new, held + new - lag] - with_far for lag in self.lags])
        self._add_stretches(excess, self._rows % _STRETCH)
        self._excess = self._excess + excess.sum(axis=1)  # A new array, because copies share the old one.
        self._variance += float((kernel[new, held + new] - with_far).sum())
        self._rows += len(new)
        if self._rows >= self._look_at:
            self._look_at = int(self._rows * _NEXT_LOOK)
            self.found = self.found or bool((np.abs(self._excess) > _STANDARD_ERRORS * np.sqrt(self._squares)).any())

    def _add_stretches(self, excess: Any, in_stretch: int) -> None:
        rows = excess.shape[1]
        starts = np.concatenate([[0], np.arange(_STRETCH - in_stretch, rows + 1, _STRETCH)])
        sums = np.add.reduceat(np.pad(excess, np.array([(0, 0), (0, 1)])), starts, axis=1)
        sums[:, 0] += self._open_stretch
        self._squares = self._squares + (sums[:, :-1] ** 2).sum(axis=1)
        self._open_stretch = sums[:, -1]

    @property
    def by_lag(self) -> dict[int, float]:
        """The autocorrelation at each lag; empty until it can be computed."""
        if self._variance <= 0:
            return {}
        return {lag: float(excess / self._variance) for lag, excess in zip(self.lags, self._excess, strict=True)}
