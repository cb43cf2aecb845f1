"""The results of tests."""

from __future__ import annotations

from dataclasses import asdict, dataclass, field
from math import isfinite
from typing import Any

__all__ = ["QUANTILES", "Histogram", "KernelResult", "MMDTestResult"]

QUANTILES = (0.01, 0.05, 0.25, 0.5, 0.75, 0.9, 0.95, 0.99)  # of the null distribution, in every result


@dataclass(frozen=True)
class KernelResult:
    """The result of one kernel alone.

    With several kernels, do not pick the smallest p-value: ``MMDTestResult.p_value`` accounts for all of them.
    """

    kernel: str
    bandwidth: float | None
    mmd2: float
    interval: tuple[float, float]
    null_sd: float
    p_value: float


@dataclass(frozen=True)
class Histogram:
    """Counts between consecutive edges."""

    edges: tuple[float, ...]
    counts: tuple[int, ...]


@dataclass(frozen=True)
class MMDTestResult:
    """The result of a test whether two samples come from the same distribution.

    ``statistic`` is what was permuted: MMD² with one kernel, the largest standardised MMD² with several. The null's
    quantiles and histogram are in its unit. ``mmd2`` and its 95% ``interval`` are those of the kernel with the smallest
    p-value. ``p_value_interval`` is a 95% interval for the p-value that all permutations together would give.
    """

    mmd2: float
    interval: tuple[float, float]
    statistic: float
    p_value: float
    p_value_interval: tuple[float, float]
    level: float
    null_sd: float
    null_quantiles: dict[float, float]
    null_histogram: Histogram = field(repr=False)  # longer than all other fields together
    kernels: tuple[KernelResult, ...]
    reference_rows: int
    current_rows: int
    reference_bins: int
    current_bins: int
    permutations: int
    seed: int
    precision: str

    @property
    def drift(self) -> bool:
        """Whether drift was detected: ``p_value <= level``."""
        return self.p_value <= self.level

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON. An interval is None if there are too few rows to compute it."""
        found = asdict(self)
        for each in (found, *found["kernels"]):
            each["interval"] = each["interval"] if isfinite(each["interval"][0]) else None
        found["null_quantiles"] = {format(at, "g"): value for at, value in self.null_quantiles.items()}
        return {"drift": self.drift, **found}

    def __str__(self) -> str:
        verdict = "drift" if self.drift else "no drift"
        low, high = self.interval
        interval = f" ({low:.4g} to {high:.4g})" if isfinite(low) else ""
        return f"{verdict}: p = {self.p_value:.4g}, MMD² = {self.mmd2:.4g}{interval}"
