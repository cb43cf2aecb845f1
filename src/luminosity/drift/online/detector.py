"""Drift detected while rows arrive, with a false alarm once in as many rows as asked for."""

from __future__ import annotations

import warnings
from typing import Any, Protocol, runtime_checkable

import numpy as np

from luminosity.drift.kernels import RBF, Kernel
from luminosity.drift.online.autocorrelation import AutocorrelationWarning
from luminosity.drift.online.calibrate import calibrate
from luminosity.drift.online.reference_sample import Reference
from luminosity.drift.online.windowed_statistic import Calibration, WindowedStatistic
from luminosity.drift.sums.bin_sums import Progress
from luminosity.errors import DriftError

__all__ = ["OnlineDetector", "OnlineMMD"]


_MOST_STEPS = 100_000_000  # to simulate: minutes
_ROWS_PER_WINDOW = 20  # With 10 the mean run time is an eighth too long: references differ too much.
_LEAST_SIMULATIONS = 100


class OnlineMMD:
    """Tells when rows no longer come from the reference's distribution: MMD² of the last ``window`` rows against it.

    Without drift there is a false alarm once in ``expected_run_time`` rows on average, equally likely after any row,
    the first few included. Thresholds that give this are found by simulation (see `calibrate`), in seconds, or a minute
    for a large reference and a long run time; ``progress`` is called with what is done of it and with all there is to
    do. They rest on rows that do not depend on each other: where the stream's do, an `AutocorrelationWarning` says so.

    A long window sees small drift, a short one sees large drift sooner. The reference needs 20 rows for each of the
    window, better 40; of more than ``reference_rows`` a sample is taken. Three quarters of them are compared with each
    new row, the others serve the calibration. By chance, the run time is off by about ``1 / sqrt(simulations)``.

    After an alarm ``drift_detected`` stays true, until `reset()`.

    >>> import numpy as np
    >>> random = np.random.default_rng(0)
    >>> detector = OnlineMMD(random.normal(size=(400, 2)), expected_run_time=500, window=20, simulations=100)
    >>> detector.update(random.normal(size=(50, 2)))
    >>> detector.drift_detected, detector.rows_seen
    (False, 50)
    >>> detector.update(random.normal(2, 1, size=(50, 2)))
    >>> detector.drift_detected, 50 < detector.detected_at < 70
    (True, True)
    """

    def __init__(
        self,
        reference: Any,
        *,
        expected_run_time: float,
        window: int = 50,
        kernel: Kernel | None = None,
        simulations: int = 1000,
        reference_rows: int = 2000,
        seed: int = 0,
        progress: Progress | None = None,
    ) -> None:
        _check(expected_run_time, window, simulations, reference_rows)
        sample, gram = Reference.sampled(reference, kernel or RBF(), reference_rows, seed)
        if len(sample) < _ROWS_PER_WINDOW * window:
            raise DriftError(
                f"Found {len(sample):,} rows of reference with window={window}. Expected at least "
                f"{_ROWS_PER_WINDOW * window:,}, {_ROWS_PER_WINDOW} times as many; or a shorter window."
            )
        compared = len(sample) - len(sample) // 4
        thresholds = calibrate(gram, compared, window, expected_run_time, simulations, seed, progress)
        self.expected_run_time = expected_run_time
        self.shared = Calibration(sample.first(compared, gram), thresholds)
        self._run = WindowedStatistic(self.shared)
        self._detected_at: int | None = None
        self._warned = False

    def reset(self) -> None:
        """Begin again with an empty window. The calibration stays, and what is known of the autocorrelation."""
        self._run.restart()
        self._detected_at = None

    def update(self, batch: Any) -> None:
        """Take in one row, or several, in the order in which they came."""
        rows = self.shared.reference.prepared(batch)
        done = 0
        if not self.drift_detected:
            done, alarm = self._run.advance(self.shared, rows)
            self._detected_at = self._run.seen if alarm else None
        self._run.advance(self.shared, rows[done:], until_alarm=False)
        self._warn_once()

    @property
    def drift_detected(self) -> bool:
        return self._detected_at is not None

    @property
    def detected_at(self) -> int | None:
        """After how many rows the alarm came."""
        return self._detected_at

    @property
    def rows_seen(self) -> int:
        """Since the beginning, or the last `reset()`."""
        return self._run.seen

    @property
    def statistic(self) -> float:
        """The unbiased MMD² of the rows in the window against the reference; around zero without drift."""
        return self._run.statistic

    @property
    def threshold(self) -> float:
        """What the statistic was last compared with: higher while the window fills."""
        return self._run.threshold

    @property
    def window(self) -> int:
        return self.shared.window

    @property
    def kernel(self) -> Kernel:
        """With its bandwidth, which comes from the reference where none was given."""
        return self.shared.reference.kernel

    @property
    def autocorrelation(self) -> dict[int, float]:
        """By lag, as the kernel sees it: near zero where rows do not depend on those before them."""
        return self._run.autocorrelation.by_lag

    @property
    def autocorrelated(self) -> bool:
        """Whether that is clearly more than chance, so that the expected run time does not hold."""
        return self._run.autocorrelation.found

    def _warn_once(self) -> None:
        if self.autocorrelated and not self._warned:
            self._warned = True
            found = ", ".join(f"{value:.2f} at lag {lag}" for lag, value in self.autocorrelation.items())
            warnings.warn(
                f"Rows depend on those before them (autocorrelation {found}), so that false alarms do not come once in "
                f"{self.expected_run_time:,g} rows, but sooner where it is positive. Shuffle, or take every n-th row.",
                AutocorrelationWarning,
                stacklevel=3,
            )


def _check(expected_run_time: float, window: int, simulations: int, reference_rows: int) -> None:
    for name, found, least in (
        ("window", window, 2),
        ("simulations", simulations, _LEAST_SIMULATIONS),
        ("reference_rows", reference_rows, 2),
    ):
        if not isinstance(found, (int, np.integer)) or found < least:  # type: ignore[redundant-expr]
            raise DriftError(f"Found {name}={found!r}, expected a whole number from {least} on.")
    if not window < expected_run_time < float("inf"):
        raise DriftError(
            f"Found expected_run_time={expected_run_time} with window={window}. Expected more rows than the "
            "window's: otherwise there is a false alarm before it is full."
        )
    if simulations * expected_run_time > _MOST_STEPS:
        raise DriftError(
            f"Found expected_run_time={expected_run_time:,g} with simulations={simulations:,}: as many false alarms of "
            f"as many rows each, are too many to simulate. Expected a product of at most {_MOST_STEPS:,}."
        )


@runtime_checkable
class OnlineDetector(Protocol):
    """Rows go in, a verdict comes out; the same rows give the same verdict, one at a time or many at once."""

    def update(self, batch: Any) -> None:
        """Take in one row, or several, in the order in which they came. If they are no rows, nothing changes."""
        ...

    @property
    def drift_detected(self) -> bool:
        """Whether there was an alarm; it stays until `reset()`."""
        ...

    def reset(self) -> None:
        """Begin again, as new."""
        ...
