"""``lum advise RUN…``: say what to write instead, and what it would cost."""

from __future__ import annotations

import argparse
import json
import os
from typing import Any

from luminosity._shared.text import list_some, parse_duration
from luminosity.cli.advise.report import print_report
from luminosity.cli.common.options import add_folder_option, chosen_folder
from luminosity.cli.common.output import json_text
from luminosity.errors import OptionError, WriteError
from luminosity.operate.cost.prices import load_prices
from luminosity.report_page.document import write_page
from luminosity.runs.records import find

__all__ = ["add_to"]

_EPILOG = """\
You get for each pool what its workers were given and what they used, and
advice in parts: what is needed, what saves money or time, and what brings no
gain. Three bills follow: as it was run (measured), uniform (each worker gets
the most that any step asks for), and advised (both predicted). The bills take
list prices with a date, or your own with --prices. --write writes the hints
that are needed or save something, and no others.

Give several runs of a pipeline, and the largest peak of them all counts. Give
runs of several pipelines, and you are told what they could share.

examples:
  lum advise last                          the newest run
  lum advise 4f2a9c 81d0c2                 the peaks of two runs
  lum advise last --write hints.json       write the hints into a file
  lum run pipeline.py --pools=fitted --hints=hints.json    run with them
  lum advise last --deadline=2h            workers to end within two hours
  lum advise last --json                   for a script
"""


def add_to(commands: Any) -> None:
    """Add this command to the subparsers of ``lum``."""
    parser = commands.add_parser(
        "advise",
        help="say what a run needed and what it should cost",
        description="Say what each pool of a run was given, what it used, what to write instead, and what that costs.",
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("run", metavar="RUN", nargs="+", help="the id of a run, its unique start or end, or last")
    parser.add_argument("--json", action="store_true", help="print everything as JSON")
    parser.add_argument("--write", metavar="FILE", help="write the hints into FILE, for --pools=fitted --hints=FILE")
    parser.add_argument("--prices", metavar="FILE", help="your own price sheet, as JSON (default: dated list prices)")
    parser.add_argument("--deadline", metavar="TIME", help="the time in which a run should end, such as 90s, 45m or 2h")
    add_folder_option(parser)
    parser.set_defaults(command=_command)


def _command(parsed: argparse.Namespace) -> int:
    deadline_s = _deadline(parsed.deadline)
    prices = load_prices(parsed.prices)
    _check_file(parsed.write)
    folder = chosen_folder(parsed)
    records = {record.started.run: record for record in (find(folder, wanted) for wanted in parsed.run)}
    # Only now: it imports Beam, which takes a second.
    from luminosity.operate.advice.advise import advise, hints_content, to_json

    reports, together = advise(list(records.values()), prices, deadline_s)
    if parsed.write:
        if len(reports) > 1:
            names = list_some([repr(report.use.name) for report in reports], 3)
            raise OptionError(
                f"--write={parsed.write}: found runs of several pipelines ({names}), expected runs of one: a file of "
                "hints is for one pipeline",
                fix="write a file for each pipeline",
            )
        hints = hints_content(reports)
        if not hints["steps"]:
            raise OptionError(
                f"--write={parsed.write}: found no hints to write: none is needed, and none saves something",
                fix="leave out --write; what is said then tells why",
            )
        write_page(parsed.write, json.dumps(hints, indent=2) + "\n", WriteError, "the hints")
    if parsed.json:
        print(json_text(to_json(reports, together)))
    else:
        print_report(reports, together, parsed.write)
    return 0


def _deadline(text: str | None) -> float | None:
    if text is None:
        return None
    found = parse_duration(text)
    if not found:
        raise OptionError(f"--deadline={text}: expected a time such as 90s, 45m or 2h")
    return found.total_seconds()


def _check_file(path: str | None) -> None:
    """Raise an error if the file of ``--write`` can't be written, before any work is done."""
    if not path:
        return
    folder = os.path.dirname(os.path.abspath(path))
    if os.path.isdir(path) or not os.path.isdir(folder) or not os.access(folder, os.W_OK):
        raise OptionError(f"--write={path}: expected the name of a file in a folder that you can write")
    if os.path.isfile(path) and os.path.getsize(path) and not _is_of_hints(path):
        raise OptionError(
            f"--write={path}: found another kind of file, expected a new name, or a file of hints to replace",
            fix="name another file, or remove this one",
        )


def _is_of_hints(path: str) -> bool:
    try:
        with open(path, encoding="utf-8") as file:
            content: Any = json.load(file)
    except (OSError, ValueError, RecursionError):
        return False
    return isinstance(content, dict) and "steps" in content
