"""Metrics with confidence intervals, by a Poisson bootstrap over counts.

In a Poisson bootstrap, every row of a replicate has a random weight that is Poisson-distributed with mean 1. The sum of
the weights of ``c`` equal rows is Poisson-distributed with mean ``c``. So replicates can be drawn from the merged
counts of distinct rows: nothing has to be carried with the rows, and the result does not depend on how rows were
distributed.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from statistics import NormalDist
from typing import Any

import numpy as np

from luminosity.evaluation.distinct_rows import DistinctRows
from luminosity.evaluation.metrics import ScoreCells, score_cells
from luminosity.evaluation.result import Metric
from luminosity.evaluation.settings import Settings

__all__ = ["Combiner", "ModelMetrics", "quantile_interval", "wilson"]

_MOST_DRAWS = 8_000_000  # of random weights for one set of cells: about half a second
_LEAST_REPLICATES = 50
_SCORE_CELLS = 1024  # buckets of scores, in replicates
_OWN_CELLS = 1024  # distinct rows of numbers with the largest counts have their own cells; others share
_SHARED_CELLS = 1024


class Resampler:
    """Draws random weights for cells. ``replicates`` may be 0: then there are no intervals."""

    def __init__(self, replicates: int, seed: int) -> None:
        self._replicates = replicates
        self._seed = seed

    def weights(self, counts: Any) -> Any | None:
        """Return weights by replicate and cell, or None without replicates."""
        if not self._replicates or not len(counts):
            return None
        replicates = min(self._replicates, max(_LEAST_REPLICATES, _MOST_DRAWS // len(counts)))
        random = np.random.default_rng(self._seed)
        return random.poisson(counts, size=(replicates, len(counts))).astype(np.float64)

    def scores(self, scores: list[Any], event: Any, counts: Any) -> tuple[list[ScoreCells], Any]:
        """Return at most some thousand cells for the scores of one or two models, and the cells' counts.

        A cell has rows of the same event whose scores lie between the same quantiles.
        """
        each = _SCORE_CELLS if len(scores) == 1 else math.isqrt(2 * _SCORE_CELLS)
        exact = [score_cells(score, event) for score in scores]
        if len(counts) <= 2 * _SCORE_CELLS:
            return exact, counts
        number = event.astype(np.int64)
        for score, cells in zip(scores, exact, strict=True):
            ends = np.cumsum(counts[cells.order])
            at = np.searchsorted(ends, np.arange(1, each) * (ends[-1] / each))
            number = number * each + np.searchsorted(np.unique(cells.score[at]), score, side="right")
        _, number = np.unique(number, return_inverse=True)
        of_cell = np.bincount(number, weights=counts)

        def mean(column: Any) -> Any:
            return np.bincount(number, weights=counts * column) / of_cell

        found: list[ScoreCells] = []
        for score, cells in zip(scores, exact, strict=True):
            back = np.argsort(cells.order)
            brier, log_loss = mean(cells.brier[back]), mean(cells.log_loss[back])
            found.append(score_cells(mean(score), mean(event) > 0.5, brier, log_loss))
        return found, of_cell.astype(np.int64)

    def sums(self, columns: Any, counts: Any) -> tuple[Any, Any] | None:
        """Return replicates of the sums of columns over all rows, by column and replicate, and their expected value.

        The distinct rows with the largest counts have their own weights. All others are put into random cells, each of
        which has one weight.
        """
        if not self._replicates or not len(counts):
            return None
        columns = columns * counts
        is_own = np.ones(len(counts), dtype=bool)
        if len(counts) > _OWN_CELLS + _SHARED_CELLS:
            is_own[np.argsort(-counts, kind="stable")[_OWN_CELLS:]] = False
        own = self.weights(counts[is_own])
        assert own is not None, "there is at least one row"
        found = (own / counts[is_own]) @ columns[:, is_own].T
        if not is_own.all():
            shared = np.random.default_rng((self._seed, 1))
            cell = shared.integers(_SHARED_CELLS, size=int((~is_own).sum()))
            cells = np.stack([np.bincount(cell, weights=each, minlength=_SHARED_CELLS) for each in columns[:, ~is_own]])
            found = found + shared.poisson(1.0, size=(len(own), _SHARED_CELLS)) @ cells.T
        return found.T, columns.sum(axis=1, keepdims=True)


@dataclass
class ModelMetrics:
    """The metrics of one model by name: exact, of each replicate, and as the cells of the replicates give them.

    ``replicates`` is empty without intervals. ``reasons`` say why a metric is not defined.
    """

    exact: dict[str, Any] = field(default_factory=dict[str, Any])
    replicates: dict[str, Any] = field(default_factory=dict[str, Any])
    of_cells: dict[str, Any] = field(default_factory=dict[str, Any])
    reasons: Mapping[str, str] = field(default_factory=dict[str, str])

    def minus(self, other: ModelMetrics) -> ModelMetrics:
        """Return the differences of the metrics that both models have."""
        names = [name for name in other.exact if name in self.exact]

        def minus(mine: dict[str, Any], theirs: dict[str, Any]) -> dict[str, Any]:
            return {name: mine[name] - theirs[name] for name in names} if mine else {}

        return ModelMetrics(
            minus(self.exact, other.exact),
            minus(self.replicates, other.replicates),
            minus(self.of_cells, other.of_cells),
            dict.fromkeys(names, "it is not defined for both models"),
        )


class Combiner:
    """Makes metrics of values, replicates and reasons."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.resampler = Resampler(settings.resamples, settings.seed)

    def metrics(self, model: ModelMetrics, prefix: str = "") -> dict[str, Metric]:
        """Return a metric for each name in ``exact``, whose values have one replicate."""
        found: dict[str, Metric] = {}
        for name, values in model.exact.items():
            value = float(values[0])
            if not math.isfinite(value):
                found[name] = Metric(None, reason=model.reasons.get(name, "it would be a division by zero"))
                continue
            low = high = None
            if model.replicates:
                of_cells = float(model.of_cells[name][0])
                bounds = (
                    (-math.inf, math.inf) if name in self.settings.measures and not prefix else _bounds(prefix + name)
                )
                low, high = interval_of(bounds, value, model.replicates[name], of_cells, self.settings.confidence)
            found[name] = Metric(value, low, high)
        return found

    def pair(self, models: Sequence[ModelMetrics]) -> dict[str, Any]:
        """Return the fields of an evaluation: the metrics of one model or two, and their differences."""
        found: dict[str, Any] = {
            name: self.metrics(each) for name, each in zip(("metrics", "metrics_b"), models, strict=False)
        }
        if len(models) > 1:
            found["differences"] = self.metrics(models[1].minus(models[0]), prefix="difference of ")
        return found

    def widened(self, metric: Metric, rows: int) -> Metric:
        """Return a share of 0 or 1 with Wilson's interval: its replicates are all equal."""
        if metric.value not in (0.0, 1.0) or not rows or not self.settings.resamples:
            return metric
        return Metric(metric.value, *wilson(metric.value, rows, self.settings.confidence))

    def notes(self, table: DistinctRows) -> list[str]:
        """Return what a reader must know about the precision of the metrics."""
        if table.is_exact:
            return []
        error = 2.0 ** (table.dropped_bits - 52)
        distinct = f"there are more than {table.limit:,} distinct rows"
        return [f"{distinct}: numbers were rounded, with a relative error of up to {error:.1g}"]


