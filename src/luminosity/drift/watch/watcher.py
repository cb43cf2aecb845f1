"""Looks for drift round by round: makes or reads tests, finds what changed, remembers it, delivers alerts."""

from __future__ import annotations

import glob
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from math import isfinite
from typing import TypeAlias

from luminosity.drift.history import DriftHistory
from luminosity.drift.registry import drift_test
from luminosity.drift.result import PastTest, utc_text
from luminosity.drift.watch.config import ANY_LEVEL, FileWatch, HistoryWatch, Watch, WatchConfig
from luminosity.drift.watch.rounds import RoundSettings, Samples, compare_round, is_test, new_rounds, window_length
from luminosity.drift.watch.state import (
    Alert,
    AlertKind,
    KeyState,
    Silence,
    WatchMemory,
    WatchState,
    load_state,
    state_file,
    state_to_change,
)
from luminosity.errors import LuminosityError

__all__ = ["Changes", "Look", "Reader", "Watcher"]

Reader: TypeAlias = Callable[[FileWatch, Sequence[str], int], Samples]
"""Reads the rows of each key from files, with a seed; without keys, all rows have the key None."""
_PENDING_AGE = timedelta(days=1)  # an alert that could not be delivered for so long is given up


@dataclass
class Look:
    """What one look found: alerts, in order, reasons of failures by watch, and alerts that are not delivered yet."""

    alerts: list[Alert] = field(default_factory=list[Alert])
    failures: dict[str, str] = field(default_factory=dict[str, str])
    undelivered: list[str] = field(default_factory=list[str])
    drifting: int = 0
    missing: int = 0
    tests: int = 0


@dataclass(frozen=True)
class _Rounds:
    """The rounds of one watch, and what to remember of them."""

    rounds: list[list[PastTest]]
    cursor: int
    files: list[str]
    bandwidths: dict[str, float]
    trouble: str = ""


