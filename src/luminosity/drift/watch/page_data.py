"""Histories of drift and their alerts as plain values, for a page, metrics or a notebook. Files are only read."""

from __future__ import annotations

import os
from collections.abc import Iterable, Sequence
from math import isfinite
from typing import Any

from luminosity.drift.history import DriftHistory, Series
from luminosity.drift.result import PastTest
from luminosity.drift.watch.rounds import is_test
from luminosity.drift.watch.state import Alert, KeyState, WatchState, drift_folder, load_state, state_file
from luminosity.errors import DriftError

__all__ = ["alerts", "default_histories", "drift_data", "histories"]

_MOST_SERIES = 1000  # series of all histories together, on one page
_MOST_ROWS = 500  # newest rows of a series: more points than a chart has pixels for are of no use
_MOST_ALERTS = 500
_MOST_FILES = 100  # histories that are looked for in the default folder

Paths = Sequence[str | os.PathLike[str]]


def default_histories() -> list[str]:
    """Return the histories in the default folder, ``$LUMINOSITY_DRIFT_DIR`` or ``~/.luminosity/drift``."""
    try:
        found = sorted(drift_folder().glob("*.sqlite"))
    except OSError:  # The folder can't be read: there is nothing to show.
        return []
    return [os.fspath(each) for each in found[:_MOST_FILES]]


def drift_data(paths: Paths | None = None) -> dict[str, Any]:
    """Return ``{"histories": …, "alerts": …, "damaged": …}`` of these files, or of those in the default folder.

    ``damaged`` names files that can't be read, each with the reason.
    """
    chosen = default_histories() if paths is None else [os.fspath(path) for path in paths]
    found: list[dict[str, Any]] = []
    raised: list[dict[str, Any]] = []
    damaged: list[dict[str, str]] = []
    for path in chosen:
        try:
            own = list(_series_of(path, _MOST_SERIES - len(found)))
            raised += _alerts_of(path)
            found += [each for each, _ in own]
            raised += [alert for each, tests in own if each["state"] is None for alert in _changes(each, tests)]
        except DriftError as error:
            damaged.append({"file": path, "reason": error.message})
    raised.sort(key=lambda alert: alert["time"], reverse=True)
    return {"histories": found, "alerts": raised[:_MOST_ALERTS], "damaged": damaged}


def histories(paths: Paths | None = None) -> list[dict[str, Any]]:
    """Return each series of these histories: one reference, columns, kernel and key, with its rows, the oldest first.

    ``state`` is ``"drift"``, ``"missing"`` or ``"ok"`` where a watch looks at the key, otherwise None. A ``report`` is
    the path of an HTML file.
    """
    return drift_data(paths)["histories"]


def alerts(paths: Paths | None = None) -> list[dict[str, Any]]:
    """Return the alerts that watches of these histories have raised, the newest first.

    Where no watch looks, tests say it: drift began with the first one that finds drift, and is over with the next that
    finds none. Of a detector, whose rows are alarms, only the beginning is known.
    """
    return drift_data(paths)["alerts"]


def _series_of(path: str, most: int) -> Iterable[tuple[dict[str, Any], Sequence[PastTest]]]:
    if not os.path.exists(path):
        raise DriftError(f"{path}: there is no such file")
    history = DriftHistory(path, read_only=True)
    states = list(_key_states(load_state(state_file(path))))
    for series in history.series(max(0, most)):
        tests = history.last(series.reference, series.columns, series.kernel, _MOST_ROWS, key=series.key)
        yield _as_dict(path, series, tests, states), tests


def _changes(series: dict[str, Any], tests: Sequence[PastTest]) -> Iterable[dict[str, Any]]:
    """Yield an alert for each test that changes whether there is drift. What was before the rows is not known."""
    compared = [test for test in tests if is_test(test) or test.by_detector]
    was_drift = len(tests) == _MOST_ROWS and compared[0].drift if compared else False
    for test in compared:
        if test.drift != was_drift:
            was_drift = test.drift
            yield {
                **Alert(
                    test.time, "", series["reference"], series["key"], "drift" if test.drift else "resolved", ""
                ).as_dict(),
                "history": series["history"],
                "columns": series["columns"],
                "p_value": None if test.by_detector else _number(test.p_value),
                "level": None if test.by_detector else test.level,
                "effect": _number(test.size),
                "effect_name": test.size_name,
                "report": test.report,
            }


def _alerts_of(path: str) -> list[dict[str, Any]]:
    state = load_state(state_file(path))
    return [{**alert.as_dict(), "history": path} for alert in state.alerts]


def _key_states(state: WatchState) -> Iterable[tuple[str, str, KeyState]]:
    for memory in state.watches.values():
        for key, each in memory.keys.items():
            yield memory.reference, key, each


def _as_dict(
    path: str, series: Series, rows: Sequence[PastTest], states: Sequence[tuple[str, str, KeyState]]
) -> dict[str, Any]:
    state = next((each for reference, key, each in states if (reference, key) == (series.reference, series.key)), None)
    return {
        "history": path,
        "reference": series.reference,
        "columns": series.columns,
        "kernel": series.kernel,
        "key": series.key,
        "state": None if state is None else "missing" if state.is_missing else "drift" if state.is_drift else "ok",
        "rows": [_row(test) for test in rows],
    }


def _row(test: PastTest) -> dict[str, Any]:
    is_detector = test.by_detector
    return {
        "time": test.time,
        "p_value": None if is_detector else test.p_value,
        "statistic": _number(test.statistic),
        "threshold": test.threshold,
        "mmd2": _number(test.mmd2),
        "floor_mmd2": test.floor_mmd2,
        "test": test.test,
        "effect": _number(test.size),
        "effect_name": test.size_name,
        "level": None if is_detector else test.level,
        "is_drift": test.drift,
        "verdict": test.verdict,
        "window": [test.window_start, test.window_end] if test.window_start and test.window_end else None,
        "bandwidth": test.bandwidth,
        "reference_rows": test.reference_rows,
        "current_rows": test.current_rows,
        "report": test.report,
    }


def _number(value: float) -> float | None:
    return value if isfinite(value) else None
