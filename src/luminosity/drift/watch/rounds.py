"""The rounds of a watch: makes their tests or finds them in a history, and decides which of them are drift.

A round is the tests that are made together: those of one window, or of one look at the files. Drift is what Holm's
method finds over the keys of a round, if its effect is large enough to matter.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from datetime import datetime, timedelta
from typing import Any

from luminosity.drift.by_key import compare_keys_with, key_text
from luminosity.drift.contract import Comparison, DriftTest
from luminosity.drift.history import DriftHistory
from luminosity.drift.report.page import write_report_of_point
from luminosity.drift.result import DriftResult, PastTest, utc_text
from luminosity.drift.watch.state import WatchMemory
from luminosity.errors import DriftError

__all__ = [
    "RoundSettings",
    "Samples",
    "compare_round",
    "holm_levels",
    "is_test",
    "judge",
    "new_rounds",
    "window_length",
]

_MOST_ROWS = 10_000  # rows that one look takes up; the next look takes up the rest
_NEWEST_ROWS = 1000  # rows in which the length of windows is looked for
_NO_TEST = ("gone", "too few rows")  # nothing was compared, or nothing could be found
SMALL = "drift too small to matter"


def holm_levels(p_values: Sequence[float], level: float, tests: int | None = None) -> list[float]:
    """Return the level that each p-value is compared with: those at or below their level are drift.

    Holm's method: the smallest p-value is compared with ``level / tests``, the next with ``level / (tests - 1)``, up to
    the first that is larger; all others get its level. ``tests`` may be more than there are p-values.

    >>> [round(each, 4) for each in holm_levels([0.04, 0.001, 0.03], 0.05)]
    [0.025, 0.0167, 0.025]
    """
    count = max(len(p_values), tests or 0)
    order = sorted(range(len(p_values)), key=p_values.__getitem__)
    levels = [0.0] * len(p_values)
    current = 0.0
    is_stopped = False
    for rank, at in enumerate(order):
        if not is_stopped:
            current = level / (count - rank)
            is_stopped = p_values[at] > current
        levels[at] = current
    return levels


def is_test(test: PastTest) -> bool:
    """Return whether samples were compared, so that the row has a p-value."""
    return test.verdict not in (*_NO_TEST, "new") and not test.by_detector


def judge(tests: Sequence[PastTest], level: float, min_effect: float = 0.0, keys: int | None = None) -> list[PastTest]:
    """Return the tests of a round with the level, verdict and drift that the round gives them.

    ``keys`` is how many keys the round could have: with keys whose tests are still to come, levels are the same as if
    these found nothing. A key that is new, and an alert of a detector, stay drift.
    """
    compared = [test for test in tests if is_test(test)]
    levels = iter(holm_levels([test.p_value for test in compared], level, keys))
    return [_judged(test, next(levels), min_effect) if is_test(test) else test for test in tests]


def _judged(test: PastTest, level: float, min_effect: float) -> PastTest:
    is_significant = test.p_value <= level
    is_drift = is_significant and test.size >= min_effect
    verdict = "drift" if is_drift else SMALL if is_significant else "no drift"
    return replace(test, level=level, drift=is_drift, verdict=verdict)


Samples = Mapping[Any, Any]
"""A sample of each key: what the test reads."""
_FEWEST_ROWS = 2  # of a key in each sample, to be tested
_MOST_REPORTS = 10  # keys with a report in one round


@dataclass(frozen=True, kw_only=True)
class RoundSettings:
    """The settings of a round.

    ``level`` is the false-alarm rate of the round. ``kept`` has a number for each key that the test has kept from the
    key's first round, such as a bandwidth. ``reports`` is a folder, or None.
    """

    test: DriftTest
    names: tuple[str, str]
    columns: str = ""
    by: str | None = None
    level: float
    min_effect: float = 0.0
    kept: Mapping[str, float] = field(default_factory=dict[str, float])
    seed: int = 0
    now: datetime
    reports: str | None = None


@dataclass(frozen=True)
class Round:
    """The tests of a round, judged, and what the test keeps of each key for later rounds."""

    tests: list[PastTest]
    kept: dict[str, float]


def compare_round(
    reference: Samples, current: Samples, floor: Samples | None = None, *, settings: RoundSettings
) -> Round:
    """Test each key, and judge the tests together.

    With a ``floor``, a held-out sample of the reference's kind, the p-value is the larger of two: that the samples
    differ, and that they differ by more than the floor.
    """
    keys = dict.fromkeys([*reference, *current])
    kind = settings.test
    tested = sum(min(_rows_of(kind, reference, key), _rows_of(kind, current, key)) >= _FEWEST_ROWS for key in keys)
    level_of_each = settings.level / max(1, tested)
    if level_of_each < kind.smallest_level:
        raise DriftError(
            f"found a level of {level_of_each:.3g} for each of {tested:,} keys, expected at least "
            f"{kind.smallest_level:g}: the test {kind.name!r} can't tell such small p-values",
            fix="allow more false alarms, make fewer rounds, or watch fewer keys",
        )
    kept = dict(settings.kept)
    tests: list[PastTest] = []
    comparisons: dict[str, Comparison[Any]] = {}
    for key in keys:
        name = "" if settings.by is None else f"{settings.by}={key_text(key)}"
        test = kind.with_kept(kept.get(name))
        result, comparison = _compared(test, key, reference, current, level_of_each, settings)
        used = test.to_keep(result)
        if used is not None:
            kept.setdefault(name, used)
        row = PastTest.of(
            result,
            reference=settings.names[0],
            current=settings.names[1],
            columns=settings.columns,
            kernel=kind.setup.partition("(")[0],
            key=name,
            settings={**result.settings(), "level_of_round": settings.level},
            time=settings.now,
        )
        row = replace(row, bandwidth=kept.get(name) if used is None else used, once=f"round {utc_text(settings.now)}")
        if floor is not None and result.is_compared:
            row = _beyond_floor(row, kind.with_kept(kept.get(name)), key, result, reference, floor, settings)
        tests.append(row)
        if comparison is not None:
            comparisons[name] = comparison
    judged = judge(tests, settings.level, settings.min_effect)
    return Round(_with_reports(judged, comparisons, settings.reports), kept)


def _compared(
    test: DriftTest, key: Any, reference: Samples, current: Samples, level: float, settings: RoundSettings
) -> tuple[DriftResult, Comparison[Any] | None]:
    found = compare_keys_with(
        test,
        {key: reference[key]} if key in reference else {},
        {key: current[key]} if key in current else {},
        by=settings.by or "key",
        level=level,
        seed=settings.seed,
    )
    return found.results[key], found.comparisons.get(key)


def _beyond_floor(
    row: PastTest,
    test: DriftTest,
    key: Any,
    result: DriftResult,
    reference: Samples,
    floor: Samples,
    settings: RoundSettings,
) -> PastTest:
    """Return the row with the floor beside it; a key that the floor lacks has too few rows."""
    beside = _compared(test, key, reference, floor, result.level, settings)[0] if key in floor else None
    if beside is None or not beside.is_compared:
        return replace(row, verdict="too few rows", drift=False, p_value=1.0)
    p_value = max(result.p_value, test.beyond_floor(result, beside))
    return replace(row, p_value=p_value, floor_mmd2=beside.effect)


def _with_reports(
    tests: list[PastTest], comparisons: Mapping[str, Comparison[Any]], folder: str | None
) -> list[PastTest]:
    """Write a report for the first keys that drifted, and return the tests with their paths."""
    left = _MOST_REPORTS if folder is not None else 0
    found: list[PastTest] = []
    for test in tests:
        if left and folder is not None and test.drift and test.key in comparisons:
            left -= 1
            comparison, names = comparisons[test.key], (test.reference, f"{test.current} {test.key}".strip())

            def write(path: str, comparison: Comparison[Any] = comparison, names: tuple[str, str] = names) -> None:
                comparison.write_report(path, names=names)

            identity = "\0".join((test.reference, test.columns, test.kernel, test.key, test.once or ""))
            test = replace(test, report=write_report_of_point(folder, identity, write))
        found.append(test)
    return found


def _rows_of(test: DriftTest, samples: Samples, key: Any) -> int:
    return test.rows_of(samples[key]) if key in samples else 0


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
    rounds = [_judged_round([test for _, test in group], level, min_effect, len(active)) for group in ordered]
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


def _judged_round(tests: list[PastTest], level: float, min_effect: float, active: int) -> list[PastTest]:
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
