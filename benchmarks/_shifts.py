"""Pairs of distributions that differ, and one pair that does not, to measure the power of tests."""

from __future__ import annotations

from collections.abc import Callable
from dataclasses import dataclass
from typing import Any, TypeAlias

import numpy as np

Draw: TypeAlias = Callable[[np.random.Generator, int], Any]  # a function that draws rows

_WIDTH = 10  # numbers of a row


@dataclass(frozen=True)
class Shift:
    """Two distributions, and the rows to draw of each."""

    rows: int  # of each sample
    reference: Draw
    current: Draw

    def draw(self, seed: tuple[int, ...], rows: tuple[int, int] | None = None) -> tuple[Any, Any]:
        """Draw both samples."""
        random = np.random.default_rng(seed)
        of_reference, of_current = rows or (self.rows, self.rows)
        return self.reference(random, of_reference), self.current(random, of_current)


def normal(random: np.random.Generator, rows: int) -> Any:
    """Draw independent standard normal numbers."""
    return random.normal(size=(rows, _WIDTH))


def moved(by: float) -> Draw:
    """Move the mean of every column."""
    return lambda random, rows: normal(random, rows) + by


def scaled(by: float) -> Draw:
    """Scale every column."""
    return lambda random, rows: normal(random, rows) * by


def correlated(share: float) -> Draw:
    """Correlate all columns. Each column still has variance one; any two columns have this correlation."""
    return lambda random, rows: (1 - share) ** 0.5 * normal(random, rows) + share**0.5 * random.normal(size=(rows, 1))


def with_outliers(share: float) -> Draw:
    """Move a share of the rows far away."""
    return lambda random, rows: normal(random, rows) + 4 * (random.random((rows, 1)) < share)


def perturbed_uniform(waves: int, height: float) -> Draw:
    """Draw one column with the density ``1 + height sin(2π waves x)``: more waves are harder to detect."""

    def draw(random: np.random.Generator, rows: int) -> Any:
        tried = random.random(8 * rows)
        kept = tried[random.random(8 * rows) * (1 + height) < 1 + height * np.sin(2 * np.pi * waves * tried)]
        return kept[:rows, None]

    return draw


def clusters(spread_of_one: float) -> Draw:
    """Draw four clusters in the plane, far from each other; one of them has another spread."""

    def draw(random: np.random.Generator, rows: int) -> Any:
        corner = random.integers(0, 4, rows)
        spread = np.where(corner == 3, spread_of_one, 1.0)[:, None]
        return 20.0 * np.stack([corner // 2, corner % 2], axis=1) + spread * random.normal(size=(rows, 2))

    return draw


NONE = Shift(240, normal, normal)

SMALL: dict[str, Shift] = {
    "mean": Shift(240, normal, moved(0.12)),
    "scale": Shift(240, normal, scaled(1.13)),
    "correlation": Shift(240, normal, correlated(0.22)),
    "one row in 20 is an outlier": Shift(240, normal, with_outliers(0.05)),
    "perturbed uniform, 2 waves": Shift(300, perturbed_uniform(2, 0.0), perturbed_uniform(2, 0.4)),
    "perturbed uniform, 5 waves": Shift(300, perturbed_uniform(5, 0.0), perturbed_uniform(5, 0.5)),
    "mixture, one of four clusters wider": Shift(240, clusters(1.0), clusters(2.0)),
}

LARGE: dict[str, Shift] = {
    "mean": Shift(2000, normal, moved(0.04)),
    "scale": Shift(2000, normal, scaled(1.045)),
    "correlation": Shift(2000, normal, correlated(0.08)),
}
