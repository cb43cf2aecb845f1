"""``lum drift REFERENCE CURRENT --column embedding``: whether two samples come from the same distribution."""

from __future__ import annotations

import argparse
from collections.abc import Iterable
from functools import partial
from typing import Any

from luminosity.cli.common.exits import fail_of
from luminosity.cli.common.mlflow_run import add_mlflow_option
from luminosity.cli.common.options import add_command, at_least, flag, fraction, whole_number
from luminosity.cli.common.table_options import add_table_options
from luminosity.drift.contract import DriftOption
from luminosity.drift.registry import DEFAULT_TEST, TESTS, options_by_name
from luminosity.engine.process import check_address_space
from luminosity.errors import LuminosityError

__all__ = ["add_to"]

_METAVARS = {"text": "TEXT", "number": "X", "numbers": "X,...", "whole number": "N"}
_DESCRIPTION = """\
Test whether embeddings, or the columns of a table, have drifted: whether CURRENT
comes from the same distribution as REFERENCE. Each is one or many files of a table
(Parquet, JSON lines, CSV, TSV, Arrow) or of NumPy (.npy).

Exit codes: 0 no drift, 3 drift, 4 too few rows to tell, 1 error, 2 wrong usage.
"""
_EPILOG = """\
examples:
  lum drift january.parquet february.parquet --column embedding
  lum drift 'train/*.parquet' 'live/*.parquet' --column age,income
  lum drift old.npy new.npy --rows 5000
                        compare 5,000 random rows of each, to be faster
  lum drift old.parquet new.parquet --report drift.html
                        show what drifted: charts, and the rows that differ most
  lum drift ref.parquet today.parquet --history drift.sqlite --report d.html
                        keep the results, and chart them over time
  lum drift january.parquet february.parquet --by language
                        one test for each language; one that is gone is drift
  lum drift january.parquet february.parquet --test columns
                        test each column: numbers, categories, missing values
  lum drift old.npy new.npy --json | jq .p_value
"""


def add_to(commands: Any) -> None:
    """Add the subcommand ``drift`` to the parser of ``lum``."""
    parser = add_command(commands, "drift", "test whether embeddings or columns have drifted", _DESCRIPTION, _EPILOG)
    parser.add_argument(
        "reference", metavar="REFERENCE", help="the sample to compare with: a file, a folder or a quoted pattern"
    )
    parser.add_argument("current", metavar="CURRENT", help="the sample to test: a file, a folder or a quoted pattern")
    parser.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="C,...",
        help="the column of vectors to compare, or columns of numbers: A,B (default: the only column of vectors; with "
        "--test columns, all columns)",
    )
    add_table_options(parser)
    parser.add_argument(
        "--by",
        metavar="COLUMN",
        help="one test for each value of this column; a value that only one sample has is drift",
    )
    parser.add_argument(
        "--rows", type=partial(at_least, 2), metavar="N", help="compare only N random rows of each sample (or value)"
    )
    parser.add_argument(
        "--skip-missing", action="store_true", help="leave out rows with null, NaN or infinity (default: an error)"
    )
    _add_test_options(parser)
    parser.add_argument("--json", action="store_true", help="print the full result as JSON instead of one line")
    parser.add_argument("--report", metavar="FILE", help="write an HTML report; it loads nothing from the network")
    parser.add_argument("--history", metavar="FILE", help="append the result to this SQLite file")
    add_mlflow_option(parser)
    parser.set_defaults(command=_drift)


def _add_test_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--test",
        choices=tuple(TESTS),
        default=DEFAULT_TEST,
        help="; ".join(f"{name} {test.summary}" for name, test in TESTS.items()) + f" (default: {DEFAULT_TEST})",
    )
    for name, by_test in options_by_name().items():
        option = next(iter(by_test.values()))
        default = f" (default: {option.default})" if option.default else ""
        parser.add_argument(
            flag(name),
            type=partial(_text, by_test.values()),
            metavar=f"{{{','.join(option.choices)}}}" if option.choices else _METAVARS[option.kind],
            help=f"--test {' and '.join(by_test)}: {option.meaning}{default}",
        )
    parser.add_argument(
        "--level",
        type=partial(fraction, example="0.05"),
        default=0.05,
        metavar="A",
        help="false-alarm rate: how often drift is reported when there is none (default: 0.05)",
    )
    parser.add_argument(
        "--seed", type=whole_number, default=0, metavar="N", help="seed of everything that is random (default: 0)"
    )


def _drift(parsed: argparse.Namespace) -> int:
    check_address_space()  # JAX ends the process if it finds too little
    try:
        # This imports Beam and JAX, which takes seconds: not for --help.
        from luminosity.cli.drift.job import run

        return run(parsed)
    except LuminosityError as error:
        return fail_of("drift", error)


def _text(options: Iterable[DriftOption], text: str) -> str:
    """Return the value of an option as it is, if a test takes it: which test is not known yet."""
    reasons: list[str] = []
    for option in options:
        try:
            option.parsed(text)
        except ValueError as error:
            reasons.append(str(error))
        else:
            return text
    raise argparse.ArgumentTypeError(f"{text!r}: {reasons[0]}")
