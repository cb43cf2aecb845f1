"""MMD² of the last rows of one stream against the reference, updated with each new row."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from typing import Any

import numpy as np

from luminosity.drift.online.autocorrelation import Autocorrelation
from luminosity.drift.online.reference_sample import MOST_AT_ONCE, Reference

__all__ = ["Calibration", "WindowedStatistic"]


@dataclass(frozen=True)
class Calibration:
    """The part of a detector that all streams share: the reference, and the threshold after 1, 2, … rows."""

    reference: Reference
    thresholds: Any

    @property
    def window(self) -> int:
        """The number of rows in a full window."""
        return len(self.thresholds)


class WindowedStatistic:
    """The state of one stream: the rows of its window, with two numbers for each, and a few sums.

    A row's ``with_later`` is the sum of its kernel with the later rows of the window. When the oldest row leaves the
    window, its sum leaves with it and nothing else changes. A new row therefore costs no more than its kernel with the
    window, and no rounding error accumulates.
    """

    def __init__(self, calibration: Calibration) -> None:
        self._rows = np.zeros((0, calibration.reference.width), dtype=np.float32)
        self._witness = np.zeros(0)
        self._with_later = np.zeros(0)
        self.autocorrelation = Autocorrelation(calibration.window)
        self.restart()

    def restart(self) -> None:
        """Start again with an empty window. Old rows are kept only to measure the autocorrelation."""
        self.seen = 0
        self.statistic, self.threshold = float("nan"), float("inf")

    def copy(self) -> WindowedStatistic:
        """Return a copy that can be advanced without changing this one."""
        found = copy.copy(self)
        found.autocorrelation = copy.copy(self.autocorrelation)
        return found

    def advance(self, calibration: Calibration, rows: Any, *, until_alarm: bool = True) -> tuple[int, bool]:
        """Process prepared rows up to the first alarm. Returns the number of rows, and whether there was an alarm."""
        done = 0
        while done < len(rows):
            taken, alarm = self._piece(calibration, rows[done : done + MOST_AT_ONCE], until_alarm)
            done += taken
            if alarm:
                return done, True
        return done, False

    def _piece(self, calibration: Calibration, rows: Any, until_alarm: bool) -> tuple[int, bool]:
        held = len(self._rows)
        kernel = calibration.reference.values_in_window(rows, self._rows, calibration.window)
        witness = np.concatenate([self._witness, calibration.reference.witness(rows)])
        position, time = np.arange(held + len(rows))[:, None], held + np.arange(len(rows))
        with_later = np.pad(self._with_later, (0, len(rows)))[:, None] + np.cumsum(
            np.where(position < time, kernel.T, 0), axis=1, dtype=np.float64
        )
        first = max(0, held - self.seen)
        inside = (position <= time) & (position > time - calibration.window) & (position >= first)
        counts = np.minimum(time + 1 - first, calibration.window)
        statistics = (
            2 * (with_later * inside).sum(axis=0) / np.maximum(1, counts * (counts - 1))
            - 2 * (witness[:, None] * inside).sum(axis=0) / counts
            + calibration.reference.mean_kernel
        )
        thresholds = calibration.thresholds[counts - 1]
        alarms = np.flatnonzero(statistics > thresholds) if until_alarm else []
        last = int(alarms[0]) if len(alarms) else len(rows) - 1
        kept = slice(max(0, held + last + 1 - calibration.window), held + last + 1)
        self.autocorrelation.add(kernel[: last + 1], held)
        self._rows = np.concatenate([self._rows, rows])[kept]
        self._witness, self._with_later = witness[kept], with_later[kept, last]
        self.seen += last + 1
        self.statistic, self.threshold = float(statistics[last]), float(thresholds[last])
        return last + 1, len(alarms) > 0
