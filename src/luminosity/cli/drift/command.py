"""``lum drift REFERENCE CURRENT --column embedding``: whether two samples come from one distribution."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from luminosity.cli.advice import as_options
from luminosity.cli.exits import INTERRUPTED, treat_sigterm_as_ctrl_c
from luminosity.errors import LuminosityError

KERNELS = ("rbf", "laplacian", "linear", "polynomial", "aggregate")
_FAILED = 1
_DESCRIPTION = """\
Tell whether embeddings, or other numbers, have drifted: whether CURRENT comes
from the distribution of REFERENCE. Both are files of a table (Parquet, JSON
lines, CSV, Arrow) or of NumPy (.npy), one or many. Exits with 3 on drift, so
that a scheduler can act; 0 otherwise; 1 on errors.
"""
_EPILOG = """\
examples:
  lum drift january.parquet february.parquet --column embedding
  lum drift 'train/*.parquet' 'live/*.parquet' --column age,income
  lum drift old.npy new.npy --rows 5000           a try with a random part
  lum drift old.parquet new.parquet --report drift.html
                        what drifted: drawings, and the rows that differ most
  lum drift ref.parquet today.parquet --history drift.sqlite --report d.html
                        and how it went over time
  lum drift old.npy new.npy --json | jq .p_value
"""
_ARGUMENTS = {"columns= names": "--column names", "or say format= yourself": "or .npy of NumPy"}


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "drift",
        help="tell whether embeddings have drifted",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("reference", metavar="REFERENCE", help="how it was: a file, a folder or a pattern in quotes")
    parser.add_argument("current", metavar="CURRENT", help="how it is, likewise")
    parser.add_argument(
        "--column",
        action="append",
        default=[],
        metavar="C,...",
        help="what to compare: a column of vectors, or columns of numbers: A,B (default: the only column of vectors)",
    )
    parser.add_argument("--rows", type=_rows, metavar="N", help="for a try: so many random rows of each")
    parser.add_argument(
        "--skip-missing", action="store_true", help="leave out rows with null, NaN or infinity (default: an error)"
    )
    _add_test_options(parser)
    parser.add_argument("--json", action="store_true", help="print everything as JSON, in place of the verdict")
    parser.add_argument("--report", metavar="FILE", help="write a page of HTML that needs no network")
    parser.add_argument("--history", metavar="FILE", help="append the result to this file of SQLite")
    parser.set_defaults(command=drift)


def _add_test_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument(
        "--components",
        type=_components,
        metavar="N",
        help="principal components of both together to compare; 0 takes rows as they are (default: 50 where wider)",
    )
    parser.add_argument(
        "--kernel",
        choices=KERNELS,
        default="rbf",
        help="how likeness is measured; aggregate takes many bandwidths: slower, and sees more (default: rbf)",
    )
    parser.add_argument(
        "--bandwidth",
        type=_bandwidths,
        default=(),
        metavar="B,...",
        help="of rbf or laplacian: the distance that counts as near (default: the median distance)",
    )
    parser.add_argument(
        "--permutations", type=_count, default=1000, metavar="N", help="for the p-value (default: 1000)"
    )
    parser.add_argument(
        "--level", type=_level, default=0.05, metavar="A", help="how often to see drift where is none (default: 0.05)"
    )
    parser.add_argument("--seed", type=_whole, default=0, metavar="N", help="of all that is random (default: 0)")


def drift(parsed: argparse.Namespace) -> int:
    treat_sigterm_as_ctrl_c()
    try:
        # Behind this stand Beam and JAX, which take seconds to import: not for --help.
        from luminosity.cli.drift.job import run

        return run(parsed)
    except LuminosityError as error:
        return _say(as_options(str(error), _ARGUMENTS), _FAILED)
    except KeyboardInterrupt:
        return _say("interrupted", INTERRUPTED)


def _say(message: str, status: int) -> int:
    print(f"lum drift: {message}", file=sys.stderr)
    return status


def _whole(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 0")
    return int(text)


def _count(text: str) -> int:
    if not text.isdecimal() or int(text) < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 1")
    return int(text)


def _rows(text: str) -> int:
    if not text.isdecimal() or int(text) < 2:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from 2")
    return int(text)


def _components(text: str) -> int:
    if not text.isdecimal():
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number, or 0 for rows as they are")
    return int(text)


def _level(text: str) -> float:
    level = _number(text)
    if not 0 < level < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number between 0 and 1, such as 0.05")
    return level


def _bandwidths(text: str) -> tuple[float, ...]:
    found = tuple(_number(part) for part in text.split(","))
    if not all(0 < each < float("inf") for each in found):
        raise argparse.ArgumentTypeError(f"{text!r}: expected positive numbers, such as 0.5 or 0.5,1,2")
    return found


def _number(text: str) -> float:
    try:
        return float(text)
    except ValueError:
        return float("nan")
