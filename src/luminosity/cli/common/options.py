"""Options that several commands have: the folder of recorded runs, and numbers, which argparse reads and checks."""

from __future__ import annotations

import argparse
import os
import textwrap
from pathlib import Path
from typing import Any

from luminosity.errors import OptionError, RecordError

__all__ = [
    "HelpFormatter",
    "add_command",
    "add_folder_option",
    "at_least",
    "check_variable",
    "chosen_folder",
    "count",
    "flag",
    "fraction",
    "number",
    "whole_number",
]


class HelpFormatter(argparse.RawDescriptionHelpFormatter):
    """Prints descriptions as they are written, and breaks no line of an option's help at a hyphen."""

    def _split_lines(self, text: str, width: int) -> list[str]:
        return textwrap.wrap(" ".join(text.split()), width, break_on_hyphens=False)


def add_command(
    commands: Any, name: str, summary: str, description: str, epilog: str, usage: str | None = None
) -> argparse.ArgumentParser:
    """Add a command to the subparsers of ``lum``; its texts are printed as they are written."""
    return commands.add_parser(
        name,
        usage=usage,
        help=summary,
        description=description,
        epilog=epilog,
        formatter_class=HelpFormatter,
    )


def add_folder_option(parser: argparse.ArgumentParser) -> None:
    """Add ``--run_dir`` to a command that reads recorded runs."""
    parser.add_argument(
        "--run_dir",
        metavar="DIR",
        help="folder with the recorded runs (default: $LUMINOSITY_RUN_DIR, or ~/.luminosity/runs)",
    )


def chosen_folder(parsed: argparse.Namespace) -> Path:
    """Return the folder with the recorded runs, which may not exist yet.

    Raises :class:`RecordError` if runs are not recorded, or if it is no folder that this user can read.
    """
    from luminosity.runs import records  # most commands need none

    found = records.folder(parsed.run_dir)
    if found is None:
        raise RecordError("runs are not recorded: --run_dir or LUMINOSITY_RUN_DIR is off", fix="pass --run_dir=DIR")
    if os.path.lexists(found) and not os.path.isdir(found):
        raise RecordError(f"{found}: found a file, expected the folder of recorded runs", fix="pass --run_dir=DIR")
    if os.path.isdir(found) and not os.access(found, os.R_OK | os.X_OK):
        raise RecordError(
            f"{found}: found a folder that you can't read", fix="pass --run_dir=DIR with one that you can"
        )
    return found


def flag(name: str) -> str:
    """Return an option as users write it.

    >>> flag("skip_missing")
    '--skip-missing'
    """
    return f"--{name.replace('_', '-')}"


def at_least(least: int, text: str) -> int:
    """Return a whole number that is at least ``least``."""
    if not text.isdecimal() or int(text) < least:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a whole number from {least}")
    return int(text)


def whole_number(text: str) -> int:
    """Return a whole number from 0.

    >>> whole_number("12")
    12
    """
    return at_least(0, text)


def count(text: str) -> int:
    """Return a whole number from 1."""
    return at_least(1, text)


def fraction(text: str, example: str) -> float:
    """Return a number between 0 and 1, both excluded. ``example`` is named if it is none."""
    found = number(text)
    if not 0 < found < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number between 0 and 1, such as {example}")
    return found


def check_variable(option: str, name: str | None) -> None:
    """Raise if an option names an environment variable that is not set, or is empty."""
    if name is not None and not os.environ.get(name, "").strip():
        raise OptionError(f"{option} {name}: the environment variable is not set", fix=f"export {name}=... first")


def number(text: str) -> float:
    """Return any number, or NaN if the text is none."""
    try:
        return float(text)
    except ValueError:
        return float("nan")
