"""From merged counts to an ``Evaluation``: of classes, numbers, rankings or texts."""

from __future__ import annotations

import math
from collections.abc import Callable
from dataclasses import replace
from typing import Any

import numpy as np

from luminosity.errors import EvaluationError, Fix
from luminosity.evaluation.bootstrap import Combiner, ModelMetrics, quantile_interval
from luminosity.evaluation.conclude_classes import Classes, sort_key
from luminosity.evaluation.conclude_means import Ranking, Texts
from luminosity.evaluation.distinct_rows import DistinctRows
from luminosity.evaluation.evaluation import Evaluation
from luminosity.evaluation.metrics import number_sums, numbers_from_sums, quantile_of, query_names
from luminosity.evaluation.result import Metric
from luminosity.evaluation.state import WHOLE, EvaluationState

__all__ = ["conclude"]

_ERROR_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_SMALLEST_CENTRE = 1e-300
_TOO_LARGE = "it is too large for a number of 64 bits"


def conclude(state: EvaluationState) -> Evaluation:
    """Return the evaluation of everything that a state has collected.

    Raises an error if rows have missing values, unless ``skip_missing`` is set.
    """
    state.finish_queries()
    settings = state.settings
    _check_missing(state)
    empty = DistinctRows(0, 1000)
    if state.task == "classes":
        one: Callable[[DistinctRows], Evaluation] = Classes(state).evaluate
    else:
        kinds = {"numbers": _Numbers, "texts": Texts}
        one = kinds.get(state.task or "", Ranking)(settings).evaluate
    if not any(table.rows for table in state.tables.values()):
        whole = _nothing(state)
    else:
        whole = one(state.tables.get(WHOLE, empty))
    slices: dict[str, dict[Any, Evaluation]] = {}
    for number, by in enumerate(settings.slices):
        keys = sorted((key for at, key in state.tables if at == number), key=sort_key)
        slices[",".join(by)] = {key: one(state.tables[number, key]) for key in keys}
    return replace(whole, slices=slices, skipped=state.skipped)


def _check_missing(state: EvaluationState) -> None:
    if state.settings.skip_missing or not state.missing:
        return
    name, count = min(state.missing.items(), key=lambda item: (-item[1], item[0]))
    others = f" (and {len(state.missing) - 1} more columns)" if len(state.missing) > 1 else ""
    raise EvaluationError(
        f"the column {name!r} has {count:,} missing or infinite values in {state.rows:,} rows{others}, expected none",
        fix=Fix("pass skip_missing=True to leave these rows out", command="add --skip-missing to leave these rows out"),
    )


def _nothing(state: EvaluationState) -> Evaluation:
    """Return the evaluation of no rows: every metric is not defined."""
    settings = state.settings
    reason = "no rows" if not state.rows else "all rows have missing values"
    if settings.query is not None:
        names = query_names(settings.k)
    elif state.task == "numbers":
        names = ["mae", "rmse", "r2"]
    elif state.task == "texts":
        names = settings.text_metrics
    else:
        names = ["accuracy"] if settings.prediction is not None else []
        names += ["auc", "average_precision"] if settings.score is not None else []
    return Evaluation(state.task, 0, metrics={name: Metric(None, reason=reason) for name in names})


class _Numbers(Combiner):
    """Evaluates predictions of numbers by their errors."""

    def evaluate(self, table: DistinctRows) -> Evaluation:
        """Return the evaluation of the whole table or of a slice."""
        with np.errstate(over="ignore", invalid="ignore"):  # metrics that are not finite say why
            return self._evaluate(table)

    def _evaluate(self, table: DistinctRows) -> Evaluation:
        label, counts, rows = table.values[:, 0], table.counts, table.rows
        centre = float((label * counts).sum() / rows)
        centre = 0.0 if abs(centre) < _SMALLEST_CENTRE else centre
        columns = np.concatenate([number_sums(label, each, centre) for each in table.values.T[1:]])
        width = len(columns) // (table.width - 1)
        parts = [slice(at * width, (at + 1) * width) for at in range(table.width - 1)]
        sums = (columns * counts).sum(axis=1, keepdims=True)
        exact = [numbers_from_sums(sums[part]) for part in parts]
        drawn = self.resampler.sums(columns, counts)
        replicates, of_cells = (
            [{} if drawn is None else numbers_from_sums(drawn[which][part]) for part in parts] for which in (0, 1)
        )
        reasons = dict.fromkeys(exact[0], _TOO_LARGE)
        if float(label.min()) == float(label.max()):
            for each in exact:
                each["r2"] = np.array([np.nan])
            reasons["r2"] = "there is one row" if rows == 1 else "all labels are equal"
        elif float(sums[4, 0]) < _SMALLEST_CENTRE:
            reasons["r2"] = "the labels differ by too little"
        found = self.pair([ModelMetrics(*each, reasons) for each in zip(exact, replicates, of_cells, strict=True)])
        for name, prediction in zip(("metrics", "metrics_b"), table.values.T[1:], strict=False):
            found[name] |= self._quantiles(prediction - label, counts)
        return Evaluation("numbers", rows, notes=self.notes(table), **found)

    def _quantiles(self, error: Any, counts: Any) -> dict[str, Metric]:
        found: dict[str, Metric] = {}
        for name, values, shares in (
            ("error", error, _ERROR_QUANTILES),
            ("absolute_error", np.abs(error), (0.5, 0.95)),
        ):
            order = np.argsort(values, kind="stable")
            ordered = values[order], counts[order]
            for share in shares:
                interval = (
                    quantile_interval(*ordered, share, self.settings.confidence)
                    if self.settings.resamples
                    else (None, None)
                )
                value = quantile_of(*ordered, share)
                is_finite = all(each is None or math.isfinite(each) for each in (value, *interval))
                found[f"{name}_q{round(100 * share):02}"] = (
                    Metric(value, *interval) if is_finite else Metric(None, reason=_TOO_LARGE)
                )
        return found
