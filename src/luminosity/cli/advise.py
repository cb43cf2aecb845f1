"""``lum advise RUN…``: say what to write instead, and what it would cost."""

from __future__ import annotations

import argparse
import json
import os
from collections.abc import Sequence
from typing import TYPE_CHECKING, Any

from luminosity._shared.text import format_bytes, format_size, list_some, parse_duration
from luminosity.cli.common.options import add_command, add_folder_option, chosen_folder
from luminosity.cli.common.output import json_text, output_console
from luminosity.errors import OptionError, WriteError
from luminosity.operate.cost.bill import Bill, money
from luminosity.operate.cost.prices import LEAST_SAVING, load_prices
from luminosity.report_page.document import write_page
from luminosity.runs.records import find
from luminosity.runs.views.words import duration, percent

if TYPE_CHECKING:  # rich takes a while to import: not for --help
    from rich.console import Console
    from rich.table import Table
    from rich.text import Text

    from luminosity.operate.advice.advise import Report
    from luminosity.operate.advice.rules import Advice, Gain, PoolAdvice

__all__ = ["add_to"]

_DESCRIPTION = """\
Say what each pool of a run was given and what it used, which resource hints to
write instead, and what the run costs with either.
"""
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
_LEAST_SAID = 0.01  # of a bill: predictions are not more exact
_MOST_STEPS = 3  # named in a cell
_MEASURED = (
    "Measured: peak RAM is the largest memory of a worker; CPU/s are CPU seconds of a worker in a second, not exceeded "
    "in 95% of the time; busy is the part of workers' time in which they had a bundle."
)
_TITLES: dict[Gain, str] = {
    "needed": "Needed: a worker used more than its steps ask for, or nearly as much",
    "saves": "Saves money or time, by the predictions below",
    "": "Worth a look: what it saves is not known",
    "no gain": "No gain: leave it as it is",
}


