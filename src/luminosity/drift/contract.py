"""The contract of a drift test: what it reads, how it compares two samples, and what a command and a watch ask of it.

A new test is one file with three classes: a :class:`DriftTest` with its options, the :class:`Comparison` that it
returns and the :class:`~luminosity.drift.result.DriftResult` in it. ``luminosity.drift.registry`` names all of them;
``luminosity.testing.check_drift_test`` checks whether a test keeps this contract.
"""

from __future__ import annotations

import os
from abc import ABC, abstractmethod
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass
from math import inf
from typing import Any, ClassVar, Generic, Literal, TypeVar

from luminosity.drift.report.page import Contents, page
from luminosity.drift.result import Details, DriftResult, PastTest, Progress
from luminosity.errors import DriftError, OptionError
from luminosity.report_page.document import write_page
from luminosity.report_page.markup import Markup

__all__ = ["Comparison", "DriftOption", "DriftTest", "check_options"]

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


@dataclass(frozen=True)
class DriftOption:
    """An option of a test: ``--name`` of ``lum drift``, and ``name`` in the configuration of a watch.

    Numbers are above ``least``, whole numbers at least that. ``default`` says what applies without the option.

    >>> DriftOption("bandwidth", "numbers", "the distance at which rows count as similar").parsed("0.5,1")
    (0.5, 1.0)
    """

    name: str
    kind: Literal["text", "number", "numbers", "whole number"]
    meaning: str
    default: str = ""
    least: float = 0
    choices: tuple[str, ...] = ()

    @property
    def expected(self) -> str:
        """What a value must be, in words."""
        if self.kind == "text":
            return f"one of {', '.join(self.choices)}" if self.choices else "a text"
        if self.kind == "whole number":
            return f"a whole number from {self.least:g}"
        return f"a number above {self.least:g}" + (", or several" if self.kind == "numbers" else "")

    def parsed(self, text: str) -> Any:
        """Return the value of a text on a command line; several numbers have commas. Raises ``ValueError``."""
        if self.kind == "text":
            return self.checked(text)
        if self.kind == "whole number":
            return self.checked(int(text) if text.isdecimal() else None)
        try:
            return self.checked([float(each) for each in text.split(",")])
        except ValueError:
            raise ValueError(f"expected {self.expected}") from None

    def checked(self, value: Any) -> Any:
        """Return a value of a configuration. Raises ``ValueError`` if it is of another type, or out of range."""
        values: tuple[Any, ...] = tuple(value) if isinstance(value, (list, tuple)) else (value,)
        if self.kind == "text":
            is_right = isinstance(value, str) and (value in self.choices or not self.choices)
        elif self.kind == "whole number":
            is_right = type(value) is int and value >= self.least
        else:
            is_right = bool(values) and (self.kind == "numbers" or len(values) == 1)
            is_right = is_right and all(type(each) in (int, float) and self.least < each < inf for each in values)
        if not is_right:
            raise ValueError(f"expected {self.expected}")
        return tuple(map(float, values)) if self.kind == "numbers" else values[0]


class DriftTest(ABC):
    """A kind of test, with its options.

    ``reads`` says what samples are: ``"rows"`` are vectors of numbers (``SampledRows``, or a matrix), ``"columns"`` are
    summaries of a table's columns (``DescriptionState``, or a table). ``summary`` goes on after the test's name in the
    help of ``lum drift``. ``libraries`` are those whose versions results name, ``needs`` are extras to be installed.
    """

    name: ClassVar[str]
    reads: ClassVar[Literal["rows", "columns"]]
    effect_name: ClassVar[str]
    largest_effect: ClassVar[float]
    summary: ClassVar[str] = ""
    options: ClassVar[tuple[DriftOption, ...]] = ()
    libraries: ClassVar[tuple[str, ...]] = ()
    needs: ClassVar[tuple[str, ...]] = ()
    smallest_level: ClassVar[float] = 0.0  # of one test: lower levels would take too long
    has_floor: ClassVar[bool] = False  # whether a watch may compare the effect with that of a held-out sample

    @classmethod
    @abstractmethod
    def from_options(cls: type[_Test], options: Mapping[str, Any], level: float) -> _Test:
        """Return the test with these options, all of which are in ``options``. Raise if they do not fit together."""

    def settings(self) -> dict[str, Any]:
        """Return the options that results name: how the test was set up, whatever the samples are."""
        return {}

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
    names = {each.name for each in test.options}
    for name in given:
        if name not in names:
            takes = ", ".join(sorted(map(shown, names))) or "no further options"
            raise OptionError(
                f"found {shown(name)}, which the test {test.name!r} does not have; it takes {takes}",
                fix=f"remove {shown(name)}, or choose another test",
            )
