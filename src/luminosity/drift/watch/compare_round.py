"""One round of tests: each key of the current sample against the reference, and the floor beside it."""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass, replace
from datetime import datetime
from typing import Any

from luminosity.drift.by_key import KeyedComparison, compare_keys
from luminosity.drift.compare import SampleComparison
from luminosity.drift.history import PastTest, utc_text
from luminosity.drift.kernels import RBF
from luminosity.drift.result import MMDTestResult
from luminosity.drift.samples import SampledRows
from luminosity.drift.watch.judge import judge, p_value_beyond_floor
from luminosity.drift.watch.reports import write_report_of_point
from luminosity.errors import DriftError

__all__ = ["Round", "Samples", "compare_round"]

Samples = Mapping[Any, SampledRows]

_PERMUTATIONS = 1000  # of a test whose level needs no more
_MOST_PERMUTATIONS = 1_000_000  # seconds for each test
_FEWEST_ROWS = 2  # of a key in each sample, to be tested
_MOST_REPORTS = 10  # keys with a report in one round


@dataclass(frozen=True)
class Round:
    """The tests of a round, judged, and the bandwidth of each key, which stays the same in later rounds."""

    tests: list[PastTest]
    bandwidths: dict[str, float]


def compare_round(
    reference: Samples,
    current: Samples,
    floor: Samples | None = None,
    *,
    names: tuple[str, str],
    columns: str,
    by: str | None,
    level: float,
    min_mmd2: float,
    bandwidth: float | None,
    bandwidths: Mapping[str, float],
    components: int | None,
    scale: bool,
    seed: int,
    now: datetime,
    reports: str | None,
) -> Round:
    """Test each key, and judge the tests together.

    ``bandwidth`` is for all keys. Without it, a key has the bandwidth that ``bandwidths`` remembers, or in its first
    round the median distance. ``level`` is the false-alarm rate of the round. With a ``floor``, a held-out sample of
    the reference's kind, the p-value is the larger of two: that the samples differ, and that they differ by more than
    the floor.
    """
    keys = dict.fromkeys([*reference, *current])
    tested = sum(min(_rows_of(reference, key), _rows_of(current, key)) >= _FEWEST_ROWS for key in keys)
    level_of_each = level / max(1, tested)
    permutations = max(_PERMUTATIONS, math.ceil(1 / level_of_each))
    if permutations > _MOST_PERMUTATIONS:
        raise DriftError(
            f"found a level of {level_of_each:.3g} for each of {tested:,} keys, expected at least "
            f"{1 / _MOST_PERMUTATIONS:g}: no test has so many permutations",
            fix="allow more false alarms, make fewer rounds, or watch fewer keys",
        )
    used = dict(bandwidths)
    tests: list[PastTest] = []
    comparisons: dict[str, SampleComparison] = {}
    for key in keys:
        chosen = bandwidth or bandwidths.get(_name(by, key))

        def compared(sample: Samples, key: Any = key, chosen: float | None = chosen) -> KeyedComparison:
            return compare_keys(
                {key: reference[key]} if key in reference else {},
                {key: sample[key]} if key in sample else {},
                RBF(chosen),
                by=by or "key",
                scale=scale,
                components=components,
                permutations=permutations,
                level=level_of_each,
                seed=seed,
            )

        found = compared(current)
        result = found.results[key]
        name = _name(by, key)
        if result.kernels and result.kernels[0].bandwidth is not None:
            chosen = used.setdefault(name, result.kernels[0].bandwidth)
        test = PastTest.of(
            result,
            reference=names[0],
            current=names[1],
            columns=columns,
            kernel="rbf",
            key=name,
            settings={"permutations": permutations, "seed": seed, "level_of_round": level},
            time=now,
        )
        test = replace(test, bandwidth=chosen, once=f"round {utc_text(now)}")
        if floor is not None and result.kernels:
            test = _beyond_floor(test, result, compared(floor, key, chosen).results[key] if key in floor else None)
        tests.append(test)
        if key in found.comparisons:
            comparisons[name] = found.comparisons[key]
    judged = judge(tests, level, min_mmd2)
    return Round(_with_reports(judged, comparisons, reports), used)


def _beyond_floor(test: PastTest, result: MMDTestResult, floor: MMDTestResult | None) -> PastTest:
    if floor is None or not floor.kernels:
        return replace(test, verdict="too few rows", drift=False, p_value=1.0)
    p_value = max(result.p_value, p_value_beyond_floor(result, floor))
    return replace(test, p_value=p_value, floor_mmd2=floor.mmd2)


def _with_reports(
    tests: list[PastTest], comparisons: Mapping[str, SampleComparison], folder: str | None
) -> list[PastTest]:
    """Write a report for the first keys that drifted, and return the tests with their paths."""
    left = _MOST_REPORTS if folder is not None else 0
    found: list[PastTest] = []
    for test in tests:
        if left and folder is not None and test.drift and test.key in comparisons:
            left -= 1
            comparison, names = comparisons[test.key], (test.reference, f"{test.current} {test.key}".strip())

            def write(path: str, comparison: SampleComparison = comparison, names: tuple[str, str] = names) -> None:
                comparison.write_report(path, names=names)

            identity = "\0".join((test.reference, test.columns, test.kernel, test.key, test.once or ""))
            test = replace(test, report=write_report_of_point(folder, identity, write))
        found.append(test)
    return found


def _name(by: str | None, key: Any) -> str:
    return "" if by is None else f"{by}={'(none)' if key is None else key}"


def _rows_of(samples: Samples, key: Any) -> int:
    return len(samples[key].rows) if key in samples else 0
