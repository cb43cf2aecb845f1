"""Rounds in a history that a pipeline appends to: the tests of one window are one round."""

from __future__ import annotations

import math
from dataclasses import dataclass
from datetime import datetime, timedelta

from luminosity.drift.history import DriftHistory, PastTest
from luminosity.drift.watch.judge import is_test, judge
from luminosity.drift.watch.state import WatchMemory

__all__ = ["NewRounds", "new_rounds", "window_length"]

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
