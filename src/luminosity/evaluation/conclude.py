"""From merged counts to an ``Evaluation``."""

from __future__ import annotations

import math
from collections.abc import Callable, Mapping
from dataclasses import replace
from typing import Any

import numpy as np

from luminosity._shared.text import list_some
from luminosity.errors import EvaluationError, Fix
from luminosity.evaluation.bootstrap import Resampler, interval_of, quantile_interval, wilson
from luminosity.evaluation.distinct_rows import DistinctRows
from luminosity.evaluation.evaluation import Evaluation
from luminosity.evaluation.metrics import (
    PER_CLASS,
    calibration_bins,
    class_counts,
    class_metrics,
    curves,
    mean_metrics,
    number_sums,
    numbers_from_sums,
    quantile_of,
    score_cells,
    score_metrics,
)
from luminosity.evaluation.ranking import query_names
from luminosity.evaluation.result import CalibrationBin, ClassMetrics, Confusion, Curve, Metric
from luminosity.evaluation.settings import Settings
from luminosity.evaluation.state import WHOLE, EvaluationState, split_groups

__all__ = ["conclude"]

_ERROR_QUANTILES = (0.05, 0.25, 0.5, 0.75, 0.95)
_OF_PROBABILITIES = ("brier", "log_loss", "ece")
_REVERSED = 0.4  # an AUC below it is worth a note, if its interval is below 0.5, too
_SHOWN_CLASSES = 10  # in a message
_MOST_IN_CONFUSION = 200  # classes; a larger matrix is left out
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
        one: Callable[[DistinctRows], Evaluation] = _Classes(state).evaluate
    else:
        one = _Numbers(settings).evaluate if state.task == "numbers" else _Ranking(settings).evaluate
    if not any(table.rows for table in state.tables.values()):
        whole = _nothing(state)
    else:
        whole = one(state.tables.get(WHOLE, empty))
    slices: dict[str, dict[Any, Evaluation]] = {}
    for number, by in enumerate(settings.slices):
        keys = sorted((key for at, key in state.tables if at == number), key=_sort_key)
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
    else:
        names = ["accuracy"] if settings.prediction is not None else []
        names += ["auc", "average_precision"] if settings.score is not None else []
    return Evaluation(state.task, 0, metrics={name: Metric(None, reason=reason) for name in names})


def _sort_key(key: Any) -> Any:
    """Order keys of any type: None last."""
    parts = key if isinstance(key, tuple) else (key,)
    return [(each is None, isinstance(each, str), "" if each is None else each) for each in parts]


class _Combiner:
    """Makes metrics of values, replicates and reasons."""

    def __init__(self, settings: Settings) -> None:
        self.settings = settings
        self.resampler = Resampler(settings.resamples, settings.seed)

    def metrics(
        self,
        exact: Mapping[str, Any],
        replicates: Mapping[str, Any] | None,
        of_cells: Mapping[str, Any],
        reasons: Mapping[str, str],
        prefix: str = "",
    ) -> dict[str, Metric]:
        """Return a metric for each name in ``exact``, whose values have one replicate."""
        found: dict[str, Metric] = {}
        for name, values in exact.items():
            value = float(values[0])
            if not math.isfinite(value):
                found[name] = Metric(None, reason=reasons.get(name, "it would be a division by zero"))
                continue
            low = high = None
            if replicates is not None:
                low, high = interval_of(
                    prefix + name, value, replicates[name], float(of_cells[name][0]), self.settings.confidence
                )
            found[name] = Metric(value, low, high)
        return found

    def pair(
        self,
        exact: list[dict[str, Any]],
        replicates: list[dict[str, Any]] | None,
        of_cells: list[dict[str, Any]],
        reasons: list[dict[str, str]],
    ) -> dict[str, Any]:
        """Return the fields of an evaluation: the metrics of one model or two, and their differences."""
        sets = [
            self.metrics(each, None if replicates is None else replicates[at], of_cells[at], reasons[at])
            for at, each in enumerate(exact)
        ]
        if len(sets) == 1:
            return {"metrics": sets[0]}
        names = [name for name in exact[0] if name in exact[1]]
        of_differences = [
            {name: pair[1][name] - pair[0][name] for name in names} for pair in (exact, replicates or exact, of_cells)
        ]
        differences = self.metrics(
            of_differences[0],
            None if replicates is None else of_differences[1],
            of_differences[2],
            dict.fromkeys(names, "it is not defined for both models"),
            prefix="difference of ",
        )
        return {"metrics": sets[0], "metrics_b": sets[1], "differences": differences}

    def notes(self, table: DistinctRows) -> list[str]:
        """Return what a reader must know about the precision of the metrics."""
        if table.is_exact:
            return []
        error = 2.0 ** (table.dropped_bits - 52)
        distinct = f"there are more than {table.limit:,} distinct rows"
        return [f"{distinct}: numbers were rounded, with a relative error of up to {error:.1g}"]


