"""Decides which tests of a round are drift: Holm's method over keys, and the smallest effect that matters.

A round is the tests that are made together: those of one window, or of one look at the files.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from luminosity.drift.history import PastTest

__all__ = ["MONTH_S", "ErrorBudget", "holm_levels", "is_test", "judge"]

MONTH_S = 30 * 86_400.0  # the month of an error budget
_MOST_LEVEL = 0.5  # a budget that allows more false alarms than rounds is no test
_NO_TEST = ("gone", "too few rows")  # nothing was compared, or nothing could be found
SMALL = "drift too small to matter"


@dataclass(frozen=True)
class ErrorBudget:
    """How many false alarms all rounds together may give in some time, on average."""

    alarms: float
    seconds: float

    def level(self, rounds_per_month: float) -> float:
        """Return the level of each round. Holm's method keeps it for all keys of a round together.

        >>> round(ErrorBudget(1, MONTH_S).level(720), 6)
        0.001389
        """
        per_month = self.alarms * MONTH_S / self.seconds
        return min(_MOST_LEVEL, per_month / max(rounds_per_month, 1e-9))


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
