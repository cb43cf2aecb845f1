"""``Evaluate``, ``Describe`` and ``ScoreTexts`` as YAML takes them: their results are rows or columns."""

from __future__ import annotations

from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import apache_beam as beam
from apache_beam.typehints.row_type import RowTypeConstraint

from luminosity import ReadTable
from luminosity.beam_yaml.arguments import (
    Fields,
    OnTable,
    as_table,
    check_keys,
    current_and_reference,
    fields_of_table,
    handler_of,
    needs_columns,
    remember_fields,
    takes_arguments_of,
)
from luminosity.errors import InvalidArgument
from luminosity.evaluation import Describe, Description, Evaluate, Evaluation, Metric
from luminosity.judging import Judge, ScoreTexts

__all__ = ["describe", "evaluate", "score_texts"]

_JUDGE_KEYS = ("model", "rubric", "scale", "question", "pairs")

_Number = float | None
_Text = str | None
_METRIC_FIELDS: Mapping[str, Any] = {
    "by": _Text,
    "slice": _Text,
    "model": str,
    "metric": str,
    "value": _Number,
    "low": _Number,
    "high": _Number,
    "rows": int,
    "reason": _Text,
}
_COLUMN_FIELDS: Mapping[str, Any] = {
    "column": str,
    "kind": _Text,
    "rows": int,
    "missing": int,
    "infinite": int,
    "distinct": int | None,
    "mean": _Number,
    "deviation": _Number,
    "least": _Number,
    "median": _Number,
    "largest": _Number,
    "most_frequent": _Text,
}
_CHANGE_FIELDS: Mapping[str, Any] = {"distance": float, "p_value": _Number, "change": str}


@takes_arguments_of(Evaluate)
def evaluate(arguments: dict[str, Any]) -> beam.PTransform[Any, Any]:
    """Evaluates predictions against labels. Its output has a row for each metric, of the table and of each slice."""
    named = ("label", "prediction", "score", "prediction_b", "score_b", "query", "preference")
    columns = [*(arguments[name] for name in named), *arguments["measures"], *arguments["measures_b"]]
    columns += [each for by in arguments["slices"] for each in ([by] if isinstance(by, str) else by)]
    roots = [each.partition(".")[0] for each in columns if each is not None]
    return OnTable(
        Evaluate(**arguments),
        lambda found, _: found | "Metrics" >> beam.FlatMap(_metric_rows).with_output_types(_row_type(_METRIC_FIELDS)),
        needs_columns(*dict.fromkeys(roots)),
    )


@takes_arguments_of(ScoreTexts)
def score_texts(arguments: dict[str, Any]) -> beam.PTransform[Any, Any]:
    """Adds scores of texts, which Evaluate takes as measures.

    Args:
        embedder: a model that makes vectors of texts.
        judge: a mapping with model and rubric, and optionally scale, question and pairs.
    """
    judge, embedder = arguments["judge"], arguments["embedder"]
    if judge is not None:
        if not isinstance(judge, Mapping) or not {"model", "rubric"} <= set(judge):
            raise InvalidArgument(f"found judge: {judge!r}, expected a mapping with model: and rubric:")
        check_keys(judge, _JUDGE_KEYS, "judge")
        others = {name: value for name, value in judge.items() if name != "model"}
        arguments["judge"] = Judge(handler_of(judge["model"]), **others)
    arguments["embedder"] = None if embedder is None else handler_of(embedder)
    scores = ScoreTexts(**arguments)
    named = [arguments[name] for name in ("label", "prediction", "prediction_b") if arguments[name] is not None]
    named += [judge["question"]] if judge and judge.get("question") else []

    def note_columns(table: Any, fields: Fields | None) -> Any:
        return remember_fields(table, None if fields is None else {**fields, **scores.new_columns})

    return OnTable(scores, note_columns, needs_columns(*(each.partition(".")[0] for each in named)))