class _Classes(_Combiner):
    """Evaluates classes, with or without scores."""

    def __init__(self, state: EvaluationState) -> None:
        super().__init__(state.settings)
        values = list(state.classes)
        order = sorted(range(len(values)), key=lambda at: _sort_key(values[at]))
        self._labels = [_as_number(values[at]) if state.has_numbers else values[at] for at in order]
        self._codes = np.empty(max(1, len(values)), dtype=np.int64)
        self._codes[order] = np.arange(len(order))
        self._positive = self._find_positive()

    def evaluate(self, table: DistinctRows) -> Evaluation:
        """Return the evaluation of the whole table or of a slice."""
        settings, counts = self.settings, table.counts
        codes = [self._codes[each] for each in split_groups(table.group)]
        order = np.lexsort((*table.values.T[::-1], codes[2], codes[1], codes[0]))  # codes depend on the order of rows
        label, *predictions = (each[order] for each in codes)
        counts, values = counts[order], table.values[order]
        exact: list[dict[str, Any]] = [{} for _ in range(2 if settings.has_second else 1)]
        replicates: list[dict[str, Any]] = [{} for _ in exact]
        of_cells: list[dict[str, Any]] = [{} for _ in exact]
        reasons: list[dict[str, str]] = [{} for _ in exact]
        fields: dict[str, Any] = {}
        if settings.prediction is not None:
            fields |= self._of_predictions(label, predictions, counts, exact, replicates, reasons)
            for at, each in enumerate(exact):
                of_cells[at] |= each
        if settings.score is not None:
            fields |= self._of_scores(label, predictions, values, counts, exact, replicates, of_cells, reasons)
        found = self.pair(exact, replicates if settings.resamples else None, of_cells, reasons)
        for name in ("metrics", "metrics_b"):
            if name in found and settings.resamples and "accuracy" in found[name]:
                found[name]["accuracy"] = self._widened(found[name]["accuracy"], int(counts.sum()))
        notes = self._notes(table, found)
        return Evaluation("classes", table.rows, positive=self._positive, notes=notes, **found, **fields)

    def _notes(self, table: DistinctRows, found: Mapping[str, Mapping[str, Metric]]) -> list[str]:
        notes = self.notes(table)
        for name, model in (("metrics", ""), ("metrics_b", " of the second model")):
            auc = found.get(name, {}).get("auc")
            if auc is not None and _is_reversed(auc):
                notes.append(f"an AUC{model} of {auc.value:.2g} means that {self._meant_by_reversal()}")
        if self._positive is not None and self._positive not in self._labels:
            known = list_some([repr(each) for each in self._labels], _SHOWN_CLASSES)
            notes.append(f"no row has the class {self._positive!r}; the classes are {known}")
        return notes

    def _meant_by_reversal(self) -> str:
        """Say what an AUC far below 0.5 means, and which setting is probably wrong."""
        if self.settings.score_of == "prediction":
            return (
                "higher scores go with wrong predictions: if the score is that of one class, leave out "
                "score_of='prediction' (--score-of prediction)"
            )
        others = [each for each in self._labels if each != self._positive]
        if len(others) != 1:
            return f"the score ranks other classes above {self._positive!r}: positive= (--positive) names its class"
        return (
            f"the score ranks {others[0]!r} above the positive class {self._positive!r}: if it is the score of "
            f"{others[0]!r}, set positive={others[0]!r} (--positive {others[0]})"
        )

    def _find_positive(self) -> Any:
        """Return the positive class: the one that was given, or of two classes 1, True or the last."""
        given, labels = self.settings.positive, self._labels
        if given is not None:
            return next((each for each in labels if str(each) == str(given)), given)
        if len(labels) == 2:
            return labels[1]
        if len(labels) == 1 and not isinstance(labels[0], str) and labels[0] in (0, 1):
            return type(labels[0])(1)
        return None

    def _of_predictions(
        self,
        label: Any,
        predictions: list[Any],
        counts: Any,
        exact: list[dict[str, Any]],
        replicates: list[dict[str, Any]],
        reasons: list[dict[str, str]],
    ) -> dict[str, Any]:
        triples = np.stack([label, *predictions])
        is_new = np.r_[True, (triples[:, 1:] != triples[:, :-1]).any(axis=0)]
        starts = np.flatnonzero(is_new)
        of_cell = np.add.reduceat(counts, starts)
        cells = triples[:, starts]
        weights = self.resampler.weights(of_cell)
        fields: dict[str, Any] = {}
        for model in range(len(exact)):
            used = [cells[0], cells[model + 1]]
            present, compact = np.unique(np.concatenate(used), return_inverse=True)
            labels = [self._labels[each] for each in present.tolist()]
            at = labels.index(self._positive) if self._positive in labels else None
            pair = compact[: len(cells[0])], compact[len(cells[0]) :]
            summed = class_counts(*pair, of_cell[None].astype(np.float64), len(labels))
            exact[model], per_class = class_metrics(summed, at)
            for name in () if at is not None or self._positive is None else PER_CLASS:
                exact[model][name] = np.array([np.nan])
            of_class: dict[str, Any] | None = None
            if weights is not None:
                again, of_class = class_metrics(class_counts(*pair, weights, len(labels)), at)
                replicates[model] = {name: again.get(name, np.full(len(weights), np.nan)) for name in exact[model]}
            shown = "" if self._positive is None else repr(self._positive)
            reasons[model] |= {
                "precision": f"{shown} is never predicted",
                "recall": f"no row has the label {shown}",
                "f1": f"{shown} is neither a label nor a prediction",
            }
            if model == 0:
                fields["classes"] = self._per_class(labels, summed, per_class, of_class)
                fields["confusion"] = _confusion(labels, *pair, of_cell)
        return fields

    def _per_class(
        self, labels: list[Any], summed: tuple[Any, Any, Any], exact: dict[str, Any], replicates: dict[str, Any] | None
    ) -> list[ClassMetrics]:
        found: list[ClassMetrics] = []
        for at, label in enumerate(labels):
            rows, predicted = int(summed[1][0, at]), int(summed[2][0, at])
            of_label = {name: exact[name][:, at] for name in PER_CLASS}
            again = None if replicates is None else {name: replicates[name][:, at] for name in PER_CLASS}
            reasons = {"precision": f"{label!r} is never predicted", "recall": f"no row has the label {label!r}"}
            metrics = self.metrics(of_label, again, of_label, reasons)
            if replicates is not None:
                metrics["precision"] = self._widened(metrics["precision"], predicted)
                metrics["recall"] = self._widened(metrics["recall"], rows)
            found.append(ClassMetrics(label, **metrics, rows=rows, predicted=predicted))
        return found

    def _widened(self, metric: Metric, rows: int) -> Metric:
        """Return a share of 0 or 1 with Wilson's interval: its replicates are all equal."""
        if metric.value not in (0.0, 1.0) or not rows:
            return metric
        return Metric(metric.value, *wilson(metric.value, rows, self.settings.confidence))

    def _of_scores(
        self,
        label: Any,
        predictions: list[Any],
        values: Any,
        counts: Any,
        exact: list[dict[str, Any]],
        replicates: list[dict[str, Any]],
        of_cells: list[dict[str, Any]],
        reasons: list[dict[str, str]],
    ) -> dict[str, Any]:
        settings = self.settings
        columns = [values[:, at] for at in range(values.shape[1])]
        ready = [self._event(label, predictions[at], score) for at, score in enumerate(columns)]
        fields: dict[str, Any] = {}
        for at, (event, score, reason) in enumerate(ready):
            if event is None:
                names = ("auc", "average_precision", *_OF_PROBABILITIES)
                exact[at] |= {name: np.array([np.nan]) for name in names}
                reasons[at] |= dict.fromkeys(names, reason)
                replicates[at] |= {name: exact[at][name] for name in names}
                of_cells[at] |= {name: exact[at][name] for name in names}
                continue
            cells = score_cells(score, event)
            low, high = float(cells.score[0]), float(cells.score[-1])
            are_probabilities = low >= 0 and high <= 1
            found = score_metrics(cells, counts[None], settings.bins, are_probabilities)
            if not are_probabilities:
                reason = f"scores lie outside 0 to 1: from {low:g} to {high:g}"
                found |= {name: np.array([np.nan]) for name in _OF_PROBABILITIES}
                reasons[at] |= dict.fromkeys(_OF_PROBABILITIES, reason)
            elif at == 0:
                fields["calibration"] = _calibration(cells, counts, settings.bins)
            if at == 0:
                fields["curves"] = {name: Curve(*points) for name, points in curves(cells, counts).items()}
            only = self._only(event)
            reasons[at] |= {"auc": only, "average_precision": only}
            exact[at] |= found
            of_cells[at] |= found
        self._resample_scores(ready, counts, exact, replicates, of_cells)
        return fields

    def _resample_scores(
        self,
        ready: list[tuple[Any, Any, str]],
        counts: Any,
        exact: list[dict[str, Any]],
        replicates: list[dict[str, Any]],
        of_cells: list[dict[str, Any]],
    ) -> None:
        """Add replicates: of both models together, if they predict the same event."""
        if not self.settings.resamples:
            return
        together = len(ready) > 1 and all(each[0] is not None for each in ready)
        together = together and np.array_equal(ready[0][0], ready[-1][0])
        for models in [list(range(len(ready)))] if together else [[at] for at in range(len(ready))]:
            event = ready[models[0]][0]
            if event is None:
                continue
            cells, of_cell = self.resampler.scores([ready[at][1] for at in models], event, counts)
            weights = self.resampler.weights(of_cell)
            assert weights is not None, "there are rows"
            for at, each in zip(models, cells, strict=True):
                are_probabilities = np.isfinite(exact[at]["brier"][0])
                arguments = self.settings.bins, bool(are_probabilities)
                again = score_metrics(each, weights, *arguments)
                nothing = np.full(len(weights), np.nan)
                replicates[at] |= {name: again.get(name, nothing) for name in ("auc", "average_precision")}
                replicates[at] |= {name: again.get(name, nothing) for name in _OF_PROBABILITIES}
                of_cells[at] |= score_metrics(each, of_cell[None], *arguments)

    def _event(self, label: Any, prediction: Any, score: Any) -> tuple[Any, Any, str]:
        """Return what a score predicts for each row, the score of it, or the reason why that is not known."""
        labels = self._labels
        at = labels.index(self._positive) if self._positive in labels else -1
        if self.settings.score_of == "prediction":
            if len(labels) > 2 or at < 0:
                return label == prediction, score, ""
            return label == at, np.where(prediction == at, score, 1 - score), ""
        if self._positive is None:
            count = f"are {len(labels)} classes" if len(labels) > 1 else f"is only the class {labels[0]!r}"
            return None, score, f"there {count}, and positive= does not say which one the score is of"
        return label == at, score, ""

    def _only(self, event: Any) -> str:
        if self.settings.score_of == "prediction" and len(self._labels) > 2:
            return "all predictions are right" if event.all() else "all predictions are wrong"
        return f"all labels are {self._positive!r}" if event.all() else f"no label is {self._positive!r}"


