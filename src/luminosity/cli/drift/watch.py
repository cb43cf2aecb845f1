"""``lum drift watch CONFIG``: look for drift again and again, and alert when the state of a key changes."""

from __future__ import annotations

import argparse
from datetime import timedelta
from typing import Any

from luminosity._shared.text import parse_duration
from luminosity.cli.common.exits import FAILED, WRONG_USE, fail
from luminosity.cli.common.options import add_command
from luminosity.engine.process import check_address_space
from luminosity.errors import LuminosityError, OptionError

__all__ = ["NAME", "add_to"]

NAME = "drift watch"
_DESCRIPTION = """\
Look for drift on a schedule, or in a history that a pipeline with RecordDrift
appends to. Alert by command or webhook when a key's state changes: drift
begins, drift is over, no test for some time, tests again. CONFIG is a TOML
file. Rounds go on until Ctrl-C.

Exit codes with --once: 0 no key drifts or is missing, 3 one does, 1 a watch
failed or an alert could not be delivered, 2 wrong usage or configuration.
"""
_EPILOG = """\
examples:
  lum drift watch watch.toml              make rounds until Ctrl-C
  lum drift watch watch.toml --once       make one round now, for cron
  lum drift watch watch.toml --check      check the file, show the level
  lum drift watch watch.toml --silence language=de --for 2h
                        keep alerts of this key, and send none for two hours
"""


def add_to(commands: Any) -> None:
    """Add the subcommand ``drift watch`` to the parser of ``lum``."""
    parser = add_command(commands, NAME, "look for drift again and again, and alert on changes", _DESCRIPTION, _EPILOG)
    parser.add_argument("config", metavar="CONFIG", help="the configuration, a TOML file")
    which = parser.add_mutually_exclusive_group()
    which.add_argument("--once", action="store_true", help="make one round now, and exit with a code for cron")
    which.add_argument("--check", action="store_true", help="check the configuration and print the level, test nothing")
    which.add_argument("--silence", metavar="KEY", help="send no alerts of this key, or of all with '*'; needs --for")
    parser.add_argument("--for", type=_duration, dest="length", metavar="TIME", help="how long --silence lasts: 2h, 1d")
    parser.set_defaults(command=_watch)


def _watch(parsed: argparse.Namespace) -> int:
    from luminosity.drift.watch.config import read_config

    try:
        if (parsed.silence is None) != (parsed.length is None):
            raise OptionError("found one of --silence and --for, expected both: --silence KEY --for 2h")
        config = read_config(parsed.config)
    except LuminosityError as error:
        return fail(NAME, error, WRONG_USE)
    check_address_space()  # JAX ends the process if it finds too little
    try:
        from luminosity.cli.drift.watch_job import check, rounds, silence

        if parsed.check:
            return check(config)
        if parsed.silence is not None:
            return silence(config, parsed.silence, parsed.length)
        return rounds(config, once=parsed.once)
    except LuminosityError as error:
        return fail(NAME, error, FAILED)


def _duration(text: str) -> timedelta:
    found = parse_duration(text)
    if not found:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a time such as 30m, 2h or 1d")
    return found
