"""From merged counts to the evaluation of classes, with or without scores."""

from __future__ import annotations

from collections.abc import Mapping
from typing import Any

import numpy as np

from luminosity._shared.text import list_some
from luminosity.evaluation.bootstrap import Combiner, ModelMetrics
from luminosity.evaluation.distinct_rows import DistinctRows
from luminosity.evaluation.evaluation import Evaluation
from luminosity.evaluation.metrics import (
    PER_CLASS,
    calibration_bins,
    class_counts,
    class_metrics,
    curves,
    kappa_metrics,
    score_cells,
    score_metrics,
)
from luminosity.evaluation.result import CalibrationBin, ClassMetrics, Confusion, Curve, Metric
from luminosity.evaluation.state import EvaluationState, split_groups

__all__ = ["Classes", "sort_key"]

_OF_PROBABILITIES = ("brier", "log_loss", "ece")
_OF_SCORES = ("auc", "average_precision", *_OF_PROBABILITIES)
_REVERSED = 0.4  # an AUC below it is worth a note, if its interval is below 0.5, too
_SHOWN_CLASSES = 10  # in a message
_MOST_IN_CONFUSION = 200  # classes; a larger matrix is left out


def sort_key(key: Any) -> Any:
    """Return what keys of any type are ordered by: None last."""
    parts = key if isinstance(key, tuple) else (key,)
    return [(each is None, isinstance(each, str), "" if each is None else each) for each in parts]


