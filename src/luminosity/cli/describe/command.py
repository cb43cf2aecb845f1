"""``lum describe TABLE``: every column of a table in a line, and what changed against a reference."""

from __future__ import annotations

import argparse
from typing import Any

from luminosity.cli.common.exits import FAILED, fail
from luminosity.cli.common.table_options import add_table_options
from luminosity.errors import LuminosityError

__all__ = ["add_to"]

_DESCRIPTION = """\
Describe every column of a table: missing and distinct values, quantiles, most
frequent values, lengths of texts, norms of vectors. TABLE is one or many files
(Parquet, JSON lines, CSV, TSV, Arrow), which are read once. With --reference,
say what changed most.

Exit codes: 0 done, 1 error, 2 wrong usage.
"""
_EPILOG = """\
examples:
  lum describe reviews.parquet
  lum describe 'logs/*.jsonl.gz' --column country,latency
  lum describe today.parquet --reference train.parquet
                        what changed most, with a test for each column
  lum describe reviews.parquet --report reviews.html
                        a histogram of each column
  lum describe reviews.parquet --json | jq '.columns[].name'
"""


def add_to(commands: Any) -> None:
    """Add the subcommand ``describe`` to the parser of ``lum``."""
    parser = commands.add_parser(
        "describe",
        help="describe the columns of a table",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("table", metavar="TABLE", help="the table: a file, a folder or a quoted pattern")
    parser.add_argument("--reference", metavar="TABLE", help="say what changed against this table")
    parser.add_argument(
        "--column", action="append", default=[], metavar="C,...", help="describe only these columns (default: all)"
    )
    add_table_options(parser)
    parser.add_argument("--json", action="store_true", help="print the full result as JSON instead of lines")
    parser.add_argument("--report", metavar="FILE", help="write an HTML report; it loads nothing from the network")
    parser.set_defaults(command=_describe)


def _describe(parsed: argparse.Namespace) -> int:
    try:
        from luminosity.cli.describe.job import run  # imports Beam, which takes a second: not for --help

        return run(parsed)
    except LuminosityError as error:
        return fail("describe", error, FAILED)