def interval_of(
    bounds: tuple[float, float], value: float, replicates: Any, of_cells: float, confidence: float
) -> tuple[float | None, float | None]:
    """Return the interval of a metric: the quantiles of its replicates, moved from the cells' value to ``value``."""
    defined = replicates[np.isfinite(replicates)]
    if len(defined) < max(2, len(replicates) // 2) or not math.isfinite(of_cells):
        return None, None
    tail = (1 - confidence) / 2
    low, high = (float(each) + value - of_cells for each in np.quantile(defined, [tail, 1 - tail]))
    least, most = bounds
    return max(least, min(low, value)), min(most, max(high, value))


def _bounds(name: str) -> tuple[float, float]:
    if name.startswith("difference") or name == "mean_error":
        return -math.inf, math.inf
    if name == "r2":
        return -math.inf, 1.0
    if name.startswith("kappa"):
        return -1.0, 1.0
    return 0.0, math.inf if name in ("mae", "rmse", "log_loss") else 1.0


def wilson(share: float, rows: float, confidence: float) -> tuple[float, float]:
    """Return Wilson's interval of a share, for shares of 0 or 1, of which all replicates are equal.

    >>> [round(each, 4) for each in wilson(1.0, 10, 0.95)]
    [0.7225, 1.0]
    """
    z = NormalDist().inv_cdf(0.5 + confidence / 2)
    middle = (share + z * z / (2 * rows)) / (1 + z * z / rows)
    half = z / (1 + z * z / rows) * math.sqrt(share * (1 - share) / rows + z * z / (4 * rows * rows))
    return max(0.0, middle - half), min(1.0, middle + half)


def quantile_interval(values: Any, counts: Any, share: float, confidence: float) -> tuple[float, float]:
    """Return the interval of a quantile of sorted values: between two of them, whose ranks are binomial."""
    ends = np.cumsum(counts)
    rows = int(ends[-1])
    half = NormalDist().inv_cdf(0.5 + confidence / 2) * math.sqrt(rows * share * (1 - share))
    ranks = [max(0, math.floor(rows * share - half) - 1), min(rows - 1, math.ceil(rows * share + half))]
    low, high = (float(values[np.searchsorted(ends, rank, side="right")]) for rank in ranks)
    return low, high