@takes_arguments_of(Describe)
def describe(arguments: dict[str, Any]) -> beam.PTransform[Any, Any]:
    """Describes the columns of a table. Its output has a row for each column.

    Args:
        reference: files of a table to compare with. Leave it out if the reference is an input named ``reference``.
    """
    columns = arguments["columns"]
    if isinstance(columns, str):
        raise InvalidArgument(f"found columns: {columns}, expected a list", fix=f"write columns: [{columns}]")
    return _Describe(arguments["reference"], columns)


class _Describe(beam.PTransform[Any, Any]):
    """``Describe`` with the reference as a path, or as the input named ``reference``."""

    def __init__(self, reference: str | None, columns: Sequence[str] | None) -> None:
        super().__init__()
        self._reference = reference
        self._columns = columns

    def expand(self, input_or_inputs: Any) -> Any:
        table, reference = input_or_inputs, None
        if self._reference is not None or isinstance(input_or_inputs, Mapping):
            table, reference = current_and_reference(input_or_inputs, self._reference)
        if isinstance(reference, str):
            read = ReadTable(reference)
            reference = remember_fields(
                table.pipeline | "Reference" >> read, {field.name: field.type for field in read.schema}
            )
        table = as_table(table)
        needed = needs_columns(*(name.partition(".")[0] for name in self._columns or ()))
        for each in (table, reference):
            if each is not None and (known := fields_of_table(each)) is not None:
                needed(known)
        fields = {**_COLUMN_FIELDS, **({} if reference is None else _CHANGE_FIELDS)}
        described = table | Describe(self._columns, reference)
        return described | "Columns" >> beam.FlatMap(_column_rows).with_output_types(_row_type(fields))


def _row_type(fields: Mapping[str, Any]) -> Any:
    return RowTypeConstraint.from_fields(list(fields.items()))


def _metric_rows(found: Evaluation) -> Iterator[beam.Row]:
    """Yield a row for each metric of each model, of the whole table and of each slice."""
    parts: list[tuple[str | None, Any, Evaluation]] = [(None, None, found)]
    parts += [(by, value, each) for by, values in found.slices.items() for value, each in values.items()]
    for by, value, each in parts:
        models = {"first": each.metrics, "second": each.metrics_b, "second minus first": each.differences}
        models["win rate of the second"] = {name: outcome.win_rate for name, outcome in each.outcomes.items()}
        for model, metrics in models.items():
            for name, metric in metrics.items():
                yield _metric_row(by, _shown(value), model, name, metric, each.rows)


def _metric_row(by: str | None, value: str | None, model: str, name: str, metric: Metric, rows: int) -> beam.Row:
    numbers = {"value": metric.value, "low": metric.low, "high": metric.high}
    return beam.Row(by=by, slice=value, model=model, metric=name, **numbers, rows=rows, reason=metric.reason or None)


def _column_rows(found: Description) -> Iterator[beam.Row]:
    """Yield a row for each column. With a reference, the largest change comes first; a column may be gone."""
    changes = {change.name: change for change in found.changes}
    for name in changes if found.reference is not None else found.columns:
        column = found.columns.get(name)
        row: dict[str, Any] = {
            "column": name,
            "kind": None if column is None else column.kind,
            "rows": found.rows,
            "missing": found.rows if column is None else column.nulls + column.nan,
            "infinite": 0 if column is None else column.infinite,
            "distinct": None if column is None else column.distinct,
            "mean": None if column is None else column.mean,
            "deviation": None if column is None else column.deviation,
        }
        quantiles = {} if column is None else column.quantiles
        row |= {of: quantiles.get(share) for of, share in (("least", 0.0), ("median", 0.5), ("largest", 1.0))}
        row["most_frequent"] = None if column is None or not column.top else _shown(column.top[0][0])
        if found.reference is not None:
            change = changes[name]
            row |= {"distance": change.distance, "p_value": change.p_value, "change": change.said}
        yield beam.Row(**row)


def _shown(value: Any) -> str | None:
    """Return the value of a slice as a text: those of several columns with commas."""
    if isinstance(value, tuple):
        return ", ".join(str(each) for each in value)
    return None if value is None else str(value)
