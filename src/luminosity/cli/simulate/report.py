"""What ``lum simulate`` prints: the answer, pools and stages, and every input with its source."""

from __future__ import annotations

import sys

from rich.console import Console
from rich.table import Table
from rich.text import Text

from luminosity.operate.simulation.forecast import Forecast
from luminosity.operate.simulation.picture import (
    check_sentence,
    cost_sentence,
    hold_up_sentence,
    hours,
    main_state,
    range_sentence,
)
from luminosity.runs.views import words

__all__ = ["print_report", "title"]

_PIPED_WIDTH = 120  # columns


def title(forecast: Forecast, models: int | None) -> str:
    """Return what is simulated, in a few words."""
    rows = f"{words.number(round(forecast.workload.rows))} rows"
    return f"{rows} \N{MULTIPLICATION SIGN} {models} models" if models else rows


def print_report(forecast: Forecast, models: int | None) -> None:
    """Print the report."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)
    median = forecast.seconds[1]
    console.print(Text(f"{title(forecast, models)}: {hours(median)} ({range_sentence(forecast)})", style="bold"))
    console.print(Text(f"cost       {cost_sentence(forecast)}"))
    console.print(Text(f"held back  by {hold_up_sentence(forecast)}" if forecast.hold_up.pool else _free(forecast)))
    if forecast.device_share is not None:
        console.print(Text(f"models     computed for {words.percent(forecast.device_share)} of the measured time"))
    if forecast.middle.lost_workers:
        console.print(Text(f"lost       {forecast.middle.lost_workers:,} workers, each replaced"))
    console.print(Text(f"check      {check_sentence(forecast)}"))
    console.print()
    console.print(_pools(forecast))
    console.print()
    console.print(_stages(forecast))
    console.print()
    console.print(_inputs(forecast))
    if forecast.bill is not None:
        console.print()
        for text in (*forecast.bill.reasons, *forecast.bill.notes):
            console.print(Text(text, style="dim"))


def _free(forecast: Forecast) -> str:
    return f"held back  {hold_up_sentence(forecast)}"


def _pools(forecast: Forecast) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("pool", overflow="fold")
    for head in ("workers, at most", "worker hours", "busy"):
        table.add_column(head, justify="right", no_wrap=True)
    middle = forecast.middle
    for pool in forecast.workload.pools:
        worker_seconds = middle.worker_seconds[pool.name]
        busy = words.percent(middle.busy_seconds[pool.name] / max(1e-9, worker_seconds))
        table.add_row(Text(pool.name), f"{middle.most_workers[pool.name]:,}", f"{worker_seconds / 3600:,.2f}", busy)
    return table


def _stages(forecast: Forecast) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("stage", ratio=2, overflow="ellipsis", no_wrap=True)
    table.add_column("worker hours", justify="right", no_wrap=True)
    table.add_column("its time goes to", ratio=3, overflow="fold")
    for stage in forecast.workload.stages:
        spent = f"{stage.seconds_per_row * forecast.workload.rows / 3600:,.2f}"
        table.add_row(Text(stage.label), spent, Text(main_state(forecast.middle.states[stage.id])))
    return table


def _inputs(forecast: Forecast) -> Table:
    table = Table(box=None, pad_edge=False)
    table.add_column("input", ratio=3, overflow="fold")
    table.add_column("value", ratio=2, overflow="fold")
    table.add_column("source", no_wrap=True)
    table.add_column("note", ratio=3, overflow="fold")
    for each in forecast.inputs:
        source = Text("measured") if each.is_measured else Text("assumed", style="yellow")
        table.add_row(Text(each.name), Text(each.value), source, Text(each.note, style="dim"))
    return table
