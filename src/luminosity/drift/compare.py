"""The MMD test from beginning to end: prepares rows, tests them, finds the rows that differ most."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import Any, ClassVar, Literal

from luminosity.drift.contract import Comparison, DriftTest
from luminosity.drift.kernels import RBF, Aggregate, Kernel, Laplacian, Linear, Polynomial, as_kernels
from luminosity.drift.mmd.exact import mmd_test
from luminosity.drift.mmd.mmd_result import MMDTestResult, untested
from luminosity.drift.mmd.permutations import Settings
from luminosity.drift.mmd.witness import Extremes, find_extremes, strongest_kernel
from luminosity.drift.report.write import sections_of_rows
from luminosity.drift.result import Details, DriftResult, Progress
from luminosity.drift.rows import Precision, has_same_rows
from luminosity.drift.samples import PreparedSamples, SampledRows, prepare_samples
from luminosity.drift.sums.bins import BINS
from luminosity.errors import OptionError
from luminosity.report_page.markup import Markup

__all__ = ["MMDDrift", "SampleComparison", "compare_prepared", "compare_samples"]

_WITH_BANDWIDTH: Mapping[str, Callable[[float | None], Kernel]] = {"rbf": RBF, "laplacian": Laplacian}
_NORMAL_97_5 = 1.959964  # the 97.5% quantile of the normal distribution: half of a 95% interval in standard errors


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


@dataclass(frozen=True)
class MMDDrift(DriftTest):
    """The MMD test of rows of numbers. The arguments are those of ``compare_samples``.

    ``bandwidth`` is the one bandwidth of an ``RBF`` kernel that a watch has kept from its first round.
    """

    name: ClassVar[str] = "mmd"
    reads: ClassVar[Literal["rows", "columns"]] = "rows"
    effect_name: ClassVar[str] = MMDTestResult.effect_name
    largest_effect: ClassVar[float] = 2.0
    options: ClassVar[frozenset[str]] = frozenset({"components", "kernel", "bandwidth", "permutations"})
    smallest_level: ClassVar[float] = 1e-6  # a million permutations take seconds
    has_floor: ClassVar[bool] = True

    kernel: Kernel | Aggregate | Sequence[Kernel | Aggregate] | None = None
    rows: int | None = None
    scale: bool = False
    components: int | None = None
    permutations: int = 1000
    requested: str = "rbf"

    @classmethod
    def from_options(cls, options: Mapping[str, Any], level: float) -> MMDDrift:
        """Return the test with the ``components``, ``kernel``, ``bandwidth`` and ``permutations`` that are given."""
        kind, bandwidths = options.get("kernel", "rbf"), tuple(options.get("bandwidth", ()))
        if bandwidths and kind not in _WITH_BANDWIDTH:
            raise OptionError(
                f"found --bandwidth with --kernel {kind}, which has no bandwidth",
                fix="remove --bandwidth, or use --kernel rbf or laplacian",
            )
        permutations = options.get("permutations", cls.permutations)
        if permutations < 1 / level - 1:
            raise OptionError(
                f"--permutations={permutations}: expected at least {math.ceil(1 / level - 1)}, "
                f"since with fewer no p-value can be as low as --level={level:g}"
            )
        if kind in _WITH_BANDWIDTH:
            kernel: Any = [_WITH_BANDWIDTH[kind](each) for each in bandwidths or (None,)]
        else:
            kernel = {"aggregate": Aggregate, "linear": Linear, "polynomial": Polynomial}[kind]()
        listed = ",".join(format(each, "g") for each in bandwidths)
        requested = f"{kind}({listed})" if listed else kind
        return cls(kernel, components=options.get("components"), permutations=permutations, requested=requested)

    @property
    def setup(self) -> str:
        """The kernel as it was requested: a bandwidth chosen from the data differs between tests."""
        return self.requested

    def compare(
        self,
        reference: Any,
        current: Any,
        *,
        level: float,
        seed: int,
        names: tuple[str, str] = ("the reference", "the current sample"),
        progress: Progress | None = None,
    ) -> SampleComparison:
        """Prepare the rows of both samples and test them."""
        samples = prepare_samples(
            reference,
            current,
            rows=self.rows,
            scale=self.scale,
            components=self.components,
            seed=seed,
            names=names,
        )
        return compare_prepared(
            samples, self.kernel, permutations=self.permutations, level=level, seed=seed, progress=progress
        )

    def untested(self, reference_rows: int, current_rows: int, *, level: float, seed: int) -> MMDTestResult:
        """Return the result of a key that can't be compared."""
        settings = Settings(self.for_level(level).permutations, level, seed)
        return untested(reference_rows, current_rows, **asdict(settings))

    def transform(self, reference: Any, *, level: float = 0.05, seed: int = 0, **columns: Any) -> Any:
        """Return ``MMDTest``."""
        from luminosity.drift.transforms.mmd_transforms import MMDTest

        return MMDTest(
            reference,
            self.kernel,
            pca=self.components or None,
            permutations=self.permutations,
            level=level,
            seed=seed,
            **columns,
        )

    def rows_of(self, sample: Any) -> int:
        """Return the number of rows of a matrix or of ``SampledRows``."""
        return len(sample.rows if isinstance(sample, SampledRows) else sample)

    def for_columns(self, columns: int) -> MMDDrift:
        """Put several columns on one scale: they have different units."""
        return replace(self, scale=columns > 1)

    def for_level(self, level: float) -> MMDDrift:
        """Add the permutations without which no p-value is as low as the level."""
        return replace(self, permutations=max(self.permutations, math.ceil(1 / level)))

    def to_keep(self, result: DriftResult) -> float | None:
        """Return the bandwidth of the only kernel."""
        kernels = result.kernels if isinstance(result, MMDTestResult) else ()
        return kernels[0].bandwidth if len(kernels) == 1 else None

    def with_kept(self, kept: float | None) -> MMDDrift:
        """Return the test with this bandwidth, unless another one was requested."""
        has_own = self.requested not in _WITH_BANDWIDTH
        return self if kept is None or has_own else replace(self, kernel=_WITH_BANDWIDTH[self.requested](kept))

    def beyond_floor(self, result: DriftResult, floor: DriftResult) -> float:
        """Return how often chance alone puts the MMD² of ``result`` this far above that of ``floor``.

        The floor is the reference against a held-out sample of the same kind. Both MMD² have standard errors, which
        their intervals tell. They share the reference, so their difference varies less than assumed here: the p-value
        is not too small. Too few rows for an interval give 1.
        """
        assert isinstance(result, MMDTestResult)
        assert isinstance(floor, MMDTestResult)
        errors = [(each.interval[1] - each.interval[0]) / (2 * _NORMAL_97_5) for each in (result, floor)]
        if not all(math.isfinite(each) for each in errors):
            return 1.0
        spread = math.hypot(*errors)
        difference = result.mmd2 - floor.mmd2
        if spread == 0:
            return 0.0 if difference > 0 else 1.0
        return 0.5 * math.erfc(difference / spread / math.sqrt(2))
