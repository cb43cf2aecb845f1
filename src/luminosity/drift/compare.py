"""Compares two samples from beginning to end: prepares rows, tests them, finds rows that differ, writes a report."""

from __future__ import annotations

import os
from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from luminosity.drift.aggregate import Aggregate, as_kernels
from luminosity.drift.history import PastTest
from luminosity.drift.kernels import Kernel
from luminosity.drift.mmd import mmd_test
from luminosity.drift.report.in_notebook import result_html
from luminosity.drift.report.page import Contents, page
from luminosity.drift.report.witness_rows import Details
from luminosity.drift.report.write import report_contents
from luminosity.drift.result import MMDTestResult
from luminosity.drift.rows import Precision, has_same_rows
from luminosity.drift.samples import PreparedSamples, prepare_samples
from luminosity.drift.sums.bin_sums import Progress
from luminosity.drift.sums.bins import BINS
from luminosity.drift.witness_function import Extremes, find_extremes, strongest_kernel
from luminosity.errors import DriftError
from luminosity.report_page.document import write_page

__all__ = ["SampleComparison", "compare_prepared", "compare_samples"]


@dataclass(frozen=True, eq=False)
class SampleComparison:
    """Two prepared samples and the result of their test.

    ``kernel`` is the kernel that ``mmd_test`` was given. Only a kernel of your own is needed again here: the result
    has its name, not its function.
    """

    samples: PreparedSamples
    result: MMDTestResult
    kernel: Kernel | Aggregate | Sequence[Kernel | Aggregate] | None = None

    def extremes(self, progress: Progress | None = None) -> Extremes:
        """Find the rows that differ most. Their numbers are positions in the arrays or files you gave."""
        found = self._extremes(progress)
        gone, new = (
            [(int(each.numbers[number]), score) for number, score in rows]
            for each, rows in zip(self.samples.given, (found.gone, found.new), strict=True)
        )
        return replace(found, gone=gone, new=new)

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
        return PastTest.of(
            self.result,
            reference=reference,
            current=current,
            columns=columns,
            kernel=kernel,
            settings=self.samples.settings() if settings is None else settings,
        )

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
        """Write an HTML report. The arguments are those of ``luminosity.drift.write_report``.

        ``details`` are functions of row numbers. The numbers are positions in the arrays or files you gave, also if
        only some of their rows were compared.
        """
        contents = self.report_contents(names, details, history, settings, progress)
        write_page(path, page(contents), DriftError)

    def report_contents(
        self,
        names: tuple[str, str],
        details: tuple[Details, Details] | None,
        history: Sequence[PastTest],
        settings: Mapping[str, Any] | None,
        progress: Progress | None,
    ) -> Contents:
        """Return what a report on this comparison shows. The arguments are those of ``write_report``."""
        return report_contents(
            self.result,
            self.samples.reference,
            self.samples.current,
            names=names,
            details=None if details is None else (self._details(0, details[0]), self._details(1, details[1])),
            kernel=self._kernel(),
            history=history,
            settings=self.samples.settings() if settings is None else settings,
            progress=progress,
        )

    def _repr_html_(self) -> str:
        return result_html(self.result)

    def _extremes(self, progress: Progress | None) -> Extremes:
        samples, seed = self.samples, self.result.seed
        return find_extremes(samples.reference, samples.current, self._kernel(), seed, progress)

    def _kernel(self) -> Kernel:
        return strongest_kernel(self.result, [each for each in as_kernels(self.kernel) if isinstance(each, Kernel)])

    def _details(self, side: int, details: Details) -> Callable[[Sequence[int]], Sequence[Mapping[str, Any]]]:
        numbers = self.samples.given[side].numbers
        return lambda rows: details([int(numbers[row]) for row in rows])


def compare_samples(
    reference: Any,
    current: Any,
    kernel: Kernel | Aggregate | Sequence[Kernel | Aggregate] | None = None,
    *,
    rows: int | None = None,
    skip_missing: bool = False,
    scale: bool = False,
    components: int | None = None,
    permutations: int = 1000,
    level: float = 0.05,
    seed: int = 0,
    bins: int = BINS,
    precision: Precision = "float32",
    progress: Progress | None = None,
) -> SampleComparison:
    """Prepare two samples and test them, with the defaults and the results of ``lum drift``.

    ``rows``, ``skip_missing``, ``scale`` and ``components`` are explained at ``prepare_samples``, the other arguments
    at ``mmd_test``.

    >>> import numpy as np
    >>> random = np.random.default_rng(0)
    >>> january, february = random.normal(size=(500, 384)), random.normal(0.1, 1, size=(500, 384))
    >>> comparison = compare_samples(january, february)
    >>> comparison.result.drift, len(comparison.samples.pca.components)
    (True, 50)
    >>> newest, score = comparison.extremes().new[0]
    >>> february[newest].shape
    (384,)
    """
    samples = prepare_samples(
        reference,
        current,
        rows=rows,
        skip_missing=skip_missing,
        scale=scale,
        components=components,
        seed=seed,
    )
    return compare_prepared(
        samples,
        kernel,
        permutations=permutations,
        level=level,
        seed=seed,
        bins=bins,
        precision=precision,
        progress=progress,
    )


def compare_prepared(
    samples: PreparedSamples, kernel: Kernel | Aggregate | Sequence[Kernel | Aggregate] | None = None, **test: Any
) -> SampleComparison:
    """Test samples that were prepared before. ``test`` are further arguments of ``mmd_test``."""
    result = mmd_test(samples.reference, samples.current, kernel, **test)
    # Rows before the projection: projections of equal rows may differ in their last digits.
    same_rows = has_same_rows(samples.given[0].rows, samples.given[1].rows)
    return SampleComparison(samples, replace(result, same_rows=same_rows), kernel)
