"""One key's stream: what Beam's state keeps of it, and the alerts that it gives."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

from apache_beam.utils.timestamp import Timestamp

from luminosity.drift.online.run import Calibrated, Run

__all__ = ["DriftAlert", "Stream"]


@dataclass(frozen=True)
class DriftAlert:
    """That drift was detected in a stream."""

    rows_seen: int
    """Of the stream, up to the row at which it was detected."""
    run_length: int
    """The same since the stream's beginning, or since the alert before."""
    statistic: float
    """Unbiased MMD² of the window's rows against the reference."""
    threshold: float
    timestamp: Timestamp
    """Of the element with that row."""
    autocorrelated: bool
    """Whether rows depended on those before them, so that this may well be a false alarm."""


@dataclass(frozen=True)
class Stream:
    run: Run
    rows_seen: int = 0

    @property
    def autocorrelated(self) -> bool:
        return self.run.autocorrelation.found

    def advanced(self, shared: Calibrated, rows: Any, timestamp: Timestamp) -> tuple[Stream, list[DriftAlert]]:
        """With prepared rows; after each alert it begins again.

        This stream stays as it is: it may be a runner's own, which must not change if the bundle fails.
        """
        run, done = self.run.copy(), 0
        alerts: list[DriftAlert] = []
        while done < len(rows):
            taken, alarm = run.advance(shared, rows[done:])
            done += taken
            if alarm:
                seen = self.rows_seen + done
                dependent = run.autocorrelation.found
                alerts.append(DriftAlert(seen, run.seen, run.statistic, run.threshold, timestamp, dependent))
                run.restart()
        return Stream(run, self.rows_seen + len(rows)), alerts
