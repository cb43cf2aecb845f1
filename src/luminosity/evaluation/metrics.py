"""The metrics, as functions of cells and weights.

A cell stands for rows that are equal for the metric. ``weights`` is a matrix: its first index is the replicate, of
which the exact metric has one, and the second is the cell. NaN means that a metric is not defined for a replicate.
"""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np

__all__ = [
    "PER_CLASS",
    "ScoreCells",
    "calibration_bins",
    "class_counts",
    "class_metrics",
    "curves",
    "kappa_metrics",
    "number_sums",
    "numbers_from_sums",
    "quantile_of",
    "query_metrics",
    "query_names",
    "score_cells",
    "score_metrics",
]
PER_CLASS = ("precision", "recall", "f1")
_LEAST = float(np.finfo(np.float64).eps)  # probabilities are clipped here for the log loss, as scikit-learn does
_CURVE_POINTS = 300  # of a curve in the report


def _share(part: Any, whole: Any, otherwise: float = np.nan) -> Any:
    """Divide, with ``otherwise`` where the whole is 0."""
    return np.divide(part, whole, out=np.full(np.broadcast(part, whole).shape, otherwise), where=np.asarray(whole) != 0)


def class_counts(label: Any, prediction: Any, weights: Any, classes: int) -> tuple[Any, Any, Any]:
    """Return the weight of right predictions, labels and predictions, each by replicate and class."""
    right, labels, predictions = (np.zeros((classes, len(weights))) for _ in range(3))
    np.add.at(labels, label, weights.T)
    np.add.at(predictions, prediction, weights.T)
    same = label == prediction
    np.add.at(right, label[same], weights.T[same])
    return right.T, labels.T, predictions.T


