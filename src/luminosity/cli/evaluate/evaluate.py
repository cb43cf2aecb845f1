"""``lum evaluate TABLE --label LABEL --prediction PREDICTION``: the metrics of predictions, with intervals.

The evaluation itself is ``luminosity.evaluation.evaluate``.
"""

from __future__ import annotations

import argparse
import time
from collections.abc import Iterator
from functools import partial
from typing import TYPE_CHECKING, Any

from luminosity._shared.text import printable
from luminosity.cli.common.exits import NOT_MET, fail_of, print_ignoring_closed_pipe
from luminosity.cli.common.mlflow_run import MlflowRun, add_mlflow_option
from luminosity.cli.common.options import add_command, count, fraction, number, whole_number
from luminosity.cli.common.output import ProgressLine, check_report, json_text, tell_who_reads
from luminosity.cli.common.table_options import TableReader, add_table_options, csv_arguments
from luminosity.cli.evaluate.scored import SHOWN_OF_MODELS, add_model_options, as_wrong_options, check_metrics, scored
from luminosity.errors import LuminosityError, OptionError

if TYPE_CHECKING:  # these import Beam, which takes a second: not for --help
    from luminosity.evaluation.evaluation import Evaluation
    from luminosity.evaluation.settings import Settings
    from luminosity.io.read_table import ReadTable

__all__ = ["add_to"]

_DESCRIPTION = """\
Compare predictions with labels. Predictions are classes, numbers, rankings or
texts.
TABLE is one or many files (Parquet, JSON lines, CSV, TSV, Arrow). Columns inside
a column are written with a dot: mood.label.

Exit codes: 0 done, 3 a requirement is not met, 1 error, 2 wrong usage.
"""
_EPILOG = """\
examples:
  lum evaluate test.parquet --label label --prediction prediction
  lum evaluate test.parquet --label spam --prediction guess --score p_spam
                        with a score: AUC, average precision, calibration
  lum evaluate out.parquet --label truth --prediction mood.label \\
      --score mood.score --score-of prediction
                        what `lum enrich --classify` has added
  lum evaluate test.parquet --label y --prediction p --slice country
                        also for each country, the worst first
  lum evaluate test.csv --label y --prediction p --at-least accuracy=0.9
                        exit code 3 if the accuracy is below 0.9
  lum evaluate prices.csv --label price --prediction guess --at-most mae=10
  lum evaluate test.parquet --label y --prediction old --prediction-b new
                        compare two models on the same rows
  lum evaluate hits.parquet --label relevant --score score --query question
                        recall and nDCG of rankings
  lum evaluate out.parquet --task texts --label expected --prediction answer \
      --prediction-b other
                        matches, similarity and ROUGE of the texts of two prompts
  lum evaluate out.parquet --task texts --label expected --prediction answer \
      --judge llama --server http://localhost:8000 --rubric @rubric.txt
                        the scores of a judge, too
  lum evaluate test.parquet --label y --prediction p --report quality.html
"""
_MOST_SLICES = 50  # lines of values: the worst come first
_ERRORS = ("mae", "rmse", "mean_error")  # better if lower


