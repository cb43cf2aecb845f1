"""MMD² of the last rows of one stream against a bounded sample of the reference, updated with each new row."""

from __future__ import annotations

import copy
from dataclasses import dataclass
from functools import cache, cached_property
from typing import Any

import numpy as np

from luminosity.drift.distances import SAMPLE_ROWS
from luminosity.drift.kernels import BlockKernel, Kernel
from luminosity.drift.mmd.exact import centre_of
from luminosity.drift.rows import as_rows, same_width
from luminosity.errors import DriftError

__all__ = ["AutocorrelationWarning", "Calibration", "Reference", "WindowedStatistic"]

_SIZES = (1, 16, 256)  # numbers of new rows that code is compiled for; other numbers are filled up
MOST_AT_ONCE = _SIZES[-1]


class Reference:
    """Centred rows of the reference, and the mean kernel of all their pairs."""

    def __init__(self, rows: Any, centre: Any, kernel: Kernel, mean_kernel: float) -> None:
        self.rows = rows
        self.kernel = kernel
        self.mean_kernel = mean_kernel
        self._centre = centre

    @classmethod
    def sampled(cls, values: Any, kernel: Kernel, most: int, seed: int) -> tuple[Reference, Any]:
        """Return at most ``most`` rows in random order, and the matrix of their kernels, with zeros on its diagonal."""
        if isinstance(kernel, BlockKernel) or not isinstance(kernel, Kernel):  # type: ignore[redundant-expr]
            raise DriftError(
                f"found kernel={type(kernel).__name__}, expected one kernel of rows of numbers: RBF, Laplacian, "
                "Linear, Polynomial or RowKernel"
            )
        rows = as_rows(values, "the reference")
        rows = rows[np.random.default_rng((seed, 4)).permutation(len(rows))[:most]]
        sample = rows[:SAMPLE_ROWS].astype(np.float64)
        centre = centre_of([kernel], sample)
        found = cls((rows - centre).astype(np.float32), centre, kernel.resolved(sample - centre), 0.0)
        gram = np.concatenate(
            [
                found.values(found.rows[start : start + MOST_AT_ONCE], found._held)
                for start in range(0, len(rows), MOST_AT_ONCE)
            ]
        )
        np.fill_diagonal(gram, 0)
        return found, gram

    def first(self, count: int, gram: Any) -> Reference:
        """Return the first ``count`` of these rows as a reference."""
        mean_kernel = float(gram[:count, :count].sum(dtype=np.float64) / (count * (count - 1)))
        return Reference(self.rows[:count].copy(), self._centre, self.kernel, mean_kernel)

    def __len__(self) -> int:
        return len(self.rows)

    @property
    def width(self) -> int:
        """The numbers of a row."""
        return self.rows.shape[1]

    def prepared(self, batch: Any) -> Any:
        """Return one row or many, checked and centred like the reference's rows."""
        rows = as_rows([batch] if self._is_one(batch) else batch, "the batch", least=0)
        if len(rows) == 0:
            return self.rows[:0]
        same_width(self.rows, rows)
        return (rows - self._centre).astype(np.float32)

    def _is_one(self, batch: Any) -> bool:
        try:
            dimensions = np.ndim(batch)
        except ValueError:  # rows of several widths
            return False
        return dimensions == 0 or (dimensions == 1 and self.width > 1 and len(batch) > 0)

    def witness(self, rows: Any) -> Any:
        """Return the mean kernel of each row with the reference."""
        return self.values(rows, self._held).mean(axis=1, dtype=np.float64)

    def values(self, rows: Any, others: Any) -> Any:
        """Return the kernel of each of a few rows with each of the others."""
        filled = np.zeros((_size(len(rows)), self.width), dtype=np.float32)
        filled[: len(rows)] = rows
        parameters = tuple(map(np.float32, self.kernel.parameters()))
        return np.asarray(_compiled()(self.kernel.form(), parameters, filled, others))[: len(rows)]

    def values_in_window(self, rows: Any, window: Any, most: int) -> Any:
        """Return the kernel of each new row with the rows in a window of at most ``most``, then with all new rows."""
        filled = np.zeros((most + _size(len(rows)), self.width), dtype=np.float32)
        filled[: len(window)], filled[most : most + len(rows)] = window, rows
        found = self.values(rows, filled)
        return np.concatenate([found[:, : len(window)], found[:, most : most + len(rows)]], axis=1)

    @cached_property
    def _held(self) -> Any:
        """The rows on the device where compiled code runs."""
        import jax

        return jax.device_put(self.rows)

    def __getstate__(self) -> dict[str, Any]:
        return {name: value for name, value in self.__dict__.items() if name != "_held"}


def _size(rows: int) -> int:
    return next(size for size in _SIZES if size >= rows)


@cache
def _compiled() -> Any:
    import jax

    def values(form: Kernel, parameters: Any, x: Any, y: Any) -> Any:
        return form.values(parameters, x, y)

    return jax.jit(values, static_argnums=0)


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