def class_metrics(counts: tuple[Any, Any, Any], positive: int | None) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the metrics of all classes together, and those of each class (by replicate and class).

    A class counts as 0 in an average if its precision or recall is not defined, as in scikit-learn. A class that is
    neither a label nor a prediction in a replicate has no part in that replicate's average.
    """
    right, labels, predictions = counts
    rows = labels.sum(axis=1)
    of_class = {
        "precision": _share(right, predictions),
        "recall": _share(right, labels),
        "f1": _share(2 * right, labels + predictions),
    }
    found = {"accuracy": _share(right.sum(axis=1), rows)}
    is_there = labels > 0
    found["balanced_accuracy"] = _share(
        np.where(is_there, np.nan_to_num(of_class["recall"]), 0).sum(axis=1), is_there.sum(axis=1)
    )
    if positive is not None:
        found.update({name: values[:, positive] for name, values in of_class.items()})
    is_used = labels + predictions > 0
    for name, values in of_class.items():
        found[f"{name}_macro"] = _share(np.where(is_used, np.nan_to_num(values), 0).sum(axis=1), is_used.sum(axis=1))
    for name, values in of_class.items():
        found[f"{name}_weighted"] = _share((np.nan_to_num(values) * labels).sum(axis=1), rows)
    return found, of_class


def kappa_metrics(counts: tuple[Any, Any, Any], values: Any, apart: Any) -> dict[str, Any]:
    """Return Cohen's kappa: the agreement beyond that of independent labels and predictions, by replicate.

    With the ``values`` of classes that are numbers, also with quadratic weights: ``apart`` is the sum of the squared
    differences of labels and predictions, by replicate.

    >>> cells = np.array([0, 1, 1]), np.array([0, 1, 0]), np.array([[5.0, 3.0, 2.0]])
    >>> kappa_metrics(class_counts(*cells, 2), None, None)["kappa"].round(4).tolist()
    [0.6]
    """
    right, labels, predictions = counts
    rows = labels.sum(axis=1)
    by_chance = _share((labels * predictions).sum(axis=1), rows * rows)
    found = {"kappa": _share(_share(right.sum(axis=1), rows) - by_chance, 1 - by_chance)}
    if values is not None:
        values = values - values.mean()  # so that squares of large numbers lose no digits
        squares = (labels + predictions) @ (values * values)
        expected = squares - 2 * _share((labels @ values) * (predictions @ values), rows)
        found["kappa_quadratic"] = 1 - _share(apart, expected)
    return found


@dataclass(frozen=True)
class ScoreCells:
    """Cells with a score each, in ascending order; ``event`` says whether what the score predicts is true.

    ``brier`` and ``log_loss`` are the mean losses of a cell's rows.
    """

    score: Any
    event: Any
    brier: Any
    log_loss: Any
    order: Any


def score_cells(score: Any, event: Any, brier: Any = None, log_loss: Any = None) -> ScoreCells:
    """Return cells in the order of their scores. By default, losses are those of the scores."""
    order = np.argsort(score, kind="stable")
    if brier is None:
        clipped = np.clip(score, _LEAST, 1 - _LEAST)
        brier = (score - event) ** 2
        log_loss = -np.log(np.where(event, clipped, 1 - clipped))
    return ScoreCells(score[order], event[order], brier[order], log_loss[order], order)


def score_metrics(cells: ScoreCells, weights: Any, bins: int, are_probabilities: bool) -> dict[str, Any]:
    """Return AUC and average precision, and if scores are probabilities, Brier score, log loss and ECE."""
    weights = np.asarray(weights, dtype=np.float64)[:, cells.order]
    starts = np.flatnonzero(np.r_[True, cells.score[1:] != cells.score[:-1]])
    events = np.add.reduceat(np.where(cells.event, weights, 0.0), starts, axis=1)
    others = np.add.reduceat(np.where(cells.event, 0.0, weights), starts, axis=1)
    in_all, not_events = events.sum(axis=1), others.sum(axis=1)
    below = np.cumsum(others, axis=1) - others / 2
    found = {"auc": _share((events * below).sum(axis=1), in_all * not_events)}
    above = np.cumsum(events[:, ::-1], axis=1)[:, ::-1]
    chosen = above + np.cumsum(others[:, ::-1], axis=1)[:, ::-1]
    found["average_precision"] = _share((events * _share(above, chosen, 0.0)).sum(axis=1), in_all)
    if not are_probabilities:
        return found
    rows = in_all + not_events
    found["brier"] = _share((weights * cells.brier).sum(axis=1), rows)
    found["log_loss"] = _share((weights * cells.log_loss).sum(axis=1), rows)
    edges = np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], cells.score)
    bin_starts = np.flatnonzero(np.r_[True, edges[1:] != edges[:-1]])
    gaps = np.add.reduceat(weights * (cells.score - cells.event), bin_starts, axis=1)
    found["ece"] = _share(np.abs(gaps).sum(axis=1), rows)
    return found


def calibration_bins(cells: ScoreCells, counts: Any, bins: int) -> list[tuple[int, float | None, float | None]]:
    """Return for each bin of equal width its rows, the mean of their scores, and the share of events.

    A score at the edge of two bins belongs to the lower one, as in scikit-learn.
    """
    counts = counts[cells.order]
    at = np.searchsorted(np.linspace(0, 1, bins + 1)[1:-1], cells.score)
    rows = np.bincount(at, weights=counts, minlength=bins)
    scores = np.bincount(at, weights=counts * cells.score, minlength=bins)
    events = np.bincount(at, weights=counts * cells.event, minlength=bins)
    return [
        (int(rows[each]), float(scores[each] / rows[each]), float(events[each] / rows[each]))
        if rows[each]
        else (0, None, None)
        for each in range(bins)
    ]


def curves(cells: ScoreCells, counts: Any) -> dict[str, tuple[list[float], list[float]]]:
    """Return some points of the ROC curve and of the precision-recall curve."""
    counts = counts[cells.order][::-1].astype(np.float64)
    event, score = cells.event[::-1], cells.score[::-1]
    ends = np.flatnonzero(np.r_[score[1:] != score[:-1], True])
    true = np.r_[0.0, np.cumsum(np.where(event, counts, 0))[ends]]
    false = np.r_[0.0, np.cumsum(np.where(event, 0, counts))[ends]]
    if not true[-1] or not false[-1]:
        return {}
    roc = _thinned(false / false[-1], true / true[-1])
    return {"roc": roc, "precision_recall": _thinned(true[1:] / true[-1], true[1:] / (true[1:] + false[1:]))}


def _thinned(x: Any, y: Any) -> tuple[list[float], list[float]]:
    """Return points at about equal distances along the curve."""
    if len(x) > _CURVE_POINTS:
        along = np.r_[0.0, np.cumsum(np.abs(np.diff(x)) + np.abs(np.diff(y)))]
        at = np.searchsorted(along, np.linspace(0, along[-1], _CURVE_POINTS))
        at = np.unique(np.clip(at, 0, len(x) - 1))
        x, y = x[at], y[at]
    return x.tolist(), y.tolist()


def number_sums(label: Any, prediction: Any, centre: float) -> Any:
    """Return, for each row, the columns whose sums give the metrics of numbers. ``centre`` is the mean label."""
    error, apart = prediction - label, label - centre
    return np.stack([np.abs(error), error * error, error, apart, apart * apart, np.ones_like(error)])


def numbers_from_sums(sums: Any) -> dict[str, Any]:
    """Return the metrics from sums of ``number_sums``: the first index is the column, the second the replicate."""
    absolute, squared, error, apart, spread, rows = sums
    total = spread - _share(apart * apart, rows, 0.0)
    return {
        "mae": _share(absolute, rows),
        "rmse": np.sqrt(_share(squared, rows)),
        "mean_error": _share(error, rows),
        "r2": 1 - _share(squared, total),
    }


def quantile_of(values: Any, counts: Any, share: float) -> float:
    """Return a quantile of sorted values with counts, interpolated as in NumPy.

    >>> quantile_of(np.array([1.0, 2.0]), np.array([1, 1]), 0.5)
    1.5
    """
    ends = np.cumsum(counts)
    at = share * (int(ends[-1]) - 1)
    low, high = (float(values[np.searchsorted(ends, rank, side="right")]) for rank in (np.floor(at), np.ceil(at)))
    return low if low == high else low + (high - low) * (at - float(np.floor(at)))


_NOT_DEFINED = -1.0


def query_names(k: Sequence[int]) -> list[str]:
    """Return the names of the metrics of a query.

    >>> query_names([1, 5])
    ['recall@1', 'recall@5', 'ndcg@1', 'ndcg@5', 'ndcg']
    """
    return [*(f"recall@{each}" for each in k), *(f"ndcg@{each}" for each in k), "ndcg"]


def query_metrics(query: Any, relevance: Any, score: Any, k: Sequence[int]) -> Any:
    """Return a row of ``query_names`` for each query.

    Rows of equal score have no order: each metric is its mean over all orders of these rows, as in scikit-learn.
    Relevances above 0 count as relevant. Recall is -1 (not defined) for a query without relevant rows; nDCG is 0.
    """
    order = np.lexsort((-score, query))
    query, relevance, score = query[order], relevance[order], score[order]
    is_first = np.r_[True, query[1:] != query[:-1]]
    starts = np.flatnonzero(is_first)
    number = np.cumsum(is_first) - 1
    rank = np.arange(len(query)) - starts[number]
    tie_first = is_first | np.r_[True, score[1:] != score[:-1]]
    tie_starts = np.flatnonzero(tie_first)
    tie = np.cumsum(tie_first) - 1
    size = np.diff(np.r_[tie_starts, len(query)])[tie]
    begin = rank[tie_starts][tie]

    discounts = np.r_[0.0, np.cumsum(1 / np.log2(np.arange(int(rank.max()) + 1) + 2))]
    ideal = relevance[np.lexsort((-relevance, query))]
    relevant = (relevance > 0).astype(np.float64)
    in_all = np.add.reduceat(relevant, starts)
    columns: list[Any] = []
    for most in k:
        chosen = np.clip(most - begin, 0, size) / size
        found = np.add.reduceat(relevant * chosen, starts)
        columns.append(np.where(in_all > 0, found / np.maximum(in_all, 1), _NOT_DEFINED))
    for most in [*k, len(query)]:
        mean = (discounts[np.minimum(begin + size, most)] - discounts[np.minimum(begin, most)]) / size
        gain = np.add.reduceat(relevance * mean, starts)
        best = np.add.reduceat(ideal * np.where(rank < most, discounts[rank + 1] - discounts[rank], 0.0), starts)
        columns.append(np.divide(gain, best, out=np.zeros_like(gain), where=best > 0))
    return np.stack(columns, axis=1)
