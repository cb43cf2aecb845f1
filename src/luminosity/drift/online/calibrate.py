"""Calibrates thresholds: a stream without drift runs for the expected number of rows before a false alarm.

The method is that of Cobb, Van Looveren and Klaise, "Sequential multivariate change detection with calibrated and
memoryless false detection rates" (2022). Rows without drift are split at random, again and again, into a reference and
streams. At each row the chance of an alarm, given no alarm before, shall be one in ``expected_run_time``.

A simulated reference is exactly as large as the real one: a larger one varies less, and some percent of the spread are
ten times as many percent of the run time. A threshold serves a whole phase of rows, so that all of these rows
contribute to its estimate: short phases while the window fills, one phase once it is full. A thousand simulated false
alarms determine that threshold to three percent of the run time; one threshold per row would need a million streams.
"""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import dataclass
from typing import Any

import numpy as np

from luminosity.drift.result import Progress

__all__ = ["calibrate"]

_SPLITS, _STREAMS = 16, 256  # simulated at once: their data stays in the cache
_ALARMS_WHILE_FILLING = 10  # simulated per row; the few rows of this phase hardly matter for the run time


def calibrate(
    gram: Any,
    reference_rows: int,
    window: int,
    expected_run_time: float,
    simulations: int,
    seed: int,
    progress: Progress | None = None,
) -> Any:
    """Return the threshold after 1, 2, … rows. The last one is for a full window and all rows after it.

    ``gram`` is the kernel matrix of rows without drift, with zeros on its diagonal; ``reference_rows`` of them form the
    reference. ``simulations`` is about the number of false alarms to simulate. ``progress`` is called with the number
    of simulated rows done and of all.
    """
    random = np.random.default_rng((seed, 5))
    thresholds = np.full(window, np.inf)  # One row has no pairs, and raises no alarm.
    rate = 1 / expected_run_time
    spare = len(gram) - reference_rows
    length = min(spare, 5 * window + round(expected_run_time / 2))
    filling = _Streams.at_least(round(_ALARMS_WHILE_FILLING * expected_run_time), window - 1, spare)
    for_good = _Streams.at_least(-(-round(simulations * expected_run_time) // (length - window + 1)), length, spare)
    counter = _RowCounter(progress, filling.rows + for_good.rows)
    alive = np.concatenate(list(_simulated(gram, reference_rows, window, filling, random, counter)))
    for first, last in _phases(window):
        scale = _spread(np.arange(first, last) + 1, reference_rows)
        thresholds[first:last] = _level(alive[:, first:last] / scale, rate) * scale
        alive = alive[(alive[:, first:last] <= thresholds[first:last]).all(axis=1)]
    full = [
        some[(some[:, : window - 1] <= thresholds[:-1]).all(axis=1), window - 1 :]
        for some in _simulated(gram, reference_rows, window, for_good, random, counter)
    ]
    thresholds[-1] = _level(np.concatenate(full), rate)
    return thresholds


def _phases(window: int) -> Iterator[tuple[int, int]]:
    """Yield phases from the second row until the window is full, each longer than the one before."""
    first = 1
    while first < window - 1:
        last = min(window - 1, first + 1 + first // 4)
        yield first, last
        first = last


def _spread(rows: Any, reference_rows: int) -> Any:
    """Return the standard deviation without drift, up to a factor that does not depend on the number of rows."""
    return np.sqrt(1 / (rows * (rows - 1)) + 2 / (rows * reference_rows))


def _level(values: Any, rate: float) -> float:
    """Return the threshold that streams exceed at this rate: first alarms divided by rows up to the first alarm."""
    highest = np.maximum.accumulate(values, axis=1)
    low, high = float(highest[:, 0].min()), float(highest[:, -1].max())
    for _ in range(40):
        middle = (low + high) / 2
        alarms = np.count_nonzero(highest[:, -1] > middle)
        rows = np.count_nonzero(highest <= middle) + alarms
        low, high = (middle, high) if alarms > rate * rows else (low, middle)
    return high


@dataclass(frozen=True)
class _Streams:
    """How streams are simulated: short streams are pieces of one random order of the rows; some are done at a time."""

    length: int
    pieces: int
    orders_each: int
    rounds: int

    @classmethod
    def at_least(cls, streams: int, length: int, spare_rows: int) -> _Streams:
        """Return a plan for at least this many streams."""
        pieces = spare_rows // length
        orders_each = max(1, _STREAMS // (_SPLITS * pieces))
        return cls(length, pieces, orders_each, -(-streams // (_SPLITS * orders_each * pieces)))

    @property
    def rows(self) -> int:
        """The rows of all streams."""
        return self.rounds * _SPLITS * self.orders_each * self.pieces * self.length


class _RowCounter:
    def __init__(self, progress: Progress | None, rows: int) -> None:
        self._progress = progress
        self._rows = rows
        self._done = 0

    def add(self, rows: int) -> None:
        self._done += rows
        if self._progress is not None:
            self._progress(self._done, self._rows)


def _simulated(
    gram: Any, reference_rows: int, window: int, streams: _Streams, random: Any, counter: _RowCounter
) -> Iterator[Any]:
    """Yield the statistic after each row of each stream, some streams at a time."""
    pieces, orders_each, length = streams.pieces, streams.orders_each, streams.length
    for _ in range(streams.rounds):
        splits = random.permuted(np.tile(np.arange(len(gram)), (_SPLITS, 1)), axis=1)
        reference, others = splits[:, :reference_rows], splits[:, reference_rows:]
        chosen = np.zeros((len(gram), _SPLITS), dtype=np.float32)
        chosen[reference, np.arange(_SPLITS)[:, None]] = 1
        with_reference = (gram @ chosen).T.astype(np.float64)
        within = np.take_along_axis(with_reference, reference, axis=1).sum(axis=1)
        orders = random.permuted(np.repeat(others, orders_each, axis=0), axis=1)
        rows = orders[:, : pieces * length].reshape(-1, length)
        split = np.repeat(np.arange(_SPLITS), orders_each * pieces)
        witness = with_reference[split[:, None], rows] / reference_rows
        found = _statistics(gram, window, rows, witness, within[split] / (reference_rows * (reference_rows - 1)))
        counter.add(rows.size)
        yield found


def _statistics(gram: Any, window: int, streams: Any, witness: Any, reference_mean: Any) -> Any:
    """Return the unbiased MMD² of the window against the reference, from the running sums of ``WindowedStatistic``."""
    count, length = streams.shape
    held = np.zeros((count, window), dtype=np.intp)
    with_later = np.zeros((count, window), dtype=np.float32)
    pairs = np.zeros(count)
    found = np.empty((count, length), dtype=np.float32)
    flat = gram.ravel()
    for step in range(length):
        slot, filled = step % window, min(step, window)
        kernel = flat.take(streams[:, step, None] * len(gram) + held[:, :filled])
        if step >= window:  # the oldest row leaves
            pairs -= with_later[:, slot]
            kernel[:, slot] = 0
        with_later[:, :filled] += kernel
        with_later[:, slot] = 0
        held[:, slot] = streams[:, step]
        pairs += kernel.sum(axis=1)
        found[:, step] = pairs
    sums = np.cumsum(witness, axis=1)
    sums[:, window:] -= sums[:, :-window].copy()
    sizes = np.minimum(np.arange(length) + 1, window)
    return found * (2 / np.maximum(1, sizes * (sizes - 1))) - 2 * sums / sizes + reference_mean[:, None]
