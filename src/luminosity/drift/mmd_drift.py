"""The MMD test of rows of numbers, as commands and watches know it: its options, and how it compares two samples."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import asdict, dataclass, replace
from typing import TYPE_CHECKING, Any, ClassVar, Literal

from luminosity.drift.contract import DriftOption, DriftTest
from luminosity.drift.mmd.mmd_result import MMDTestResult, untested
from luminosity.drift.result import DriftResult, Progress
from luminosity.errors import OptionError

if TYPE_CHECKING:  # These import NumPy: not for the help of the command.
    from luminosity.drift.compare import SampleComparison
    from luminosity.drift.kernels import Aggregate, Kernel

__all__ = ["MMDDrift"]

_WITH_BANDWIDTH = ("rbf", "laplacian")
_NORMAL_97_5 = 1.959964  # the 97.5% quantile of the normal distribution: half of a 95% interval in standard errors


@dataclass(frozen=True)
class MMDDrift(DriftTest):
    """The MMD test of rows of numbers. The arguments are those of ``compare_samples``.

    ``bandwidth`` is the one bandwidth of an ``RBF`` kernel that a watch has kept from its first round.
    """

    name: ClassVar[str] = "mmd"
    reads: ClassVar[Literal["rows", "columns"]] = "rows"
    effect_name: ClassVar[str] = MMDTestResult.effect_name
    largest_effect: ClassVar[float] = 2.0
    libraries: ClassVar[tuple[str, ...]] = MMDTestResult.libraries
    needs: ClassVar[tuple[str, ...]] = ("jax",)
    summary: ClassVar[str] = "compares rows of numbers as a whole, such as embeddings"
    options: ClassVar[tuple[DriftOption, ...]] = (
        DriftOption(
            "components",
            "whole number",
            "compare N principal components of both samples together; 0 compares rows as they are",
            "50 for rows of more than 50 numbers",
        ),
        DriftOption(
            "kernel",
            "text",
            "how similarity of rows is measured; aggregate tries many bandwidths: slower, but detects more kinds of "
            "drift",
            "rbf",
            choices=("rbf", "laplacian", "linear", "polynomial", "aggregate"),
        ),
        DriftOption(
            "bandwidth",
            "numbers",
            "for rbf and laplacian: the distance at which rows count as similar",
            "the median distance",
        ),
        DriftOption(
            "permutations",
            "whole number",
            "random permutations that the p-value is computed from",
            "1000",
            least=1,
        ),
    )
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
        from luminosity.drift.kernels import RBF, Aggregate, Laplacian, Linear, Polynomial

        kind, bandwidths = options.get("kernel", "rbf"), tuple(options.get("bandwidth", ()))
        if bandwidths and kind not in _WITH_BANDWIDTH:
            raise OptionError(
                f"found a bandwidth with the kernel {kind}, which has none",
                fix="remove the bandwidth, or use the kernel rbf or laplacian",
            )
        permutations = options.get("permutations", cls.permutations)
        if permutations < 1 / level - 1:
            raise OptionError(
                f"found {permutations} permutations, expected at least {math.ceil(1 / level - 1)}: with fewer no "
                f"p-value can be as low as the level {level:g}"
            )
        kernels: Mapping[str, Any] = {
            "rbf": RBF,
            "laplacian": Laplacian,
            "aggregate": Aggregate,
            "linear": Linear,
            "polynomial": Polynomial,
        }
        chosen = kernels[kind]
        kernel = [chosen(each) for each in bandwidths or (None,)] if kind in _WITH_BANDWIDTH else chosen()
        listed = ",".join(format(each, "g") for each in bandwidths)
        requested = f"{kind}({listed})" if listed else kind
        return cls(kernel, components=options.get("components"), permutations=permutations, requested=requested)

    def settings(self) -> dict[str, Any]:
        """Return the kernel as it was requested, and the number of components."""
        return {"kernel": self.requested, "components": self.components}

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
        from luminosity.drift.compare import compare_prepared
        from luminosity.drift.samples import prepare_samples

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
        from luminosity.drift.mmd.permutations import Settings

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
        return len(getattr(sample, "rows", sample))

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
        from luminosity.drift.kernels import RBF, Laplacian

        if kept is None or self.requested not in _WITH_BANDWIDTH:
            return self
        return replace(self, kernel=(RBF if self.requested == "rbf" else Laplacian)(kept))

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
