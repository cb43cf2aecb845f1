"""The rows that differ most, by the witness function."""

from __future__ import annotations

from dataclasses import dataclass
from typing import Any

import numpy as np

from luminosity.drift.block_sums import Progress
from luminosity.drift.kernels import RBF, Kernel, Laplacian, Linear, Polynomial
from luminosity.drift.result import MMDTestResult
from luminosity.drift.witness_function import witness
from luminosity.errors import DriftError

__all__ = ["Extremes", "find_extremes", "strongest_kernel"]

SCORED = 20_000  # rows of each sample that get a score
AGAINST = 5_000  # rows of each sample that they are compared with
CANDIDATES = 30  # of each sample; equal ones are shown once


@dataclass(frozen=True)
class Extremes:
    """Numbers of rows and their scores: most typical of the current sample (new) and of the reference (gone)."""

    gone: list[tuple[int, float]]
    new: list[tuple[int, float]]
    scored: tuple[int, int]
    against: tuple[int, int]
    kernel: str


def find_extremes(
    reference: Any, current: Any, kernel: Kernel, seed: int = 0, progress: Progress | None = None
) -> Extremes:
    random = np.random.default_rng((seed, 7))
    chosen = [_chosen(len(rows), random) for rows in (reference, current)]
    samples = reference[chosen[0]], current[chosen[1]]
    of_reference, of_current = witness(*samples, kernel, against=AGAINST, seed=seed, progress=progress)
    lowest, highest = np.argsort(of_reference)[:CANDIDATES], np.argsort(-of_current)[:CANDIDATES]
    return Extremes(
        gone=[(int(chosen[0][at]), float(of_reference[at])) for at in lowest],
        new=[(int(chosen[1][at]), float(of_current[at])) for at in highest],
        scored=(len(samples[0]), len(samples[1])),
        against=(min(AGAINST, len(samples[0])), min(AGAINST, len(samples[1]))),
        kernel=kernel.name,
    )


def strongest_kernel(result: MMDTestResult) -> Kernel:
    """The kernel that the result's ``mmd2`` is of."""
    found = min(result.kernels, key=lambda each: (each.p_value, -each.mmd2 / (each.null_sd or 1)))
    kind, _, inside = found.kernel.partition("(")
    if kind == "RBF":
        return RBF(found.bandwidth)
    if kind == "Laplacian":
        return Laplacian(found.bandwidth)
    if kind == "Linear":
        return Linear()
    if kind == "Polynomial":
        return Polynomial(int(inside.rstrip(")")))
    raise DriftError(f"The result was made with {found.kernel}, a kernel of your own: give it to the report, too.")


def _chosen(rows: int, random: Any) -> Any:
    return np.arange(rows) if rows <= SCORED else np.sort(random.choice(rows, SCORED, replace=False))
