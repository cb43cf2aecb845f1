"""The options of commands that say how CSV files are written."""

from __future__ import annotations

import argparse
from typing import Any

from luminosity.errors import OptionError

__all__ = ["add_csv_options", "csv_arguments"]

_OPTIONS = {"delimiter": "--delimiter", "encoding": "--encoding", "decimal_point": "--decimal-comma"}
_NAMES = {"tab": "\t", "\\t": "\t", "comma": ",", "semicolon": ";", "pipe": "|"}


def add_csv_options(parser: argparse.ArgumentParser) -> None:
    """Add ``--delimiter``, ``--encoding`` and ``--decimal-comma``."""
    parser.add_argument(
        "--delimiter",
        type=_delimiter,
        metavar="C",
        help="character between the values of CSV: ';', tab, … (default: recognised by content)",
    )
    parser.add_argument(
        "--encoding", metavar="NAME", help="encoding of CSV, such as cp1252 (default: UTF-8, or as the file says)"
    )
    parser.add_argument(
        "--decimal-comma",
        dest="decimal_point",
        action="store_const",
        const=",",
        help="numbers of CSV have a decimal comma: 1,5 (default: such values are texts)",
    )


def csv_arguments(parsed: argparse.Namespace, *patterns: str) -> list[dict[str, Any]]:
    """Return the arguments of ``ReadTable`` for each pattern: none for a table without CSV files.

    Raises an error if an option is given and no table has a CSV file.
    """
    given = {name: value for name in _OPTIONS if (value := getattr(parsed, name)) is not None}
    if not given:
        return [{} for _ in patterns]
    found = [given if _has_csv(pattern) else {} for pattern in patterns]
    if not any(found):
        names = " and ".join(_OPTIONS[name] for name in given)
        raise OptionError(f"found {names}, which {'is' if len(given) == 1 else 'are'} for CSV, but no CSV file")
    return found


def _has_csv(pattern: str) -> bool:
    from luminosity.io.reading.find_files import find_files

    if pattern.lower().endswith(".npy"):
        return False
    return any(file.format.is_csv for file in find_files([pattern], None))


def _delimiter(text: str) -> str:
    """Return the character that an option means.

    >>> _delimiter(";"), _delimiter("tab"), _delimiter("\\\\t")
    (';', '\\t', '\\t')
    """
    found = _NAMES.get(text.lower(), text)
    if len(found) != 1 or not found.isascii() or found in '"\r\n':
        raise argparse.ArgumentTypeError(f"found {text!r}, expected one ASCII character, such as ';', or tab")
    return found