def add_to(commands: Any) -> None:
    """Add the subcommand ``evaluate`` to the parser of ``lum``."""
    parser = add_command(commands, "evaluate", "compare predictions with labels", _DESCRIPTION, _EPILOG)
    parser.add_argument("table", metavar="TABLE", help="the table: a file, a folder or a quoted pattern")
    parser.add_argument("--label", required=True, metavar="COLUMN", help="the column of true values")
    parser.add_argument("--prediction", metavar="COLUMN", help="the column of predictions")
    parser.add_argument("--score", metavar="COLUMN", help="scores, for AUC and calibration, or to rank by")
    parser.add_argument("--prediction-b", metavar="COLUMN", help="the predictions of a second model to compare")
    parser.add_argument("--score-b", metavar="COLUMN", help="the scores of the second model")
    parser.add_argument("--query", metavar="COLUMN", help="evaluate rankings: the query that a row belongs to")
    parser.add_argument(
        "--slice",
        action="append",
        default=[],
        metavar="C,...",
        help="evaluate also for each value of this column; A,B combines two; may be repeated",
    )
    parser.add_argument(
        "--task",
        choices=("classes", "numbers", "ranking", "texts"),
        help="what predictions are (default: by the types of the columns, never texts)",
    )
    for name, which in (("--measure", ""), ("--measure-b", " of the second texts")):
        parser.add_argument(
            name,
            action="append",
            default=[],
            metavar="COLUMN",
            help=f"for texts: numbers{which} to average, such as the scores of a judge; may be repeated",
        )
    parser.add_argument("--preference", metavar="COLUMN", help="for texts: above 0 where the second is better")
    parser.add_argument(
        "--positive", metavar="CLASS", help="the class that scores are of (default: of two classes, the last)"
    )
    parser.add_argument(
        "--score-of",
        choices=("positive", "prediction"),
        default="positive",
        help="scores are those of the positive class, or of the predicted one (default: positive)",
    )
    add_table_options(parser)
    parser.add_argument(
        "--skip-missing", action="store_true", help="leave out rows with null, NaN or infinity (default: an error)"
    )
    add_model_options(parser)
    _add_numbers(parser)
    for name, worse in (("--at-least", "lower"), ("--at-most", "higher")):
        parser.add_argument(
            name,
            action="append",
            default=[],
            type=_requirement,
            metavar="METRIC=X",
            help=f"exit with 3 if this metric is {worse}, or not defined; may be repeated",
        )
    parser.add_argument("--each-slice", action="store_true", help="requirements hold for every slice, too")
    parser.add_argument("--json", action="store_true", help="print the full result as JSON instead of lines")
    parser.add_argument("--report", metavar="FILE", help="write an HTML report; it loads nothing from the network")
    add_mlflow_option(parser)
    parser.set_defaults(command=_evaluate)


def _add_numbers(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--k", type=_counts, default=(1, 5, 10), metavar="N,...", help="for rankings: recall@N (default: 1,5,10)"
    )
    parser.add_argument("--bins", type=count, default=10, metavar="N", help="bins of the calibration (default: 10)")
    parser.add_argument(
        "--resamples",
        type=whole_number,
        default=500,
        metavar="N",
        help="replicates of the bootstrap; 0 for no intervals (default: 500)",
    )
    parser.add_argument(
        "--confidence",
        type=partial(fraction, example="0.95"),
        default=0.95,
        metavar="C",
        help="confidence of intervals (default: 0.95)",
    )
    parser.add_argument("--seed", type=whole_number, default=0, metavar="N", help="seed of the bootstrap (default: 0)")


def _evaluate(parsed: argparse.Namespace) -> int:
    try:
        return _run(parsed)
    except LuminosityError as error:
        return fail_of("evaluate", error)


def _requirement(text: str) -> tuple[str, float]:
    """Return the name of a metric and its limit.

    >>> _requirement("accuracy=0.9")
    ('accuracy', 0.9)
    """
    name, separator, value = text.partition("=")
    limit = number(value)
    if not (name.strip() and separator) or limit != limit:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a metric and a number, such as accuracy=0.9")
    return name.strip(), limit


def _counts(text: str) -> tuple[int, ...]:
    return tuple(count(part) for part in text.split(","))


