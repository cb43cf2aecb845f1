"""The result of an evaluation, and its HTML page."""

from __future__ import annotations

import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from luminosity.errors import EvaluationError
from luminosity.evaluation.charts import calibration_chart, confusion_chart, curve_chart, interval_bar
from luminosity.evaluation.result import CalibrationBin, ClassMetrics, Confusion, Curve, Metric, Outcomes, Task
from luminosity.report_page.document import document, headline, section, settings_section, table, write_page
from luminosity.report_page.markup import MISSING, Markup, element, joined, plain

__all__ = ["Evaluation"]

_SAID = {
    "accuracy": "share of right predictions",
    "balanced_accuracy": "mean recall of all classes",
    "precision": "of the predictions of the positive class, the share that is right",
    "recall": "of the rows of the positive class, the share that is found",
    "f1": "harmonic mean of precision and recall",
    "auc": "chance that a row of the positive class has a higher score than another row",
    "average_precision": "area under the precision-recall curve",
    "brier": "mean squared error of the score",
    "log_loss": "mean of minus the logarithm of the score of what is true",
    "ece": "mean distance of scores and shares of events, over bins",
    "mae": "mean absolute error",
    "rmse": "root of the mean squared error",
    "mean_error": "prediction minus label, on average",
    "r2": "share of the labels' variance that is explained",
    "ndcg": "discounted gain of the ranking, compared with the best",
    "kappa": "Cohen's kappa: agreement beyond chance",
    "kappa_quadratic": "Cohen's kappa, in which far apart counts more than nearly right",
    "exact_match": "share of texts that are the expected ones",
    "normalised_match": "the same, but for case, white space and punctuation",
    "similarity": "share of characters that both texts have in the same order",
    "rouge1": "F1 of the words that both texts have",
    "rouge2": "F1 of the pairs of words that both texts have",
    "rougeL": "F1 of the words that both texts have in the same order",
}
_MAIN = ("accuracy", "f1", "auc", "mae", "rmse", "r2", "ndcg", "recall")  # with those at k
_TO = "\N{NO-BREAK SPACE}to\N{NO-BREAK SPACE}"
_MINOR_TEXT_METRICS = ("exact_match", "rouge1", "rouge2")  # others say nearly the same
_MOST_SLICES = 100  # rows of the table of a slice: the worst
_MOST_CLASSES = 40  # of the chart of the confusion matrix