class Watcher:
    """Runs the rounds of a configuration. One process at a time does, see ``only_watch``."""

    def __init__(self, config: WatchConfig, read: Reader) -> None:
        self._config = config
        self._read = read
        self._history = DriftHistory(config.history)
        self._state_file = state_file(config.history)

    @property
    def state_path(self) -> str:
        """The file in which the state is kept."""
        return self._state_file

    def periods(self) -> dict[str, timedelta]:
        """Return the lengths of windows that the history shows, for watches of the history."""
        found: dict[str, timedelta] = {}
        for watch in self._config.watches:
            if isinstance(watch, HistoryWatch) and (length := window_length(self._history, watch.reference)):
                found[watch.name] = length
        return found

    def look(self, now: datetime) -> Look:
        """Make one round of each watch, and deliver the alerts. A watch that fails does not stop the others."""
        found = Look()
        level = self._config.level(self.periods())
        before = load_state(self._state_file)
        rounds: dict[str, _Rounds] = {}
        for watch in self._config.watches:
            try:
                rounds[watch.name] = self._rounds(watch, before.memory(watch.name), level, now)
                if rounds[watch.name].trouble:
                    found.failures[watch.name] = rounds[watch.name].trouble
            except LuminosityError as error:
                found.failures[watch.name] = error.for_command()
            except OSError as error:  # a file system that is away for a moment must not end the watch
                found.failures[watch.name] = f"{type(error).__name__}: {error}"
        with state_to_change(self._state_file) as state:
            state.silences = [each for each in state.silences if each.until > now]
            for watch in self._config.watches:
                found.alerts += self._changes(watch, state, rounds.get(watch.name), now)
            found.tests = sum(
                is_test(test) or test.by_detector  # nothing is compared for a key that is new or gone
                for of_watch in rounds.values()
                for each in of_watch.rounds
                for test in each
            )
            state.alerts += found.alerts
            told = [alert for alert in found.alerts if not alert.silenced]
            state.pending += [(target.name, alert) for target in self._config.targets for alert in told]
            for memory in (state.memory(watch.name) for watch in self._config.watches):
                found.drifting += sum(each.is_drift and not each.is_missing for each in memory.keys.values())
                found.missing += sum(each.is_missing for each in memory.keys.values())
        found.undelivered = self._deliver(now)
        return found

    def _rounds(self, watch: Watch, memory: WatchMemory, level: float, now: datetime) -> _Rounds:
        if isinstance(watch, HistoryWatch):
            new = new_rounds(
                self._history,
                watch.reference,
                memory,
                level=level,
                min_effect=watch.min_effect,
                settle=self._config.settle,
                now=now,
            )
            return _Rounds(new.rounds, new.cursor, [], {}, new.trouble)
        files, marks = [watch.current], list[str]()
        if watch.only_new:
            fresh = _new_files(watch.current, set(memory.files), now - self._config.settle)
            if not fresh:
                return _Rounds([], 0, [], {})
            files, marks = list(fresh), list(fresh.values())
        seed = self._config.seed
        # A bandwidth that is given and one that is kept look the same in a history.
        test = drift_test(watch.test).from_options(watch.options, ANY_LEVEL)
        settings = RoundSettings(
            test=test.for_columns(len(watch.columns)),
            names=(watch.reference, watch.current),
            columns=", ".join(watch.columns),
            by=watch.by,
            level=level,
            min_effect=watch.min_effect,
            kept=memory.bandwidths,
            seed=seed,
            now=now,
            reports=self._config.reports,
        )
        found = compare_round(
            self._read(watch, [watch.reference], 2 * seed),
            self._read(watch, files, 2 * seed + 1),
            self._read(watch, [watch.floor], 2 * seed + 2) if watch.floor else None,
            settings=settings,
        )
        self._history.append(*found.tests)
        return _Rounds([found.tests], 0, marks, found.kept)

    def _changes(self, watch: Watch, state: WatchState, new: _Rounds | None, now: datetime) -> list[Alert]:
        memory = state.memory(watch.name)
        is_first = not memory.last_round
        memory.reference = watch.reference
        for key in watch.keys:
            memory.keys.setdefault(key, KeyState(since=utc_text(now)))
        changes = Changes(watch.name, memory, watch.missing_after, [*self._config.silences, *state.silences])
        found: list[Alert] = []
        if new is not None:
            for judged in new.rounds:
                found += changes.round(judged, now)
            if is_first:  # A history from before the watch: what is over is no news.
                found = [alert for alert in _last_of_each(found) if alert.kind == "drift"]
            memory.last_round = utc_text(now)
            memory.cursor = new.cursor or memory.cursor
            memory.files += new.files
            memory.bandwidths |= new.bandwidths
        return found + changes.overdue(now)

    def _deliver(self, now: datetime) -> list[str]:
        """Deliver what is pending. Return why alerts stay pending; those that are too old are given up."""
        pending = load_state(self._state_file).pending
        if not pending:
            return []
        targets = {target.name: target for target in self._config.targets}
        reasons: list[str] = []
        left: list[tuple[str, Alert]] = []
        broken: set[str] = set()
        for name, alert in pending:
            if name not in targets:
                continue  # The configuration has changed.
            reason = "an earlier alert failed" if name in broken else targets[name].send(alert)
            if reason is None:
                continue
            broken.add(name)
            is_old = now - datetime.fromisoformat(alert.time) > _PENDING_AGE
            reasons.append(f"{name}: {reason}" + ("; given up after a day" if is_old else ""))
            if not is_old:
                left.append((name, alert))
        with state_to_change(self._state_file) as state:
            state.pending = left
        return reasons


def _new_files(pattern: str, known: set[str], before: datetime) -> dict[str, str]:
    """Return the files that were not tested yet, with a mark that changes if a file is written again.

    A file that changed after ``before`` may still be written, and waits.
    """
    names = sorted(glob.glob(os.path.join(pattern, "*") if os.path.isdir(pattern) else pattern, recursive=True))
    found: dict[str, str] = {}
    for name in names:
        if os.path.basename(name).startswith((".", "_")) or not os.path.isfile(name):
            continue
        facts = os.stat(name)
        mark = f"{name}|{facts.st_size}|{facts.st_mtime_ns}"
        if mark not in known and facts.st_mtime <= before.timestamp():
            found[name] = mark
    return found


def _last_of_each(alerts: Sequence[Alert]) -> list[Alert]:
    return [replace(alert) for alert in {alert.key: alert for alert in alerts}.values()]