def _run(parsed: argparse.Namespace) -> int:
    from importlib.metadata import version

    from luminosity.evaluation.columns import roots_of
    from luminosity.evaluation.evaluate_table import check_table, evaluate_batches
    from luminosity.io.read_table import ReadTable

    began = time.monotonic()
    with as_wrong_options():
        settings = _settings(parsed)
    check_report(parsed.report)
    mlflow = MlflowRun("evaluate", parsed.mlflow)
    reader = TableReader("evaluate", parsed.dead_letters)
    with reader, scored(parsed, settings) as (table, settings), ProgressLine() as progress:
        (csv,) = csv_arguments(parsed, table) if table == parsed.table else ({},)
        schema = ReadTable(table, **csv).schema
        with as_wrong_options():
            check_table(schema, settings)
        columns = roots_of(settings.columns, schema.names)
        done = progress.rows(f"reading {parsed.table}")
        found = evaluate_batches(_read(reader, reader.open(table, columns, csv), done), settings)
        failed = _failed(parsed, found)
        has_requirements = bool(parsed.at_least or parsed.at_most)
        if parsed.report:
            found.write_report(
                parsed.report,
                title=parsed.table,
                settings=_described(parsed, settings),
                failed=failed if has_requirements else None,
            )
    if parsed.report:
        tell_who_reads("evaluate", parsed.report, "values")
    seconds = time.monotonic() - began
    verdict = {"passed": not failed, "failed": failed} if has_requirements else {}
    described = _described(parsed, settings)
    about = {"settings": described, "versions": {"luminosity": version("luminosity")}, **reader.as_dict()}
    result = {**verdict, **found.as_dict(), **about, "seconds": round(seconds, 3)}
    if parsed.json:
        print_ignoring_closed_pipe(json_text(result))
    else:
        print_ignoring_closed_pipe("\n".join(_lines(parsed, found, failed, has_requirements, seconds)))
    given = {"table": parsed.table, **described}
    return mlflow.log(parsed.table, _numbers(found), given, result, parsed.report, NOT_MET if failed else 0)


def _numbers(found: Evaluation) -> dict[str, Any]:
    """Return the metrics of both models with their intervals, and those of slices, for MLflow."""
    numbers: dict[str, Any] = {"rows": found.rows, "skipped": found.skipped}
    for of, metrics in (("", found.metrics), ("_b", found.metrics_b), ("_difference", found.differences)):
        for name, metric in metrics.items():
            bounds = {"": metric.value, "_low": metric.low, "_high": metric.high}
            numbers |= {f"{name}{of}{bound}": value for bound, value in bounds.items()}
    for by, values in found.slices.items():
        for key, each in values.items():
            numbers |= {f"{by}={_key(key)}/{name}": metric.value for name, metric in each.metrics.items()}
    return numbers


def _settings(parsed: argparse.Namespace) -> Settings:
    from luminosity.evaluation.settings import Settings

    if not parsed.table.strip():
        raise OptionError("TABLE is empty, expected a file, a folder or a pattern; perhaps a shell variable is not set")
    if parsed.prediction is None and parsed.score is None:
        raise OptionError("found neither --prediction nor --score, expected one of them", fix="add --prediction COLUMN")
    if parsed.each_slice and not (parsed.slice and (parsed.at_least or parsed.at_most)):
        raise OptionError("found --each-slice, expected --slice and --at-least or --at-most with it")
    names = ("label", "prediction", "score", "prediction_b", "score_b", "query", "task", "positive", "score_of")
    names += ("preference",)
    numbers = ("k", "bins", "resamples", "confidence", "seed", "skip_missing")
    slices = tuple(tuple(name for name in text.split(",") if name) for text in parsed.slice)
    measures = {"measures": tuple(parsed.measure), "measures_b": tuple(parsed.measure_b)}
    return Settings(slices=slices, **measures, **{name: getattr(parsed, name) for name in (*names, *numbers)})


def _read(reader: TableReader, table: ReadTable, done: Any) -> Iterator[Any]:
    rows = 0
    for _, batch in reader.rows(table):
        yield batch
        rows += batch.num_rows
        done(rows)


def _described(parsed: argparse.Namespace, settings: Settings) -> dict[str, Any]:
    found = {name: value for name, value in vars(settings).items() if value not in (None, (), False)}
    found["slices"] = [",".join(by) for by in settings.slices] or None
    for name in ("most_distinct", "most_slices", *(() if settings.query else ("k",))):
        found.pop(name, None)
    found |= {name: getattr(parsed, name) for name in SHOWN_OF_MODELS}
    return {name.replace("_", " "): value for name, value in found.items() if value is not None}


