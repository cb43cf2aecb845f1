"""Made-up histories of drift: thirty days of tests for several keys; drift goes on, is over, or a key is missing."""

from __future__ import annotations

import math
from collections.abc import Iterator
from dataclasses import replace
from datetime import datetime, timedelta, timezone
from pathlib import Path

from luminosity.drift import DriftHistory, PastTest
from luminosity.drift.watch.state import Alert, KeyState, WatchMemory, state_file, state_to_change

__all__ = ["days", "drift_history"]

_DAYS = 30
_FIRST = datetime(2026, 10, 18, 6, 0, tzinfo=timezone.utc)
_REFERENCE = "reviews-2026-09.parquet"
_KEYS = ("", "language=en", "language=de", "language=fr", "language=sv")
_DRIFTS = {"": (24, 30), "language=de": (19, 30), "language=fr": (8, 13)}  # days
_LAST = {"language=sv": 17}  # the day of the last test


def drift_history(path: Path, report: Path | None = None) -> None:
    """Write a history and what a watch of it has said. Points of the last days have a report, if one is given."""
    tests = [test for key in _KEYS for test in _tests(key, report)]
    DriftHistory(path).append(*tests)
    with state_to_change(state_file(path)) as state:
        state.watches["reviews"] = WatchMemory(
            _REFERENCE,
            {key: KeyState(is_drift=_DRIFTS.get(key, (0, 0))[1] == _DAYS, is_missing=key in _LAST) for key in _KEYS},
        )
        state.alerts.extend(_alerts())


def _tests(key: str, report: Path | None) -> Iterator[PastTest]:
    begins, ends = _DRIFTS.get(key, (_DAYS, _DAYS))
    for day in range(_LAST.get(key, _DAYS)):
        time = _FIRST + timedelta(days=day)
        is_drift = begins <= day < ends
        noise = 0.5 + 0.5 * math.sin(day * 12.9898 + len(key) * 78.233)
        p_value = 10 ** -(2.6 + 1.4 * noise) if is_drift else 0.03 + 0.9 * noise
        mmd2 = (0.021 + 0.006 * noise) if is_drift else 0.0016 + 0.0022 * noise
        yield PastTest(
            time=time.isoformat(timespec="milliseconds"),
            reference=_REFERENCE,
            current=f"reviews-{time:%Y-%m-%d}.parquet",
            columns="embedding",
            kernel="rbf",
            statistic=mmd2,
            threshold=0.006,
            mmd2=mmd2,
            p_value=p_value,
            level=0.01,
            drift=is_drift,
            reference_rows=20_000,
            current_rows=4_000 + 100 * day,
            key=key,
            window_start=(time - timedelta(days=1)).isoformat(),
            window_end=time.isoformat(),
            report=str(report) if report is not None and day >= _DAYS - 5 else None,
            floor_mmd2=0.0035,
        )


def days(*drifts: bool, first: int) -> Iterator[PastTest]:
    """Yield a test for each day from the day ``first`` on, which finds drift or does not."""
    (test, *_) = _tests("", None)
    for day, is_drift in enumerate(drifts, start=first):
        time = (_FIRST + timedelta(days=day)).isoformat(timespec="milliseconds")
        yield replace(test, time=time, drift=is_drift, p_value=0.001 if is_drift else 0.4)


def _alerts() -> Iterator[Alert]:
    def alert(day: int, key: str, kind: str, message: str, p_value: float | None = None) -> Alert:
        time = (_FIRST + timedelta(days=day)).isoformat(timespec="milliseconds")
        return Alert(time, "reviews", _REFERENCE, key, kind, message, p_value, 0.01)  # type: ignore[arg-type]

    yield alert(8, "language=fr", "drift", "4,800 rows differ from the reference", 0.0011)
    yield alert(13, "language=fr", "resolved", "5,300 rows do not differ from the reference", 0.41)
    yield alert(19, "language=de", "drift", "5,900 rows differ from the reference", 0.0004)
    yield alert(20, "language=sv", "missing", "no test for 72 hours")
    yield alert(24, "", "drift", "6,400 rows differ from the reference", 0.0009)
