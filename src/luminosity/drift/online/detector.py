"""Detects drift in a stream of rows, with one false alarm in a number of rows that you choose."""

from __future__ import annotations

import warnings
from typing import Any, Protocol, runtime_checkable

import numpy as np

from luminosity.drift.kernels import RBF, Kernel
from luminosity.drift.online.calibrate import calibrate
from luminosity.drift.online.windowed_statistic import AutocorrelationWarning, Calibration, Reference, WindowedStatistic
from luminosity.drift.result import COLOURS, Progress
from luminosity.errors import DriftError
from luminosity.report_page.markup import Markup, element, plain

__all__ = ["OnlineDetector", "OnlineMMD"]

_MOST_STEPS = 100_000_000  # rows to simulate: more would take longer than minutes
_ROWS_PER_WINDOW = 20  # of the reference per row of the window; with 10 the mean run time is an eighth too long
_METER_PIXELS = 360.0  # the width of the bar in a notebook; the threshold is its middle
_LEAST_SIMULATIONS = 100  # false alarms: the run time is then off by about a tenth


class OnlineMMD:
    """Detects when rows no longer come from the reference's distribution: MMD² of the last ``window`` rows against it.

    Without drift there is one false alarm in ``expected_run_time`` rows on average, equally likely after any row, the
    first few included. The thresholds are found by simulation when the detector is created, in seconds, or a minute for
    a large reference and a long run time; ``progress`` is called with the number of simulated rows done and of all. The
    calibration assumes that rows do not depend on each other. If they do, there is an ``AutocorrelationWarning``.

    A long window detects small drift, a short one detects large drift sooner. The reference needs 20 rows for each row
    of the window, better 40; at most ``reference_rows`` random rows of it are used. Three quarters of them are compared
    with each new row, the others serve the calibration. By chance, the run time is off by about
    ``1 / sqrt(simulations)``.

    After an alarm ``drift_detected`` stays true until ``reset()``.

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
                f"found {len(sample):,} rows of reference with window={window}, expected at least "
                f"{_ROWS_PER_WINDOW * window:,}, {_ROWS_PER_WINDOW} times as many",
                fix="pass a larger reference, or a shorter window",
            )
        compared = len(sample) - len(sample) // 4
        thresholds = calibrate(gram, compared, window, expected_run_time, simulations, seed, progress)
        self.expected_run_time = expected_run_time
        self.calibration = Calibration(sample.first(compared, gram), thresholds)
        self._stream = WindowedStatistic(self.calibration)
        self._detected_at: int | None = None
        self._warned = False

    def reset(self) -> None:
        """Start again with an empty window. The calibration and the measured autocorrelation stay."""
        self._stream.restart()
        self._detected_at = None

    def update(self, batch: Any) -> None:
        """Process one row, or several in the order in which they arrived."""
        rows = self.calibration.reference.prepared(batch)
        done = 0
        if not self.drift_detected:
            done, alarm = self._stream.advance(self.calibration, rows)
            self._detected_at = self._stream.seen if alarm else None
        self._stream.advance(self.calibration, rows[done:], until_alarm=False)
        self._warn_once()

    @property
    def drift_detected(self) -> bool:
        """Whether there was an alarm since the start, or since the last ``reset()``."""
        return self._detected_at is not None

    @property
    def detected_at(self) -> int | None:
        """The number of rows after which the alarm came, or None."""
        return self._detected_at

    @property
    def rows_seen(self) -> int:
        """The number of rows since the start, or since the last ``reset()``."""
        return self._stream.seen

    @property
    def statistic(self) -> float:
        """The unbiased MMD² of the rows in the window against the reference. It is around zero without drift."""
        return self._stream.statistic

    @property
    def threshold(self) -> float:
        """The threshold that the statistic was last compared with. It is higher while the window fills."""
        return self._stream.threshold

    @property
    def window(self) -> int:
        """The number of rows in a full window."""
        return self.calibration.window

    @property
    def kernel(self) -> Kernel:
        """The kernel with its bandwidth, which is chosen from the reference if you gave none."""
        return self.calibration.reference.kernel

    @property
    def autocorrelation(self) -> dict[int, float]:
        """The autocorrelation by lag, as the kernel measures it: near zero if rows do not depend on earlier rows."""
        return self._stream.autocorrelation.by_lag

    @property
    def autocorrelated(self) -> bool:
        """Whether the autocorrelation is clearly more than chance, so that the expected run time does not hold."""
        return self._stream.autocorrelation.found

    def __repr__(self) -> str:
        said = f"drift at row {self.detected_at}" if self.drift_detected else "no drift"
        return f"OnlineMMD({said}, rows_seen={self.rows_seen}, window={self.window}, kernel={self.kernel.name})"

    def _repr_html_(self) -> str:
        return _drawn(self.detected_at, self.rows_seen, self.window, self.statistic, self.threshold)

    def _warn_once(self) -> None:
        if self.autocorrelated and not self._warned:
            self._warned = True
            found = ", ".join(f"{value:.2f} at lag {lag}" for lag, value in self.autocorrelation.items())
            warnings.warn(
                f"Rows depend on the rows before them (autocorrelation {found}). False alarms do not come once in "
                f"{self.expected_run_time:,g} rows, but sooner if it is positive. Shuffle rows, or use every n-th row.",
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
            raise DriftError(f"found {name}={found!r}, expected a whole number from {least} on")
    if not window < expected_run_time < float("inf"):
        raise DriftError(
            f"found expected_run_time={expected_run_time} with window={window}, expected more rows than the window "
            "has: otherwise there is a false alarm before the window is full"
        )
    if simulations * expected_run_time > _MOST_STEPS:
        raise DriftError(
            f"found expected_run_time={expected_run_time:,g} with simulations={simulations:,}, which are too many to "
            f"simulate, expected a product of at most {_MOST_STEPS:,}"
        )


@runtime_checkable
class OnlineDetector(Protocol):
    """The interface of detectors of drift in a stream.

    The same rows give the same verdict, whether they are passed one at a time or many at once.
    """

    def update(self, batch: Any) -> None:
        """Process one row, or several in the order in which they arrived. If they are invalid, nothing changes."""
        ...

    @property
    def drift_detected(self) -> bool:
        """Whether there was an alarm; it stays true until ``reset()``."""
        ...

    def reset(self) -> None:
        """Start again, like a new detector."""
        ...


def _drawn(detected_at: int | None, rows: int, window: int, statistic: float, threshold: float) -> str:
    """Return the state of an online detector: whether there was an alarm, and how near the statistic is to one."""
    said = f"drift detected after {detected_at:,} rows" if detected_at is not None else "no drift so far"
    colour = COLOURS["no drift" if detected_at is None else "drift"]
    parts = [
        element("b", said, style=f"color: {colour}"),
        element("span", f" · {rows:,} rows seen, window of {window:,}"),
    ]
    if rows and threshold == threshold and threshold > 0:
        parts += [_meter(statistic / threshold, colour), f"MMD² {plain(statistic)}, threshold {plain(threshold)}"]
    return element("div", *parts)


def _meter(share: float, colour: str) -> Markup:
    """Draw the statistic as a bar; the mark is the threshold."""
    at = _METER_PIXELS / 2
    bar = element("rect", x=0, y=4, width=min(max(share, 0.0) * at, _METER_PIXELS), height=10, fill=colour)
    mark = element("line", x1=at, x2=at, y1=0, y2=18, stroke="#1c2430", stroke_width=2)
    ground = element("rect", x=0, y=0, width=_METER_PIXELS, height=18, fill="#f6f7f9")
    drawn = element("svg", ground, bar, mark, width=_METER_PIXELS, height=18, style="display: block; margin: 4px 0")
    return drawn
