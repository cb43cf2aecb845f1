"""What an evaluation returns: metrics with intervals, or the reason why a metric is not defined."""

from __future__ import annotations

import importlib
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any, Literal

from luminosity.errors import EvaluationError

__all__ = ["CalibrationBin", "ClassMetrics", "Confusion", "Curve", "Evaluation", "Metric", "Task"]

Task = Literal["classes", "numbers", "ranking"]

_MAIN = ("accuracy", "f1", "auc", "mae", "rmse", "r2", "ndcg", "recall")  # with those at k


@dataclass(frozen=True)
class Metric:
    """A metric and its confidence interval.

    ``value`` is None if the metric is not defined; ``reason`` says why. ``low`` and ``high`` are None without an
    interval.
    """

    value: float | None
    low: float | None = None
    high: float | None = None
    reason: str = ""

    def __str__(self) -> str:
        if self.value is None:
            return f"not defined ({self.reason})"
        interval = f" ({self.low:.4g} to {self.high:.4g})" if self.low is not None else ""
        return f"{self.value:.4g}{interval}"

    def as_dict(self) -> dict[str, Any]:
        """Return the fields that are there."""
        found = {"value": self.value, "low": self.low, "high": self.high, "reason": self.reason}
        return {name: value for name, value in found.items() if name == "value" or value not in (None, "")}


@dataclass(frozen=True)
class ClassMetrics:
    """The metrics of one class. ``rows`` have it as their label, ``predicted`` as their prediction."""

    label: Any
    precision: Metric
    recall: Metric
    f1: Metric
    rows: int
    predicted: int


@dataclass(frozen=True)
class Confusion:
    """The confusion matrix: ``counts[i][j]`` rows have the label ``labels[i]`` and the prediction ``labels[j]``."""

    labels: Sequence[Any]
    counts: Sequence[Sequence[int]]


@dataclass(frozen=True)
class CalibrationBin:
    """The rows whose score lies between ``low`` and ``high``: their mean score, and the share of events."""

    low: float
    high: float
    rows: int
    mean_score: float | None
    share: float | None


@dataclass(frozen=True)
class Curve:
    """Points of a curve for the report, at most some hundreds."""

    x: Sequence[float]
    y: Sequence[float]


@dataclass(frozen=True)
class Evaluation:
    """The metrics of a table, or of one slice of it.

    ``metrics`` maps names to metrics. Which names are there depends on ``task`` and on the columns. ``metrics_b`` are
    those of the second model, and ``differences`` the second model's minus the first's, with the interval of the
    difference on the same rows. ``slices`` maps a column, or columns joined by commas, to its values and their
    evaluations; ``rows`` were evaluated, ``skipped`` had missing values.
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
        page = importlib.import_module("luminosity.evaluation.report.evaluation_page")
        page.write(path, self, title, settings or {}, failed)
