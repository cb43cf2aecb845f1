"""The test of each column of a table: Kolmogorov-Smirnov for numbers, chi-squared for categories, Holm for all of them.

It needs one pass over the rows and bounded memory, because it compares summaries of columns (``DescriptionState``):

- Up to 32,768 distinct numbers of a column are kept exactly. With more, numbers lose their last bits, the same in both
  samples: the test keeps its level, and misses only differences below this rounding (a relative one, below 1%).
- Up to 16,384 distinct texts are counted exactly. Texts that are rare in both samples count as one, and so do texts of
  more than 200 characters. With more distinct texts, or if all are rare, the lengths of texts are compared.
- Times are compared like numbers, vectors by their norms, lists by their lengths.
- Missing values (null, NaN) and infinite ones are compared by how many there are.
"""

from __future__ import annotations

import math
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar

from luminosity._shared.text import list_some
from luminosity.drift.result import DriftResult
from luminosity.report_page.document import section, table
from luminosity.report_page.markup import MISSING, Markup, plain

if TYPE_CHECKING:  # This imports Beam, which takes a second: not for the help of the command.
    from luminosity.evaluation.description.describe_table import DescriptionState

__all__ = ["ColumnResult", "ColumnTestResult", "compare_columns", "untested_columns"]

_SHOWN = 3  # columns in the line of a verdict


@dataclass(frozen=True)
class ColumnResult:
    """The test of one column.

    ``distance`` lies between 0 (equal) and 1 (nothing in common): the statistic of Kolmogorov and Smirnov, or the total
    variation of categories. ``p_value`` is that of this column alone, ``adjusted`` accounts for all columns (Holm's
    method): compare it with the level. A column that only one sample has, or that has another type, has a p-value of 0;
    one that can't be compared has an empty ``method`` and a p-value of 1.
    """

    name: str
    kind: str
    method: str
    statistic: float
    distance: float
    p_value: float
    adjusted: float
    said: str


@dataclass(frozen=True)
class ColumnTestResult(DriftResult):
    """The result of the test of all columns.

    ``p_value`` is the smallest adjusted one of ``columns``, which are ordered by it: it is as low as ``level`` in that
    share of tests if no column has drifted, however many columns there are.
    """

    test: ClassVar[str] = "columns"
    effect_name: ClassVar[str] = "distance"
    libraries: ClassVar[tuple[str, ...]] = ("pyarrow",)

    columns: tuple[ColumnResult, ...]
    p_value: float
    level: float
    reference_rows: int
    current_rows: int
    smallest_p_value: float = 0.0

    @property
    def drifted(self) -> list[str]:
        """The names of the columns that drifted, the smallest p-value first."""
        return [each.name for each in self.columns if each.adjusted <= self.level]

    @property
    def effect(self) -> float:
        """The largest distance of the columns that drifted; if none did, that of the smallest p-value."""
        chosen = [each for each in self.columns if each.adjusted <= self.level] or self.columns[:1]
        return max((each.distance for each in chosen), default=math.nan)

    @property
    def statistic(self) -> float:  # pyright: ignore[reportIncompatibleVariableOverride]  # computed, not stored
        """The same as ``effect``: columns have different statistics."""
        return self.effect

    @property
    def is_compared(self) -> bool:
        """Whether columns were compared."""
        return bool(self.columns)

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON."""
        found = asdict(self)
        for each in found["columns"]:
            each["statistic"] = each["statistic"] if math.isfinite(each["statistic"]) else None
        effect = self.effect if math.isfinite(self.effect) else None
        own = {"drift": self.drift, "verdict": self.verdict, "test": self.test, "drifted": self.drifted}
        return {**own, "effect": effect, **found}

    def figures(self) -> str:
        """Return the p-value, and the columns that drifted with their distances."""
        shown = {each.name: f"{each.name} ({each.distance:.3g})" for each in self.columns}
        drifted = [shown[name] for name in self.drifted]
        tested = sum(bool(each.method) for each in self.columns)
        if drifted:
            listed = list_some(drifted, _SHOWN)
            return f"p = {self.p_value:.4g}, {len(drifted)} of {len(self.columns)} columns drifted: {listed}"
        nearest = f", the nearest to it is {next(iter(shown.values()))}" if shown else ""
        return f"p = {self.p_value:.4g}, none of {tested} columns drifted{nearest}"

    def sections(self) -> list[Markup]:
        """Return the table of columns."""
        heads = ("column", "kind", "test", "distance", "p-value", "adjusted", "change")
        rows = [
            (
                each.name + (" ◆" if each.adjusted <= self.level else ""),
                each.kind,
                each.method or MISSING,
                plain(each.distance),
                plain(each.p_value),
                plain(each.adjusted),
                each.said,
            )
            for each in self.columns
        ]
        said = (
            "Each column has its own test. The distance lies between 0 (equal) and 1 (nothing in common). The adjusted "
            f"p-value accounts for all columns (Holm's method): those at or below {plain(self.level)} drifted, and "
            "have a diamond. With many rows, small distances are significant."
        )
        return [section("Each column", said, table(heads, rows, ("distance", "p-value", "adjusted")))]


def untested_columns(reference_rows: int, current_rows: int, level: float) -> ColumnTestResult:
    """Return the result of a key that can't be compared: a sample has no row of it, or only one."""
    p_value = 1.0 if bool(reference_rows) == bool(current_rows) else 0.0
    return ColumnTestResult((), p_value, level, reference_rows, current_rows, p_value)


