"""The test of each column of a table, as commands and watches know it, and for tables in memory."""

from __future__ import annotations

from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from luminosity.drift.column_result import ColumnTestResult, compare_columns, untested_columns
from luminosity.drift.contract import Comparison, DriftTest
from luminosity.drift.result import Details, Progress
from luminosity.errors import DriftError
from luminosity.report_page.markup import Markup

if TYPE_CHECKING:  # This imports Beam, which takes a second: not for the help of the command.
    from luminosity.evaluation.description.describe_table import DescriptionState

__all__ = ["ColumnComparison", "ColumnDrift", "column_test"]

_DRAWN = 10  # columns that drifted whose charts a report shows
_FEWEST_ROWS = 2


@dataclass(frozen=True, eq=False)
class ColumnComparison(Comparison[ColumnTestResult]):
    """Two summarised tables and the result of their test."""

    reference: DescriptionState
    current: DescriptionState
    result: ColumnTestResult

    def settings(self) -> dict[str, Any]:
        """Return how many rows were read. None are skipped: missing values are compared, too."""
        return {"rows_read": [self.reference.rows, self.current.rows], "rows_skipped": [0, 0]}

    def sections(
        self, details: tuple[Details, Details] | None, progress: Progress | None
    ) -> tuple[Sequence[Markup], str]:
        """Draw the columns that drifted beside those of the reference."""
        from luminosity.evaluation.description.describe_table import describe_states
        from luminosity.evaluation.description.result import column_section

        described = describe_states(self.current, self.reference)
        names = [name for name in self.result.drifted if name in described.columns][:_DRAWN]
        drawn = [column_section(described, described.columns[name]) for name in names]
        return drawn, "values of the data, such as the most frequent" if drawn else ""


@dataclass(frozen=True)
class ColumnDrift(DriftTest):
    """The test of each column of a table; ``columns`` are those to compare, by default all."""

    name: ClassVar[str] = "columns"
    reads: ClassVar[Literal["rows", "columns"]] = "columns"
    effect_name: ClassVar[str] = ColumnTestResult.effect_name
    largest_effect: ClassVar[float] = 1.0
    libraries: ClassVar[tuple[str, ...]] = ColumnTestResult.libraries
    summary: ClassVar[str] = (
        "compares each column of a table on its own: Kolmogorov-Smirnov for numbers, chi-squared for categories"
    )

    columns: tuple[str, ...] | None = None

    @classmethod
    def from_options(cls, options: Mapping[str, Any], level: float) -> ColumnDrift:
        """Return the test, which has no options."""
        return cls()

    def compare(
        self,
        reference: Any,
        current: Any,
        *,
        level: float,
        seed: int,
        names: tuple[str, str] = ("the reference", "the current sample"),
        progress: Progress | None = None,
    ) -> ColumnComparison:
        """Compare two tables, or their ``DescriptionState``. There is nothing random: ``seed`` has no effect."""
        sides = [self._state(each) for each in (reference, current)]
        for side, name in zip(sides, names, strict=True):
            if side.rows < _FEWEST_ROWS:
                raise DriftError(f"{name} has {side.rows} rows, expected at least {_FEWEST_ROWS}")
        return ColumnComparison(sides[0], sides[1], compare_columns(sides[0], sides[1], level))

    def untested(self, reference_rows: int, current_rows: int, *, level: float, seed: int) -> ColumnTestResult:
        """Return the result of a key that can't be compared."""
        return untested_columns(reference_rows, current_rows, level)

    def transform(self, reference: Any, *, level: float = 0.05, seed: int = 0, **columns: Any) -> Any:
        """Return ``ColumnTest``."""
        from luminosity.drift.transforms.column_transforms import ColumnTest

        columns.setdefault("column", self.columns)
        return ColumnTest(reference, level=level, **columns)

    def rows_of(self, sample: Any) -> int:
        """Return the number of rows of a table or its summary."""
        return self._state(sample).rows

    def _state(self, sample: Any) -> DescriptionState:
        import numpy as np

        from luminosity.evaluation.description.describe_table import DescriptionState, state_of

        if not isinstance(sample, DescriptionState):
            if isinstance(sample, np.ndarray):
                sample = {str(at): column for at, column in enumerate(np.atleast_2d(sample.T))}
            sample = state_of(sample, self.columns)
        sample.flush()
        return sample


def column_test(reference: Any, current: Any, columns: Sequence[str] | None = None, *, level: float = 0.05) -> Any:
    """Test for each column of a table whether it has drifted.

    Tables are ``pyarrow.Table``, record batches, iterables of record batches or rows, dictionaries of columns, or
    matrices. The result is a ``ColumnTestResult``.

    >>> import numpy as np
    >>> random = np.random.default_rng(0)
    >>> january = {"age": random.normal(40, 9, 500), "plan": random.choice(["free", "paid"], 500)}
    >>> february = {"age": random.normal(40, 9, 500), "plan": random.choice(["free", "paid"], 500, p=[0.3, 0.7])}
    >>> found = column_test(january, february)
    >>> found.drift, found.drifted
    (True, ['plan'])
    """
    test = ColumnDrift(None if columns is None else tuple(columns))
    return test.compare(reference, current, level=level, seed=0).result
