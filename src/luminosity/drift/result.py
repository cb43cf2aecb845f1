"""The results of tests."""

from __future__ import annotations

import importlib
from dataclasses import asdict, dataclass, field
from math import isfinite, nan
from typing import Any, Literal, TypeAlias

__all__ = ["QUANTILES", "Histogram", "KernelResult", "MMDTestResult", "Verdict", "untested"]

Verdict: TypeAlias = Literal["drift", "no drift", "too few rows", "gone", "new"]

SAME_ROWS = "; both samples have the same rows"
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
    ``smallest_p_value`` is the p-value that the most extreme samples of these sizes would get: few rows have few
    permutations. If it is above ``level``, no data could have given drift. ``same_rows`` says that both samples hold
    the same rows, in whatever order: most likely one file was taken for two. Tests in a pipeline do not look for that.

    In a test by key, one sample may have no row of a key. Then nothing is compared, ``p_value`` is 0, the statistic and
    everything about the null distribution are NaN or empty, and ``verdict`` is ``"gone"`` or ``"new"``.
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
    smallest_p_value: float = 0.0
    same_rows: bool = False

    @property
    def drift(self) -> bool:
        """Whether drift was detected: ``p_value <= level``. A key that only one sample has is drift."""
        return self.p_value <= self.level

    @property
    def verdict(self) -> Verdict:
        """The verdict: ``"drift"``, ``"no drift"``, ``"too few rows"``, ``"gone"`` or ``"new"``.

        ``"too few rows"`` means that no p-value of samples this small can be as low as ``level``. ``"gone"`` and
        ``"new"``, in tests by key, mean that only the reference, or only the current sample, has rows of the key.
        """
        if self.reference_rows and not self.current_rows:
            return "gone"
        if self.current_rows and not self.reference_rows:
            return "new"
        if self.drift:
            return "drift"
        return "too few rows" if self.smallest_p_value > self.level else "no drift"

    def as_dict(self) -> dict[str, Any]:
        """Return plain values for JSON. What there are too few rows to compute is None."""
        found = asdict(self)
        for each in (found, *found["kernels"]):
            each["interval"] = each["interval"] if isfinite(each["interval"][0]) else None
        for name in ("mmd2", "statistic", "null_sd"):
            found[name] = found[name] if isfinite(found[name]) else None
        found["null_quantiles"] = {format(at, "g"): value for at, value in self.null_quantiles.items()}
        return {"drift": self.drift, "verdict": self.verdict, **found}

    def _repr_html_(self) -> str:
        # Named as a text: the drawings stand above results, and only a notebook needs them.
        return importlib.import_module("luminosity.drift.report.in_notebook").result_html(self)

    def __str__(self) -> str:
        verdict, rows = self.verdict, f"{self.reference_rows:,} against {self.current_rows:,}"
        if verdict == "gone":
            return f"gone: no rows in the current sample, {_count(self.reference_rows)} in the reference"
        if verdict == "new":
            return f"new: no rows in the reference, {_count(self.current_rows)} in the current sample"
        if not isfinite(self.mmd2):
            return f"too few rows to tell: {rows}, expected at least 2 of each"
        low, high = self.interval
        interval = f" ({low:.4g} to {high:.4g})" if isfinite(low) else ""
        found = f"p = {self.p_value:.4g}, MMD² = {self.mmd2:.4g}{interval}"
        if verdict == "too few rows":
            return f"too few rows to tell: {rows} can't give p <= {self.level:.3g}, whatever the rows are; {found}"
        return f"{verdict}: {found}{SAME_ROWS if self.same_rows else ''}"


def untested(
    reference_rows: int, current_rows: int, *, permutations: int, level: float, seed: int, precision: str
) -> MMDTestResult:
    """Return the result of a key that can't be compared: a sample has no row of it, or only one.

    A key without rows in both samples, because all were left out, has not drifted.

    >>> print(untested(312, 0, permutations=1000, level=0.05, seed=0, precision="float32"))
    gone: no rows in the current sample, 312 rows in the reference
    """
    p_value = 1.0 if bool(reference_rows) == bool(current_rows) else 0.0
    return MMDTestResult(
        mmd2=nan,
        interval=(nan, nan),
        statistic=nan,
        p_value=p_value,
        p_value_interval=(p_value, p_value),
        level=level,
        null_sd=nan,
        null_quantiles={},
        null_histogram=Histogram((), ()),
        kernels=(),
        reference_rows=reference_rows,
        current_rows=current_rows,
        reference_bins=0,
        current_bins=0,
        permutations=permutations,
        seed=seed,
        precision=precision,
        smallest_p_value=p_value,
    )


def _count(rows: int) -> str:
    return "one row" if rows == 1 else f"{rows:,} rows"
