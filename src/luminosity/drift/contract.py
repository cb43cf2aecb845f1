"""The contract of a drift test: what it reads, how it compares two samples, and what a command and a watch ask of it.

A new test is one file with three classes: a :class:`DriftTest`, the :class:`Comparison` that it returns and the
:class:`~luminosity.drift.result.DriftResult` in it. ``luminosity.drift.registry`` names all of them.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from typing import Any, ClassVar, Generic, Literal, TypeVar

from luminosity.drift.history import PastTest
from luminosity.drift.report.page import Contents, page
from luminosity.drift.result import Details, DriftResult, Progress
from luminosity.errors import DriftError, OptionError
from luminosity.report_page.document import write_page
from luminosity.report_page.markup import Markup

__all__ = ["Comparison", "DriftTest", "check_options"]

Result = TypeVar("Result", bound=DriftResult)
_Test = TypeVar("_Test", bound="DriftTest")


class Comparison(ABC, Generic[Result]):
    """Two samples and the result of their test."""

    result: Result

    @abstractmethod
    def settings(self) -> dict[str, Any]:
        """Return how the samples were prepared. ``rows_read`` and ``rows_skipped`` have a number for each sample."""

    def sections(
        self, details: tuple[Details, Details] | None, progress: Progress | None
    ) -> tuple[Sequence[Markup], str]:
        """Return the sections of a report beyond those of the result, and what of the data they show."""
        return (), ""

    def as_past_test(
        self,
        *,
        reference: str,
        current: str,
        columns: str = "",
        kernel: str | None = None,
        settings: Mapping[str, Any] | None = None,
    ) -> PastTest:
        """Return the result as a row for a ``DriftHistory``. The arguments are those of ``PastTest.of``."""
        settings = self.settings() if settings is None else settings
        return PastTest.of(
            self.result, reference=reference, current=current, columns=columns, kernel=kernel, settings=settings
        )

    def report_contents(
        self,
        names: tuple[str, str],
        details: tuple[Details, Details] | None = None,
        history: Sequence[PastTest] = (),
        settings: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> Contents:
        """Return what a report on this comparison shows. The arguments are those of ``write_report``."""
        sections, holds = self.sections(details, progress)
        shown = self.settings() if settings is None else settings
        return Contents(self.result, names, sections, history, shown, holds)

    def write_report(
        self,
        path: str | os.PathLike[str],
        *,
        names: tuple[str, str] = ("reference", "current"),
        details: tuple[Details, Details] | None = None,
        history: Sequence[PastTest] = (),
        settings: Mapping[str, Any] | None = None,
        progress: Progress | None = None,
    ) -> None:
        """Write an HTML report, which loads nothing from the network. An existing file is replaced.

        Args:
          path: the file to write.
          names: the names of the samples.
          details: for each sample, a function that takes row numbers and returns a dictionary for each row. The numbers
            are positions in the arrays or files you gave, also if only some of their rows were compared.
          history: past tests, the oldest first, from ``DriftHistory.last``.
          settings: further settings to list; by default how the samples were prepared.
          progress: called with the amount of work done and of all work.
        """
        write_page(path, page(self.report_contents(names, details, history, settings, progress)), DriftError)

    def _repr_html_(self) -> str:
        return self.result._repr_html_()  # pyright: ignore[reportPrivateUsage]  # IPython's name for it


class DriftTest(ABC):
    """A kind of test, with its options.

    ``reads`` says what samples are: ``"rows"`` are vectors of numbers (``SampledRows``, or a matrix), ``"columns"`` are
    summaries of a table's columns (``DescriptionState``, or a table). ``options`` are the names of further options that
    a command line or a watch may give.
    """

    name: ClassVar[str]
    reads: ClassVar[Literal["rows", "columns"]]
    effect_name: ClassVar[str]
    largest_effect: ClassVar[float]
    options: ClassVar[frozenset[str]] = frozenset()
    smallest_level: ClassVar[float] = 0.0  # of one test: lower levels would take too long
    has_floor: ClassVar[bool] = False  # whether a watch may compare the effect with that of a held-out sample

    @classmethod
    @abstractmethod
    def from_options(cls: type[_Test], options: Mapping[str, Any], level: float) -> _Test:
        """Return the test with these options, all of which are in ``options``. Raise if they do not fit together."""

    @property
    def setup(self) -> str:
        """The test as it was requested: rows of a history with the same setup can be compared."""
        return self.name

    @abstractmethod
    def compare(
        self,
        reference: Any,
        current: Any,
        *,
        level: float,
        seed: int,
        names: tuple[str, str] = ("the reference", "the current sample"),
        progress: Progress | None = None,
    ) -> Comparison[Any]:
        """Compare two samples. ``names`` are what errors call them."""

    @abstractmethod
    def untested(self, reference_rows: int, current_rows: int, *, level: float, seed: int) -> DriftResult:
        """Return the result of a key that can't be compared: a sample has no row of it, or only one."""

    @abstractmethod
    def transform(self, reference: Any, *, level: float = 0.05, seed: int = 0, **columns: Any) -> Any:
        """Return the Beam transform that makes the test: its results are those of ``compare``.

        ``columns`` are arguments of the transform that say where its input has vectors, columns and keys.
        """

    @abstractmethod
    def rows_of(self, sample: Any) -> int:
        """Return how many rows a sample has to compare."""

    def for_columns(self: _Test, columns: int) -> _Test:
        """Return the test for tables in which this many columns are compared."""
        return self

    def for_level(self: _Test, level: float) -> _Test:
        """Return the test with what it needs to find drift at this level."""
        return self

    def to_keep(self, result: DriftResult) -> float | None:
        """Return a number that a watch keeps for its later rounds, so that their effects can be compared."""
        return None

    def with_kept(self: _Test, kept: float | None) -> _Test:
        """Return the test that uses the number that was kept."""
        return self

    def beyond_floor(self, result: DriftResult, floor: DriftResult) -> float:
        """Return the p-value that the effect is not larger than that of the floor."""
        raise NotImplementedError(f"the test {self.name} has no floor")


def check_options(test: type[DriftTest], given: Mapping[str, Any], shown: Callable[[str], str]) -> None:
    """Raise an error for an option that the test does not take. ``shown`` returns an option as users write it."""
    for name in given:
        if name not in test.options:
            takes = ", ".join(sorted(shown(each) for each in test.options)) or "no further options"
            raise OptionError(
                f"found {shown(name)}, which the test {test.name!r} does not have; it takes {takes}",
                fix=f"remove {shown(name)}, or choose another test",
            )