def _failed(parsed: argparse.Namespace, found: Evaluation) -> list[str]:
    """Return a sentence for each requirement that is not met."""
    from luminosity.evaluation.result import Metric

    check_metrics(parsed, list(found.metrics))
    failed: list[str] = []
    parts: list[tuple[str, Evaluation]] = [("", found)]
    if parsed.each_slice:
        parts += [(f"{by}={_key(key)}: ", each) for by, values in found.slices.items() for key, each in values.items()]
    for name, limit, is_least in [
        *((*each, True) for each in parsed.at_least),
        *((*each, False) for each in parsed.at_most),
    ]:
        for where, each in parts:
            metric = each.metrics.get(name, Metric(None, reason="no rows have it"))
            if metric.value is None:
                failed.append(f"{where}{name} is {metric}")
            elif (metric.value < limit) if is_least else (metric.value > limit):
                failed.append(f"{where}{name} {metric.value:.4g} is {'below' if is_least else 'above'} {limit:g}")
    return failed


def _lines(
    parsed: argparse.Namespace, found: Evaluation, failed: list[str], has_requirements: bool, seconds: float
) -> list[str]:
    """Return the verdict, the second model, and the slices."""
    unit = "queries" if found.task == "ranking" else "rows"
    skipped = f" · {found.skipped:,} rows with missing values skipped" if found.skipped else ""
    verdict = f"not met: {'; '.join(failed)} · " if failed else "met: " if has_requirements else ""
    positive = f" · positive class {found.positive!r}" if found.positive is not None else ""
    if positive and parsed.positive is None:
        positive += " (--positive chooses another)"
    lines = [f"{verdict}{found}{positive} · {found.rows:,} {unit}{skipped} · {seconds:.1f} s"]
    lines += [f"note: {each}" for each in found.notes]
    if found.outcomes:
        lines += _table_of_two(found)
    elif found.differences:
        shown = [name for name in found.main_metrics if name in found.differences]
        lines.append("  second model minus first: " + ", ".join(f"{name} {found.differences[name]}" for name in shown))
    for by, values in found.slices.items():
        lines += _slice_lines(by, values, unit)
    return lines


def _table_of_two(found: Evaluation) -> list[str]:
    """Return the metrics of both models, their difference, and in how many rows each is better, as a table."""
    rows: list[tuple[str, ...]] = [("", "first", "second", "difference", "win", "tie", "loss", "win rate")]
    for name, each in found.outcomes.items():
        metrics = [of[name] for of in (found.metrics, found.metrics_b) if name in of]
        values = [f"{each.value:.4g}" if each.value is not None else "-" for each in metrics] or ["", ""]
        difference = found.differences[name] if metrics else ""
        rows.append((name, *values, str(difference), *map(str, (each.wins, each.ties, each.losses, each.win_rate))))
    widths = [max(map(len, column)) for column in zip(*rows, strict=True)]
    return [
        "  " + "  ".join(text.ljust(width) for text, width in zip(row, widths, strict=True)).rstrip() for row in rows
    ]


def _slice_lines(by: str, values: Any, unit: str) -> list[str]:
    def order(item: tuple[Any, Evaluation]) -> tuple[bool, float]:
        name, metric = next(iter(item[1].metrics.items()))
        worst = metric.value if metric.value is not None else 0.0
        return metric.value is None, -worst if name in _ERRORS else worst

    ordered = sorted(values.items(), key=order)
    width = max(len(_key(key)) for key in values) if values else 0
    lines = [f"by {by}:"]
    lines += [f"  {_key(key):<{width}}  {each} · {each.rows:,} {unit}" for key, each in ordered[:_MOST_SLICES]]
    if len(ordered) > _MOST_SLICES:
        lines.append(f"  and {len(ordered) - _MOST_SLICES:,} more; --json and --report show more")
    return lines


def _key(key: Any) -> str:
    return ", ".join(map(_key, key)) if isinstance(key, tuple) else "null" if key is None else printable(str(key))