@dataclass(frozen=True)
class Evaluation:
    """The metrics of a table, or of one slice of it.

    ``metrics`` maps names to metrics. Which names are there depends on ``task`` and on the columns. ``metrics_b`` are
    those of the second model, and ``differences`` the second model's minus the first's, with the interval of the
    difference on the same rows. ``slices`` maps a column, or columns joined by commas, to its values and their
    evaluations; ``rows`` were evaluated, ``skipped`` had missing values. ``outcomes`` say, for texts of two models, in
    how many rows each of them is better.
    """

    task: Task | None
    rows: int
    skipped: int = 0
    metrics: Mapping[str, Metric] = field(default_factory=dict[str, Metric])
    metrics_b: Mapping[str, Metric] = field(default_factory=dict[str, Metric])
    differences: Mapping[str, Metric] = field(default_factory=dict[str, Metric])
    classes: Sequence[ClassMetrics] = ()
    confusion: Confusion | None = None
    calibration: Sequence[CalibrationBin] = ()
    positive: Any = None
    curves: Mapping[str, Curve] = field(default_factory=dict[str, Curve])
    slices: Mapping[str, Mapping[Any, Evaluation]] = field(default_factory=dict[str, Mapping[Any, Any]])
    outcomes: Mapping[str, Outcomes] = field(default_factory=dict[str, Outcomes])
    notes: Sequence[str] = ()

    def __getitem__(self, name: str) -> float:
        """Return the value of a metric. Raises an error if it is not defined or not there."""
        metric = self.metric(name)
        if metric.value is None:
            raise EvaluationError(f"{name} is not defined: {metric.reason}")
        return metric.value

    def __str__(self) -> str:
        parts = [f"{name} {metric}" for name in self.main_metrics if (metric := self.metrics[name]).value is not None]
        undefined = (f"{name} {metric}" for name, metric in self.metrics.items())
        return ", ".join(parts) or next(undefined, "nothing to evaluate")

    @property
    def main_metrics(self) -> list[str]:
        """The names of the metrics that summarise the others."""
        if self.task == "texts":
            return [name for name in self.metrics if name not in _MINOR_TEXT_METRICS]
        is_ranking, has_f1 = self.task == "ranking", "f1" in self.metrics
        found = [name for name in self.metrics if name in _MAIN or (is_ranking and name.partition("@")[0] in _MAIN)]
        found = [name for name in found if name != "recall"]
        if not has_f1 and "f1_macro" in self.metrics:
            found.insert(1, "f1_macro")
        return found

    def metric(self, name: str) -> Metric:
        """Return a metric by name. Raises an error that lists the names if it is not there."""
        if name not in self.metrics:
            from luminosity._shared.text import did_you_mean

            raise EvaluationError(
                f"found no metric {name!r}, expected one of {', '.join(self.metrics)}",
                fix=did_you_mean(name, list(self.metrics)) or None,
            )
        return self.metrics[name]

    def as_dict(self) -> dict[str, Any]:
        """Return everything as plain dictionaries and lists, for JSON."""
        found: dict[str, Any] = {"task": self.task, "rows": self.rows, "skipped": self.skipped}
        if self.positive is not None:
            found["positive"] = self.positive
        for name in ("metrics", "metrics_b", "differences"):
            if getattr(self, name):
                found[name] = {key: metric.as_dict() for key, metric in getattr(self, name).items()}
        if self.outcomes:
            found["outcomes"] = {name: each.as_dict() for name, each in self.outcomes.items()}
        if self.classes:
            found["classes"] = [
                {"label": each.label, "rows": each.rows, "predicted": each.predicted}
                | {name: getattr(each, name).as_dict() for name in ("precision", "recall", "f1")}
                for each in self.classes
            ]
        if self.confusion is not None:
            found["confusion"] = {"labels": list(self.confusion.labels), "counts": [*map(list, self.confusion.counts)]}
        if self.calibration:
            found["calibration"] = [dict(vars(each)) for each in self.calibration]
        if self.slices:
            found["slices"] = {
                by: [{"value": value, **each.as_dict()} for value, each in values.items()]
                for by, values in self.slices.items()
            }
        if self.notes:
            found["notes"] = list(self.notes)
        return found

    def write_report(
        self,
        path: str | os.PathLike[str],
        *,
        title: str = "table",
        settings: Mapping[str, Any] | None = None,
        failed: Sequence[str] | None = None,
    ) -> None:
        """Write an HTML page with charts, which loads nothing from the network.

        ``title`` is the name of the table, ``settings`` are listed at the end, and ``failed`` are the requirements that
        were not met (None: there were none to meet).
        """
        write_page(path, _page(self, title, settings or {}, failed), EvaluationError)


def _page(evaluation: Evaluation, title: str, settings: Mapping[str, Any], failed: Sequence[str] | None) -> str:
    """Return the page as HTML."""
    sections = [_headline(evaluation, title, failed), _metrics(evaluation)]
    if evaluation.differences:
        sections.append(_comparison(evaluation))
    if evaluation.outcomes:
        sections.append(_outcomes(evaluation.outcomes))
    if evaluation.confusion is not None and len(evaluation.confusion.labels) <= _MOST_CLASSES:
        said = "Rows by label and prediction. Blue cells are right. A darker cell has a larger share of its row."
        sections.append(section("Confusion matrix", said, confusion_chart(evaluation.confusion)))
    if evaluation.classes:
        sections.append(_classes(evaluation))
    if evaluation.calibration or evaluation.curves:
        sections.append(_scores(evaluation))
    sections += [_slices(by, values, evaluation) for by, values in evaluation.slices.items()]
    sections.append(
        settings_section(settings, ("luminosity", "numpy", "pyarrow"), "values of the data, as classes and slices")
    )
    return document(f"Evaluation of {title}", sections)