def _is_reversed(auc: Metric) -> bool:
    """Return whether an AUC is so far below 0.5 that the score is probably that of another class.

    >>> _is_reversed(Metric(0.005, 0.001, 0.01)), _is_reversed(Metric(0.3, 0.1, 0.55)), _is_reversed(Metric(0.45))
    (True, False, False)
    """
    return auc.value is not None and auc.value < _REVERSED and (auc.high is None or auc.high < 0.5)


class _Numbers(_Combiner):
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
        replicates = None if drawn is None else [numbers_from_sums(drawn[0][part]) for part in parts]
        of_cells = exact if drawn is None else [numbers_from_sums(drawn[1][part]) for part in parts]
        reasons = dict.fromkeys(exact[0], _TOO_LARGE)
        if float(label.min()) == float(label.max()):
            for each in exact:
                each["r2"] = np.array([np.nan])
            reasons["r2"] = "there is one row" if rows == 1 else "all labels are equal"
        elif float(sums[4, 0]) < _SMALLEST_CENTRE:
            reasons["r2"] = "the labels differ by too little"
        found = self.pair(exact, replicates, of_cells, [reasons] * len(exact))
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


class _Ranking(_Combiner):
    """Evaluates rankings: means over queries, of which replicates are drawn."""

    def evaluate(self, table: DistinctRows) -> Evaluation:
        """Return the evaluation of the whole table or of a slice. ``rows`` of the result are queries."""
        names = query_names(self.settings.k)
        values, counts = table.values, table.counts
        parts = [values[:, at : at + len(names)] for at in range(0, table.width, len(names))]
        exact = [mean_metrics(part, names, counts[None].astype(np.float64)) for part in parts]
        replicates = self._replicates(parts, names, counts)
        reasons = dict.fromkeys(names, "no query has relevant rows")
        found = self.pair(exact, replicates, exact, [reasons] * len(exact))
        without = int(counts[values[:, 0] < 0].sum())
        notes = self.notes(table)
        if without:
            notes.append(f"{without:,} of {table.rows:,} queries have no relevant rows: recall leaves them out")
        return Evaluation("ranking", table.rows, notes=notes, **found)

    def _replicates(self, parts: list[Any], names: list[str], counts: Any) -> list[dict[str, Any]] | None:
        columns = np.concatenate([np.concatenate([np.maximum(part, 0), part >= 0], axis=1) for part in parts], axis=1)
        drawn = self.resampler.sums(columns.T, counts)
        if drawn is None:
            return None
        found: list[dict[str, Any]] = []
        for at in range(len(parts)):
            sums = drawn[0][2 * at * len(names) : 2 * (at + 1) * len(names)]
            totals, queries = sums[: len(names)], sums[len(names) :]
            means = np.divide(totals, queries, out=np.full(totals.shape, np.nan), where=queries > 0)
            found.append(dict(zip(names, means, strict=True)))
        return found


def _confusion(labels: list[Any], label: Any, prediction: Any, counts: Any) -> Confusion | None:
    if len(labels) > _MOST_IN_CONFUSION:
        return None
    matrix = np.zeros((len(labels), len(labels)), dtype=np.int64)
    np.add.at(matrix, (label, prediction), counts)
    return Confusion(labels, matrix.tolist())


def _calibration(cells: Any, counts: Any, bins: int) -> list[CalibrationBin]:
    found = calibration_bins(cells, counts, bins)
    return [CalibrationBin(at / bins, (at + 1) / bins, *each) for at, each in enumerate(found)]


def _as_number(value: Any) -> Any:
    return int(value) if isinstance(value, bool) else value