class Classes(Combiner):
    """Evaluates classes, with or without scores."""

    def __init__(self, state: EvaluationState) -> None:
        super().__init__(state.settings)
        values = list(state.classes)
        order = sorted(range(len(values)), key=lambda at: sort_key(values[at]))
        self._are_numbers = state.has_numbers
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
        models = [ModelMetrics() for _ in range(2 if settings.has_second else 1)]
        fields: dict[str, Any] = {}
        if settings.prediction is not None:
            fields |= self._of_predictions(label, predictions, counts, models)
        if settings.score is not None:
            fields |= self._of_scores(label, predictions, values, counts, models)
        found = self.pair(models)
        for name in ("metrics", "metrics_b"):
            if name in found and settings.resamples and "accuracy" in found[name]:
                found[name]["accuracy"] = self.widened(found[name]["accuracy"], int(counts.sum()))
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
        self, label: Any, predictions: list[Any], counts: Any, models: list[ModelMetrics]
    ) -> dict[str, Any]:
        triples = np.stack([label, *predictions])
        is_new = np.r_[True, (triples[:, 1:] != triples[:, :-1]).any(axis=0)]
        starts = np.flatnonzero(is_new)
        of_cell = np.add.reduceat(counts, starts)
        cells = triples[:, starts]
        weights = self.resampler.weights(of_cell)
        fields: dict[str, Any] = {}
        shown = "" if self._positive is None else repr(self._positive)
        for model, prediction in zip(models, cells[1:], strict=False):
            present, compact = np.unique(np.concatenate([cells[0], prediction]), return_inverse=True)
            labels = [self._labels[each] for each in present.tolist()]
            at = labels.index(self._positive) if self._positive in labels else None
            pair = compact[: len(cells[0])], compact[len(cells[0]) :]
            exact = of_cell[None].astype(np.float64)
            summed = class_counts(*pair, exact, len(labels))
            model.exact, per_class = class_metrics(summed, at)
            model.exact |= self._kappas(summed, labels, pair, exact)
            if at is None and self._positive is not None:
                model.exact |= {name: np.array([np.nan]) for name in PER_CLASS}
            model.of_cells = dict(model.exact)
            of_class: dict[str, Any] | None = None
            if weights is not None:
                drawn = class_counts(*pair, weights, len(labels))
                again, of_class = class_metrics(drawn, at)
                again |= self._kappas(drawn, labels, pair, weights)
                model.replicates = {name: again.get(name, np.full(len(weights), np.nan)) for name in model.exact}
            model.reasons = {
                "precision": f"{shown} is never predicted",
                "recall": f"no row has the label {shown}",
                "f1": f"{shown} is neither a label nor a prediction",
                **dict.fromkeys(("kappa", "kappa_quadratic"), "labels and predictions are all of one class"),
            }
            if model is models[0]:
                fields["classes"] = self._per_class(labels, summed, per_class, of_class)
                fields["confusion"] = _confusion(labels, *pair, of_cell)
        return fields

    def _kappas(self, counts: tuple[Any, Any, Any], labels: list[Any], pair: tuple[Any, Any], weights: Any) -> Any:
        """Return Cohen's kappa, and with quadratic weights if the table has more than two classes that are numbers."""
        if not self._are_numbers or len(self._labels) < 3:
            return kappa_metrics(counts, None, None)
        values = np.array(labels, dtype=np.float64)
        return kappa_metrics(counts, values, weights @ (values[pair[0]] - values[pair[1]]) ** 2)

    def _per_class(
        self, labels: list[Any], summed: tuple[Any, Any, Any], exact: dict[str, Any], replicates: dict[str, Any] | None
    ) -> list[ClassMetrics]:
        found: list[ClassMetrics] = []
        for at, label in enumerate(labels):
            rows, predicted = int(summed[1][0, at]), int(summed[2][0, at])
            of_label = {name: exact[name][:, at] for name in PER_CLASS}
            again = {} if replicates is None else {name: replicates[name][:, at] for name in PER_CLASS}
            reasons = {"precision": f"{label!r} is never predicted", "recall": f"no row has the label {label!r}"}
            metrics = self.metrics(ModelMetrics(of_label, again, of_label, reasons))
            if replicates is not None:
                metrics["precision"] = self.widened(metrics["precision"], predicted)
                metrics["recall"] = self.widened(metrics["recall"], rows)
            found.append(ClassMetrics(label, **metrics, rows=rows, predicted=predicted))
        return found

    def _of_scores(
        self, label: Any, predictions: list[Any], values: Any, counts: Any, models: list[ModelMetrics]
    ) -> dict[str, Any]:
        settings = self.settings
        ready = [self._event(label, predictions[at], score) for at, score in enumerate(values.T)]
        fields: dict[str, Any] = {}
        for model, (event, score, reason) in zip(models, ready, strict=False):
            if event is None:
                nothing = {name: np.array([np.nan]) for name in _OF_SCORES}
                model.exact |= nothing
                model.of_cells |= nothing
                model.replicates |= nothing if settings.resamples else {}
                model.reasons = {**model.reasons, **dict.fromkeys(_OF_SCORES, reason)}
                continue
            cells = score_cells(score, event)
            low, high = float(cells.score[0]), float(cells.score[-1])
            are_probabilities = low >= 0 and high <= 1
            found = score_metrics(cells, counts[None], settings.bins, are_probabilities)
            only = self._only(event)
            reasons = {"auc": only, "average_precision": only}
            if not are_probabilities:
                reason = f"scores lie outside 0 to 1: from {low:g} to {high:g}"
                found |= {name: np.array([np.nan]) for name in _OF_PROBABILITIES}
                reasons |= dict.fromkeys(_OF_PROBABILITIES, reason)
            if model is models[0]:
                fields["curves"] = {name: Curve(*points) for name, points in curves(cells, counts).items()}
                if are_probabilities:
                    fields["calibration"] = _calibration(cells, counts, settings.bins)
            model.exact |= found
            model.of_cells |= found
            model.reasons = {**model.reasons, **reasons}
        self._resample_scores(ready, counts, models)
        return fields

    def _resample_scores(self, ready: list[tuple[Any, Any, str]], counts: Any, models: list[ModelMetrics]) -> None:
        """Add replicates: of both models together, if they predict the same event."""
        if not self.settings.resamples:
            return
        together = len(ready) > 1 and all(each[0] is not None for each in ready)
        together = together and np.array_equal(ready[0][0], ready[-1][0])
        for group in [list(range(len(ready)))] if together else [[at] for at in range(len(ready))]:
            event = ready[group[0]][0]
            if event is None:
                continue
            cells, of_cell = self.resampler.scores([ready[at][1] for at in group], event, counts)
            weights = self.resampler.weights(of_cell)
            assert weights is not None, "there are rows"
            nothing = np.full(len(weights), np.nan)
            for at, each in zip(group, cells, strict=True):
                model = models[at]
                arguments = self.settings.bins, bool(np.isfinite(model.exact["brier"][0]))
                again = score_metrics(each, weights, *arguments)
                model.replicates |= {name: again.get(name, nothing) for name in _OF_SCORES}
                model.of_cells |= score_metrics(each, of_cell[None], *arguments)

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