def compare_columns(reference: DescriptionState, current: DescriptionState, level: float) -> ColumnTestResult:
    """Compare each column of two summarised tables."""
    rows = reference.rows, current.rows
    names = [*reference.summaries, *(name for name in current.summaries if name not in reference.summaries)]
    found = [_column(name, reference, current, rows) for name in names]
    tested = sorted((each for each in found if each.method), key=lambda each: each.p_value)
    adjusted: dict[str, float] = {}
    so_far = 0.0
    for rank, each in enumerate(tested):
        so_far = max(so_far, min(1.0, (len(tested) - rank) * each.p_value))
        adjusted[each.name] = so_far
    columns = sorted(
        (replace(each, adjusted=adjusted.get(each.name, each.p_value)) for each in found),
        key=lambda each: (each.adjusted, each.p_value, -each.distance, each.name),
    )
    p_value = min((each.adjusted for each in columns), default=1.0)
    return ColumnTestResult(tuple(columns), p_value, level, *rows, _smallest(rows, len(tested)))


def _column(name: str, reference: DescriptionState, current: DescriptionState, rows: tuple[int, int]) -> ColumnResult:
    """Compare a column. Several aspects of it share its p-value by Bonferroni's method."""
    from luminosity.evaluation.description.changes import column_parts

    sides = reference.summaries.get(name), current.summaries.get(name)
    parts = column_parts(*sides, rows)
    kind = next((side.kind for side in reversed(sides) if side is not None and side.kind is not None), "nulls")
    tested = [part for part in parts if part.p_value is not None]
    if not tested:
        part = parts[0]
        return ColumnResult(name, kind, "", math.nan, part.distance, 1.0 - part.distance, 1.0, part.said)
    part = min(tested, key=lambda each: (each.p_value, -each.distance))
    p_value = min(1.0, len(tested) * (part.p_value or 0.0))
    return ColumnResult(name, kind, part.method, part.statistic, part.distance, p_value, 1.0, part.said)


def _smallest(rows: tuple[int, int], tests: int) -> float:
    """Return the p-value of samples that have nothing in common: two orders of the rows are as far apart."""
    orders = math.lgamma(sum(rows) + 1) - math.lgamma(rows[0] + 1) - math.lgamma(rows[1] + 1)
    return min(1.0, tests * 2 * math.exp(-orders))