def _headline(evaluation: Evaluation, title: str, failed: Sequence[str] | None) -> Markup:
    main = evaluation.main_metrics[:4]
    best = main[0] if main else next(iter(evaluation.metrics), "")
    verdict = f"{_name(best)}: {_value(evaluation.metrics[best])}" if best else "Nothing to evaluate"
    kind = "unknown" if failed is None else "drifted" if failed else "steady"
    if failed:
        verdict = "Below the requirements"
    said = "; ".join(failed) + "." if failed else "All requirements are met." if failed is not None else ""
    said = " ".join([said, *(f"{each[0].upper()}{each[1:]}." for each in evaluation.notes)]).strip()
    unit = "queries" if evaluation.task == "ranking" else "rows"
    skipped = f"{evaluation.skipped:,} rows with missing values skipped" if evaluation.skipped else "evaluated"
    facts = [(unit, f"{evaluation.rows:,}", skipped)]
    if evaluation.positive is not None:
        facts.append(("positive class", str(evaluation.positive), "precision, recall and scores are of it"))
    facts += [(_name(name), _value(evaluation.metrics[name]), _interval(evaluation.metrics[name])) for name in main]
    return headline(verdict, kind, title, said, facts)


def _metrics(evaluation: Evaluation) -> Markup:
    rows = [
        (
            name,
            _value(metric),
            _interval(metric) or MISSING,
            _bar(name, metric),
            metric.reason or _meaning(name, evaluation),
        )
        for name, metric in evaluation.metrics.items()
    ]
    heads = ("metric", "value", "interval", "", "meaning")
    said = "Intervals come from a bootstrap: how far the metrics would move with other rows of the same kind."
    return section("Metrics", said, table(heads, rows, ("value",)))


def _meaning(name: str, evaluation: Evaluation) -> str:
    if name in _SAID:
        return _SAID[name].replace("the positive class", f"{evaluation.positive!r}")
    if evaluation.task == "texts":
        return "mean of the column"
    stem, _, suffix = name.rpartition("_")
    if suffix in ("macro", "weighted"):
        return f"mean {stem} of all classes" + (", weighted by their rows" if suffix == "weighted" else "")
    if suffix.startswith("q") and suffix[1:].isdecimal():
        return f"{int(suffix[1:])}% of the rows have a smaller {stem.replace('_', ' ')}"
    stem, _, k = name.partition("@")
    first = f"among the first {k} rows of a query" if k else ""
    return f"share of relevant rows {first}" if stem == "recall" else f"{_SAID.get(stem, '')} {first}".strip()


def _bar(name: str, metric: Metric) -> Markup:
    if metric.value is None or not 0 <= metric.value <= 1 or name.startswith(("error", "absolute", "m", "rmse", "log")):
        return Markup()
    return interval_bar(metric, 0, 1)


def _comparison(evaluation: Evaluation) -> Markup:
    rows: list[tuple[str, ...]] = []
    for name, difference in evaluation.differences.items():
        is_sure = difference.low is not None and difference.high is not None and difference.low * difference.high > 0
        said = "more than chance explains" if is_sure else "may be chance" if difference.value is not None else ""
        first, second = evaluation.metrics[name], evaluation.metrics_b[name]
        rows.append((name, _value(first), _value(second), _value(difference), _interval(difference) or MISSING, said))
    heads = ("metric", "first model", "second model", "difference", "interval of the difference", "")
    text = "Both models on the same rows. If an interval does not contain 0, chance does not explain the difference."
    return section("The second model against the first", text, table(heads, rows, heads[1:4]))


def _outcomes(outcomes: Mapping[str, Outcomes]) -> Markup:
    rows = [
        (
            name,
            *(f"{count:,}" for count in (each.wins, each.ties, each.losses)),
            _value(each.win_rate),
            _interval(each.win_rate) or MISSING,
            interval_bar(each.win_rate, 0, 1, 0.5) if each.win_rate.value is not None else each.win_rate.reason,
        )
        for name, each in outcomes.items()
    ]
    heads = ("metric", "second better", "ties", "first better", "win rate", "interval", "")
    said = "Rows in which each model is better. Win rate: the second model's share, ties count half; dashed: 50%."
    return section("Row by row", said, table(heads, rows, heads[1:5]))


