"""Metrics of rankings: recall and nDCG of each query."""

from __future__ import annotations

from collections.abc import Sequence
from typing import Any

import numpy as np

__all__ = ["query_metrics", "query_names"]

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
