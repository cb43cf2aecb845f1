"""One round of tests: each key of the current sample against the reference, and the floor beside it."""

from __future__ import annotations

from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from datetime import datetime
from typing import Any

from luminosity.drift.by_key import compare_keys_with, key_text
from luminosity.drift.contract import Comparison, DriftTest
from luminosity.drift.history import PastTest, utc_text
from luminosity.drift.result import DriftResult
from luminosity.drift.watch.judge import judge
from luminosity.drift.watch.reports import write_report_of_point
from luminosity.errors import DriftError

__all__ = ["Round", "RoundSettings", "Samples", "compare_round"]

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