def _classes(evaluation: Evaluation) -> Markup:
    rows = [
        (
            str(each.label),
            *(joined([_value(metric), _between(metric)]) for metric in (each.precision, each.recall, each.f1)),
            f"{each.rows:,}",
            f"{each.predicted:,}",
        )
        for each in evaluation.classes
    ]
    heads = ("class", "precision", "recall", "F1", "rows", "predicted")
    said = "Precision: the share of right predictions of a class. Recall: the share of its rows that is found."
    return section("Classes", said, table(heads, rows, ("rows", "predicted")))


def _scores(evaluation: Evaluation) -> Markup:
    charts: list[Markup] = []
    if evaluation.calibration:
        charts.append(calibration_chart(evaluation.calibration))
    if "roc" in evaluation.curves:
        titles = "ROC curve", "false positive rate", "true positive rate"
        charts.append(curve_chart(evaluation.curves["roc"], *titles, diagonal=True))
    if "precision_recall" in evaluation.curves:
        titles = "Precision-recall curve", "recall", "precision"
        charts.append(curve_chart(evaluation.curves["precision_recall"], *titles, diagonal=False))
    said = "Calibration: on the dashed line, a score of 0.8 is right in 80% of cases. A larger dot has more rows."
    return section("Scores", said, element("div", *charts, class_="charts"))


def _slices(by: str, values: Mapping[Any, Evaluation], whole: Evaluation) -> Markup:
    name = next(iter(whole.main_metrics), next(iter(whole.metrics), ""))
    is_error = name in ("mae", "rmse", "log_loss", "brier", "ece")

    def order(item: tuple[Any, Evaluation]) -> tuple[bool, float]:
        value = item[1].metrics[name].value if name in item[1].metrics else None
        return value is None, (-value if is_error else value) if value is not None else 0.0

    ordered = sorted(values.items(), key=order)
    found = [each.metrics[name] for _, each in ordered if name in each.metrics]
    ends = [end for each in found for end in (each.value, each.low, each.high) if end is not None]
    low, high = (min(ends), max(ends)) if ends else (0.0, 1.0)
    rows: list[Sequence[str]] = []
    for key, each in ordered[:_MOST_SLICES]:
        metric = each.metrics.get(name, Metric(None, reason="not computed"))
        shown = (
            interval_bar(metric, low, high, whole.metrics[name].value) if metric.value is not None else metric.reason
        )
        rows.append((_key(key), f"{each.rows:,}", _value(metric), _interval(metric) or MISSING, shown))
    said = f"{len(values):,} values of {by}, the worst first. The dashed line is the whole table."
    if len(values) > _MOST_SLICES:
        said += f" The {_MOST_SLICES} worst are shown."
    heads = (by, "queries" if whole.task == "ranking" else "rows", name, "interval", "")
    return section(f"By {by}", said, table(heads, rows, heads[1:3]))


def _key(key: Any) -> str:
    return ", ".join(map(_key, key)) if isinstance(key, tuple) else "null" if key is None else str(key)


def _name(name: str) -> str:
    return {
        "auc": "AUC",
        "f1": "F1",
        "mae": "MAE",
        "rmse": "RMSE",
        "r2": "R²",
        "ndcg": "nDCG",
        "rougeL": "ROUGE-L",
    }.get(name, name.replace("_", " ").capitalize().replace("F1", "F1").replace("Ndcg", "nDCG"))


def _value(metric: Metric) -> str:
    return MISSING if metric.value is None else plain(metric.value, 4)


def _interval(metric: Metric) -> str:
    return "" if metric.low is None or metric.high is None else f"{plain(metric.low)}{_TO}{plain(metric.high)}"


def _between(metric: Metric) -> Markup:
    return joined([" ", element("small", f"({_interval(metric)})")]) if metric.low is not None else Markup()