@dataclass(frozen=True)
class Changes:
    """Compares rounds of one watch with what is remembered of it.

    ``missing_after`` is None if a key that is no longer tested is no reason for an alert.
    """

    watch: str
    memory: WatchMemory
    missing_after: timedelta | None
    silences: Sequence[Silence] = ()

    def round(self, judged: Sequence[PastTest], now: datetime) -> list[Alert]:
        """Take up the tests of a round, and return the alerts that they give: drift, resolved, back."""
        found: list[Alert] = []
        latest = utc_text(now)
        for test in judged:
            state = self.memory.keys.setdefault(test.key, KeyState(since=utc_text(now)))
            is_alert = test.by_detector
            if not (is_test(test) or is_alert or test.verdict == "new"):
                continue  # Nothing was compared.
            # A last test that lies in the future was made before the clock was set back: it says nothing about order.
            if test.time <= state.last_test <= latest:
                continue  # A later window has said more.
            if state.is_missing:
                state.is_missing = False
                found.append(
                    self._alert(test.key, "back", f"there are tests again, after {state.last_test}", now, test)
                )
            state.last_test, state.by_detector = test.time, is_alert
            if test.drift != state.is_drift:
                state.is_drift, state.since = test.drift, test.time
                kind: AlertKind = "drift" if test.drift else "resolved"
                found.append(self._alert(test.key, kind, _message(test), now, test))
        return found

    def overdue(self, now: datetime) -> list[Alert]:
        """Return alerts for keys without a test for too long, and for those whose silence has ended."""
        found: list[Alert] = []
        for key, state in self.memory.keys.items():
            last = datetime.fromisoformat(state.last_test or state.since)
            if self.missing_after is not None and not state.is_missing and now - last > self.missing_after:
                hours = f"{self.missing_after.total_seconds() / 3600:g} hours"
                if not state.by_detector:
                    state.is_missing = True
                    said = f"the last was {state.last_test}" if state.last_test else "there was none yet"
                    found.append(self._alert(key, "missing", f"no test for {hours}; {said}", now))
                elif state.is_drift:
                    state.is_drift, state.since = False, utc_text(now)
                    found.append(self._alert(key, "resolved", f"no alert of the detector for {hours}", now))
            if state.untold and not self._is_silent(key, now):
                is_still = state.is_missing if state.untold == "missing" else state.is_drift
                if is_still:
                    kind: AlertKind = "missing" if state.untold == "missing" else "drift"
                    since = (state.last_test or state.since) if kind == "missing" else state.since
                    found.append(self._alert(key, kind, f"{kind} since {since}; the silence has ended", now))
                state.untold = ""
        return found

    def _alert(self, key: str, kind: AlertKind, message: str, now: datetime, test: PastTest | None = None) -> Alert:
        name = f"{self.watch}, {key}" if key else self.watch
        is_silent = self._is_silent(key, now)
        if is_silent and kind in ("drift", "missing"):
            self.memory.keys[key].untold = kind
        alert = Alert(
            time=utc_text(now),
            watch=self.watch,
            reference=self.memory.reference,
            key=key,
            kind=kind,
            message=f"{name}: {message}",
            silenced=is_silent,
        )
        if test is None:
            return alert
        has_p_value = is_test(test)
        return replace(
            alert,
            p_value=test.p_value if has_p_value else None,
            level=test.level if has_p_value else None,
            mmd2=test.mmd2 if isfinite(test.mmd2) else None,
            effect=test.size if isfinite(test.size) else None,
            effect_name=test.size_name,
            floor_mmd2=test.floor_mmd2,
            window=(test.window_start, test.window_end) if test.window_start and test.window_end else None,
            report=test.report,
        )

    def _is_silent(self, key: str, now: datetime) -> bool:
        return any(each.covers(key, now) for each in self.silences)


def _message(test: PastTest) -> str:
    if test.verdict == "new":
        return f"drift began: the reference has no rows of this key, and there are {test.current_rows:,} now"
    if test.by_detector:
        return f"drift began: MMD² = {test.mmd2:.4g} is above the detector's threshold {test.threshold or 0:.4g}"
    said = f"p = {test.p_value:.4g} at a level of {test.level:.3g}, {test.size_name} = {test.size:.4g}"
    if test.floor_mmd2 is not None:
        said += f" beside {test.floor_mmd2:.4g} of the floor"
    return f"drift began: {said}" if test.drift else f"drift is over: {said}"