def add_to(commands: Any) -> None:
    """Add this command to the subparsers of ``lum``."""
    parser = add_command(
        commands,
        "advise",
        "say what a run needed and what it should cost",
        _DESCRIPTION,
        _EPILOG,
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
        _print_report(reports, together, parsed.write)
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


def _print_report(reports: Sequence[Report], together: Sequence[Advice], hints_file: str | None = None) -> None:
    """Print the advice for each pipeline and that for all of them."""
    from rich.text import Text

    console = output_console()
    with console.capture() as printed:
        for index, report in enumerate(reports):
            if index:
                console.print()
            _print_one(console, report)
        if together:
            console.print(Text("\nTogether", "bold"))
            for advice in together:
                _print_advice(console, advice)
        if hints_file:
            console.print()
            console.print(Text(_written(reports[0], hints_file)))
    console.file.writelines(f"{line.rstrip()}\n" for line in printed.get().splitlines())  # tables are padded


def _print_one(console: Console, report: Report) -> None:
    from rich.text import Text

    use = report.use
    ids = list_some((record.started.run for record in use.records), 3)
    console.print(Text.assemble((use.name, "bold"), f": {ids}, {duration(use.seconds)}"))
    if report.slowest:
        console.print(Text(report.slowest))
    console.print(Text("\nGiven and used", "bold"))
    console.print(_pools(report.pools))
    console.print(Text(_MEASURED, "dim"))
    every: list[tuple[PoolAdvice | None, Advice]] = [(pool, each) for pool in report.pools for each in pool.advice]
    every += [(None, each) for each in report.workers]
    for gain, title in _TITLES.items():
        told = [(pool, each) for pool, each in every if each.gain == gain]
        if told:
            console.print(Text(f"\n{title}", "bold"))
        for pool, each in told:
            _print_advice(console, each, pool)
    console.print(Text("\nThe bill", "bold"))
    console.print(_bills(report))
    console.print(_verdict(report))
    bill = report.as_run
    for sentence in (*(f"Range: {reason}." for reason in bill.reasons), *report.notes, *bill.notes):
        console.print(Text(sentence, "dim"))


def _written(report: Report, file: str) -> str:
    """Return what was written, what was left out, and how to run with it."""
    every = [each for pool in report.pools for each in pool.advice if each.hints]
    left_out = sum(each.gain not in ("needed", "saves") for each in every)
    without = f" without {left_out} hint{'' if left_out == 1 else 's'} that would bring no gain" if left_out else ""
    options = "".join(f" {each.write}" for each in _options(report))
    return f"wrote {file}{without}; run with it: --pools=fitted --hints={file}{options}"


def _options(report: Report) -> list[Advice]:
    """Return the advice that is an option of a run, which a file of hints can't hold."""
    every = [*(each for pool in report.pools for each in pool.advice), *report.workers]
    return [each for each in every if each.gain == "saves" and each.write.startswith("--")]


def _pools(pools: Sequence[PoolAdvice]) -> Table:
    from rich.text import Text

    table = _table("pool", "workers", "given each", "peak RAM", "CPU/s", "busy", "steps")
    for pool in pools:
        use = pool.use
        given = f"{use.info.cores_per_worker:.2g} cores, {format_size(use.info.ram_per_worker)}"
        device = f", {len(use.info.devices) // max(1, use.info.workers)} device" if use.info.devices else ""
        table.add_row(
            Text(use.name, "cyan"),
            str(use.workers),
            (given if use.info.ram_per_worker else "not known") + device,
            format_bytes(use.peak_ram) if use.peak_ram else "not known",
            f"{use.cpu_per_second:.2f}" if use.cpu_per_second is not None else "not known",
            percent(use.busy_fraction) if use.bill is not None else "not known",
            Text(list_some(pool.steps, _MOST_STEPS)),
        )
    return table


def _print_advice(console: Console, advice: Advice, pool: PoolAdvice | None = None) -> None:
    from rich.padding import Padding
    from rich.text import Text

    if advice.write:
        console.print(Text(f"  {advice.write}", "green"))
    if pool is not None and advice.write.startswith(".") and not any("/" not in step for step in pool.steps):
        where = "These steps are inside others: write it at those, or name them in a file of hints."
        console.print(Padding(Text(where, "dim"), (0, 0, 0, 4)))
    console.print(Padding(Text(f"{advice.why}{_effect(advice)}"), (0, 0, 0, 4)))


def _effect(advice: Advice) -> str:
    """Return what following one piece of advice does to the bill, beside the others."""
    if advice.saving is None:
        return ""
    if abs(advice.saving) < _LEAST_SAID:
        return ". The bill stays as it is"
    what = "saves" if advice.saving > 0 else "adds"
    return f". It {what} {percent(abs(advice.saving))} of the bill, beside the other advice"


def _bills(report: Report) -> Table:
    from rich.text import Text

    table = _table("", "total", "range", "time", "workers")
    how = {"as run": report.as_run, "uniform": report.uniform, "advised": report.advised}
    for name, bill in how.items():
        is_measured = name == "as run" or (name == "uniform" and report.uniform_is_measured)
        label = f"{name}, {'measured' if is_measured else 'predicted'}"
        table.add_row(Text(label, "bold" if name == "advised" else ""), *_bill_cells(bill))
    return table


def _bill_cells(bill: Bill | None) -> list[str]:
    if bill is None or bill.total is None:
        return ["not known", "", "", ""]
    low_high = f"{money(bill.low, '').strip()} to {money(bill.high, '').strip()}"
    workers = " + ".join(f"{pool.peak_workers} {pool.pool}" for pool in bill.pools) or "the whole machine"
    return [money(bill.total, bill.currency), low_high, duration(bill.seconds), workers]


def _verdict(report: Report) -> Text:
    from rich.text import Text

    saving, advised = report.saving, report.advised
    if saving is None or advised is None:
        return Text("What could be saved is not known.", "yellow")
    uniform = report.uniform
    compared = ""
    as_run = report.as_run.total or 0.0
    if uniform is not None and uniform.total and abs(uniform.total - as_run) > _LEAST_SAID * as_run:
        part = 1.0 - (advised.total or 0.0) / uniform.total
        compared = f" Against uniform workers, it would save {percent(part)}." if part >= LEAST_SAVING else ""
    gains = {each.gain for pool in report.pools for each in pool.advice} | {each.gain for each in report.workers}
    what = "The advice (what is needed, and what saves)" if "needed" in gains else "The advice"
    if report.is_worth_it:
        return Text(f"{what} would save {percent(saving)} of the bill.{compared}", "bold green")
    if "saves" in gains and advised.seconds < report.as_run.seconds:
        faster = f"it takes {duration(advised.seconds)} instead of {duration(report.as_run.seconds)}"
        return Text(
            f"{what} would save time: {faster}. The bill changes by {_signed(-saving)}.{compared}", "bold green"
        )
    if "needed" in gains:
        return Text(
            f"Follow what is needed. The bill changes by {_signed(-saving)}; nothing else saves more than "
            f"{percent(LEAST_SAVING)} of it.",
            "bold",
        )
    return Text(f"Nothing is to be saved: no advice changes the bill by {percent(LEAST_SAVING)} or more.", "bold")


def _signed(part: float) -> str:
    return f"{'+' if part > 0 else ''}{percent(part)}"


def _table(*headings: str) -> Table:
    from rich.table import Table

    table = Table(*headings, box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for column in table.columns:
        column.overflow = "fold"
    return table
