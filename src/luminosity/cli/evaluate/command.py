"""``lum evaluate TABLE --label LABEL --prediction PREDICTION``: the metrics of predictions, with intervals."""

from __future__ import annotations

import argparse
from functools import partial
from typing import Any

from luminosity.cli.common.exits import FAILED, fail
from luminosity.cli.common.options import count, fraction, number, whole_number
from luminosity.cli.common.table_options import add_table_options
from luminosity.errors import LuminosityError

__all__ = ["add_to"]

_DESCRIPTION = """\
Compare predictions with labels. Predictions are classes, numbers or rankings.
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
  lum evaluate test.parquet --label y --prediction p --report quality.html
"""


def add_to(commands: Any) -> None:
    """Add the subcommand ``evaluate`` to the parser of ``lum``."""
    parser = commands.add_parser(
        "evaluate",
        help="compare predictions with labels",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
        choices=("classes", "numbers", "ranking"),
        help="what predictions are (default: by the types of the columns)",
    )
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
    _add_numbers(parser)
    parser.add_argument(
        "--at-least",
        action="append",
        default=[],
        type=_requirement,
        metavar="METRIC=X",
        help="exit with 3 if this metric is lower, or not defined; may be repeated",
    )
    parser.add_argument(
        "--at-most",
        action="append",
        default=[],
        type=_requirement,
        metavar="METRIC=X",
        help="exit with 3 if this metric is higher, or not defined; may be repeated",
    )
    parser.add_argument("--each-slice", action="store_true", help="requirements hold for every slice, too")
    parser.add_argument("--json", action="store_true", help="print the full result as JSON instead of lines")
    parser.add_argument("--report", metavar="FILE", help="write an HTML report; it loads nothing from the network")
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
        from luminosity.cli.evaluate.job import run  # imports Beam, which takes a second: not for --help

        return run(parsed)
    except LuminosityError as error:
        return fail("evaluate", error, FAILED)


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
