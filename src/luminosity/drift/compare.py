"""Two samples of rows and their MMD test: prepares rows, tests them, finds the rows that differ most."""

from __future__ import annotations

from collections.abc import Callable, Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from luminosity.drift.contract import Comparison
from luminosity.drift.kernels import Aggregate, Kernel, as_kernels
from luminosity.drift.mmd.exact import mmd_test
from luminosity.drift.mmd.mmd_result import MMDTestResult
from luminosity.drift.mmd.witness import Extremes, find_extremes, strongest_kernel
from luminosity.drift.report.write import sections_of_rows
from luminosity.drift.result import Details, Progress
from luminosity.drift.rows import Precision, has_same_rows
from luminosity.drift.samples import PreparedSamples, prepare_samples
from luminosity.drift.sums.bins import BINS
from luminosity.report_page.markup import Markup

__all__ = ["SampleComparison", "compare_prepared", "compare_samples"]


@dataclass(frozen=True, eq=False)
class SampleComparison(Comparison[MMDTestResult]):
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

    def settings(self) -> dict[str, Any]:
        """Return how the rows were prepared."""
        return self.samples.settings()

    def sections(
        self, details: tuple[Details, Details] | None, progress: Progress | None
    ) -> tuple[Sequence[Markup], str]:
        """Return the chart of both samples and the rows that differ most."""
        samples = self.samples
        own = None if details is None else (self._details(0, details[0]), self._details(1, details[1]))
        return sections_of_rows(self.result, samples.reference, samples.current, own, self._kernel(), progress)

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
