"""Looks for drift round by round: makes or reads tests, finds what changed, remembers it, delivers alerts."""

from __future__ import annotations

import glob
import math
import os
from collections.abc import Callable, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import TypeAlias

from luminosity.drift.history import DriftHistory, PastTest, utc_text
from luminosity.drift.registry import drift_test
from luminosity.drift.watch.changes import Changes
from luminosity.drift.watch.compare_round import RoundSettings, Samples, compare_round
from luminosity.drift.watch.config import FileWatch, HistoryWatch, Watch, WatchConfig
from luminosity.drift.watch.judge import is_test, judge
from luminosity.drift.watch.state import (
    Alert,
    KeyState,
    WatchMemory,
    WatchState,
    load_state,
    state_file,
    state_to_change,
)
from luminosity.errors import LuminosityError

__all__ = ["Look", "NewRounds", "Reader", "Watcher", "new_rounds", "window_length"]
_MOST_ROWS = 10_000  # rows that one look takes up; the next look takes up the rest
_NEWEST_ROWS = 1000  # rows in which the length of windows is looked for


@dataclass(frozen=True)
class NewRounds:
    """Judged rounds in the order of time, and the number of the row up to which all rows are taken up."""

    rounds: list[list[PastTest]]
    cursor: int
    trouble: str = ""  # why drift can't be found in some rows


def new_rounds(
    history: DriftHistory,
    reference: str,
    memory: WatchMemory,
    *,
    level: float,
    min_effect: float,
    settle: timedelta,
    now: datetime,
) -> NewRounds:
    """Return the rounds of a reference that are not taken up yet.

    The newest round waits until each known key has a row in it, or its last row is as old as ``settle``: Holm's method
    compares the keys of a round with each other.
    """
    cursor = memory.cursor if memory.cursor <= history.newest_number() else 0  # smaller: the file is another one now
    rows = history.after(cursor, reference, _MOST_ROWS)
    groups: dict[str, list[tuple[int, PastTest]]] = {}
    for number, test in rows:
        groups.setdefault(_round_of(test), []).append((number, test))
    active = {key for key, state in memory.keys.items() if state.last_test and not state.is_missing}
    ordered = sorted(groups.values(), key=lambda group: group[0][1].time)
    waiting: list[tuple[int, PastTest]] = []
    if ordered and not _is_whole([test for _, test in ordered[-1]], active, settle, now):
        waiting = ordered.pop()
    rounds = [_judged([test for _, test in group], level, min_effect, len(active)) for group in ordered]
    return NewRounds(
        rounds,
        min(number for number, _ in waiting) - 1 if waiting else rows[-1][0] if rows else cursor,
        _too_few_permutations(rounds[-1]) if rounds else "",
    )


def window_length(history: DriftHistory, reference: str) -> timedelta | None:
    """Return how long the windows of a reference's newest rows are, or None if that is not known."""
    for _, test in reversed(history.after(history.newest_number() - _NEWEST_ROWS, reference, _NEWEST_ROWS)):
        if test.window_start and test.window_end and test.window_start < test.window_end:
            return datetime.fromisoformat(test.window_end) - datetime.fromisoformat(test.window_start)
    return None


def _round_of(test: PastTest) -> str:
    if test.window_start and test.window_end:
        return f"{test.window_start}/{test.window_end}"
    return test.once or test.time


def _is_whole(tests: list[PastTest], active: set[str], settle: timedelta, now: datetime) -> bool:
    if active and active <= {test.key for test in tests}:
        return True
    newest = max(test.recorded_at or test.time for test in tests)
    return now - datetime.fromisoformat(newest) >= settle


def _judged(tests: list[PastTest], level: float, min_effect: float, active: int) -> list[PastTest]:
    """Judge a round. A key that is tested again and was known before does not count twice."""
    return judge(tests, level, min_effect, max(active, sum(is_test(test) for test in tests)))


def _too_few_permutations(tests: list[PastTest]) -> str:
    """Return a message if the permutations of a round's tests can't give a p-value as low as the smallest level."""
    compared = [test for test in tests if is_test(test) and "permutations" in test.settings]
    if not compared:
        return ""
    level = min(test.level for test in compared)
    fewest = min(int(test.settings["permutations"]) for test in compared)
    if 1 / (fewest + 1) <= level:
        return ""
    needed = math.ceil(1 / level)
    return (
        f"the tests have {fewest:,} permutations, expected at least {needed:,}: with fewer, no p-value is as low "
        f"as the level {level:.3g}; pass permutations={needed} to the test, or allow more false alarms"
    )


Reader: TypeAlias = Callable[[FileWatch, Sequence[str], int], Samples]
"""Reads the rows of each key from files, with a seed; without keys, all rows have the key None."""
_ANY_LEVEL = 0.5  # a round chooses the level of its tests, and the permutations for it
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
        test = drift_test(watch.test).from_options(watch.options, _ANY_LEVEL)
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
