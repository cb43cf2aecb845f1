"""The advice as text, for a terminal or a pipe."""

from __future__ import annotations

import sys
from collections.abc import Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.padding import Padding
from rich.table import Table
from rich.text import Text

from luminosity._text import format_bytes, format_size, list_some
from luminosity.engine.monitor.views.words import duration, percent
from luminosity.operate.cost.bill import Bill, money
from luminosity.operate.cost.prices import LEAST_SAVING

if TYPE_CHECKING:
    from luminosity.operate.advice.advise import Report
    from luminosity.operate.advice.rules import Advice, PoolAdvice

__all__ = ["print_report"]

_PIPED_WIDTH = 120  # columns
_MOST_STEPS = 3  # named in a cell


def print_report(reports: Sequence[Report], together: Sequence[Advice], hints_file: str | None = None) -> None:
    """Print the advice for each pipeline and that for all of them."""
    console = Console(highlight=False, soft_wrap=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    with console.capture() as printed:
        for index, report in enumerate(reports):
            if index:
                console.print()
            _print(console, report)
        if together:
            console.print(Text("\nTogether", "bold"))
            for advice in together:
                _print_advice(console, advice)
        if hints_file:
            console.print()
            console.print(Text(f"wrote {hints_file}; run with it: --pools=fitted --hints={hints_file}"))
    console.file.writelines(f"{line.rstrip()}\n" for line in printed.get().splitlines())  # tables are padded


def _print(console: Console, report: Report) -> None:
    use = report.use
    ids = list_some((record.started.run for record in use.records), 3)
    console.print(Text.assemble((use.name, "bold"), f": {ids}, {duration(use.seconds)}"))
    console.print(Text("\nGiven and used", "bold"))
    console.print(_pools(report.pools))
    written = [(pool, advice) for pool in report.pools for advice in pool.advice]
    if written or report.workers:
        console.print(Text("\nWrite instead", "bold"))
    for pool, advice in written:
        _print_advice(console, advice, pool)
    for advice in report.workers:
        _print_advice(console, advice)
    console.print(Text("\nThe bill", "bold"))
    console.print(_bills(report))
    console.print(_verdict(report))
    bill = report.as_run
    for sentence in (*(f"Range: {reason}." for reason in bill.reasons), *report.notes, *bill.notes):
        console.print(Text(sentence, "dim"))


def _pools(pools: Sequence[PoolAdvice]) -> Table:
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
    if advice.write:
        console.print(Text(f"  {advice.write}", "green"))
    if pool is not None and advice.write.startswith(".") and not any("/" not in step for step in pool.steps):
        where = "These steps are inside others: write it at those, or name them in a file of hints."
        console.print(Padding(Text(where, "dim"), (0, 0, 0, 4)))
    console.print(Padding(Text(advice.why), (0, 0, 0, 4)))


def _bills(report: Report) -> Table:
    table = _table("", "total", "range", "time", "workers")
    how = {"as run": report.as_run, "uniform": report.uniform, "advised": report.advised}
    for name, bill in how.items():
        is_measured = name == "as run" or (name == "uniform" and report.uniform_is_measured)
        label = name if is_measured else f"{name}, predicted"
        table.add_row(Text(label, "bold" if name == "advised" else ""), *_bill_cells(bill))
    return table


def _bill_cells(bill: Bill | None) -> list[str]:
    if bill is None or bill.total is None:
        return ["not known", "", "", ""]
    low_high = f"{money(bill.low, '').strip()} to {money(bill.high, '').strip()}"
    workers = " + ".join(f"{pool.peak_workers} {pool.pool}" for pool in bill.pools) or "the whole machine"
    return [money(bill.total, bill.currency), low_high, duration(bill.seconds), workers]


def _verdict(report: Report) -> Text:
    saving = report.saving
    if saving is None:
        return Text("What could be saved is not known.", "yellow")
    uniform = report.uniform
    compared = ""
    if uniform is not None and uniform.total and report.advised is not None and uniform is not report.as_run:
        part = 1.0 - (report.advised.total or 0.0) / uniform.total
        compared = f" Against uniform workers, it would save {percent(part)}." if part >= 0 else ""
    if report.is_worth_it:
        return Text(f"The advice would save {percent(saving)} of the bill.{compared}", "bold green")
    if saving <= -LEAST_SAVING:
        return Text(
            f"Nothing is to be saved: the advice would cost {percent(-saving)} more. Follow it only where a worker "
            f"needs more memory than its steps ask for.{compared}",
            "bold",
        )
    return Text(
        f"Nothing is to be saved: the advice changes the bill by less than {percent(LEAST_SAVING)}.{compared}",
        "bold",
    )


def _table(*headings: str) -> Table:
    table = Table(*headings, box=None, header_style="dim", pad_edge=False, padding=(0, 2, 0, 0))
    for column in table.columns:
        column.overflow = "fold"
    return table
