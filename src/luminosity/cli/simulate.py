"""``lum simulate RUN``: what a larger run would take, from what a small one has measured."""

from __future__ import annotations

import argparse
import json
import re
import sys
from collections.abc import Callable
from typing import TYPE_CHECKING, Any

from luminosity._shared.text import did_you_mean, parse_size
from luminosity.cli.common.options import add_command, add_folder_option, chosen_folder, count, number
from luminosity.cli.common.output import output_console
from luminosity.operate.simulation.workload import AutoscaleRange, PoolOrder
from luminosity.runs.views import words

if TYPE_CHECKING:  # rich takes a while to import: not for --help
    from rich.table import Table

    from luminosity.operate.simulation.forecast import Forecast

__all__ = ["add_to", "pool"]

_SEEDS = 5  # enough for a range; each takes a second or so
_DESCRIPTION = """\
Simulate a larger run, from what the stages and models of a recorded one have
measured: its hours, its cost, its workers over time, and what would hold it
back. Each input is marked measured or assumed.
"""
_EPILOG = """\
--pool gives the workers of a pool of the measured run: its name, or `device`
for all pools with accelerators or models. A pool that you don't name keeps its
workers. After the number you can say which device each worker has, and, with
commas, cores= and ram= of a worker (for the bill), speed= (times as fast as
what was measured), startup= (seconds until a new worker is up).

examples:
  lum simulate last --rows=100M
                        the same workers with more rows
  lum simulate last --rows=100M --models=14 --pool cpu=500 \\
      --pool device=500:T4,cores=4,ram=15GB,speed=0.07,startup=180
                        many more workers, with devices of another kind
  lum simulate last --rows=10M --autoscale device=1:40
                        a pool that grows and shrinks with its work
  lum simulate last --rows=10M --preempt=0.05
                        each worker is lost every 20 hours, on average
  lum simulate last --rows=10M --out forecast.html
                        a page with pictures
"""
_AMOUNT = re.compile(r"(\d[\d_,]*\.?\d*|\.\d+)([kMG]?)")
_UNITS = {"": 1.0, "k": 1e3, "M": 1e6, "G": 1e9}
_MOST_WORKERS = 10_000  # of a pool: more take minutes to simulate
_MOST = 1e15  # of any number: more is a slip of the hand
_SETTINGS = ("cores", "ram", "speed", "startup")
_POOL_FORM = "NAME=WORKERS[:DEVICE][,cores=N][,ram=SIZE][,speed=X][,startup=SECONDS], such as device=500:T4,cores=4"


def add_to(commands: Any) -> None:
    """Add this command to the subparsers of ``lum``."""
    parser = add_command(commands, "simulate", "estimate what a larger run would take", _DESCRIPTION, _EPILOG)
    parser.add_argument("run", metavar="RUN", help="the id of a run, its unique start or end, or last")
    parser.add_argument("--rows", type=rows, metavar="N", help="rows of the simulated run, such as 100M")
    parser.add_argument("--models", type=count, metavar="N", help="models that each row meets")
    parser.add_argument(
        "--pool",
        type=pool,
        action="append",
        default=[],
        metavar="NAME=N[:DEVICE]",
        help="give a pool N workers; further settings follow after commas; repeat it for further pools",
    )
    parser.add_argument("--cores", type=amount, metavar="N", help="all workers share N cores of one machine")
    parser.add_argument(
        "--autoscale",
        type=autoscale,
        action="append",
        default=[],
        metavar="[POOL=]MIN:MAX",
        help="let a pool grow and shrink, looking every 30 s (default pool: those with models, or all)",
    )
    parser.add_argument(
        "--preempt", type=at_least_zero, default=0.0, metavar="RATE", help="how often a worker is lost in an hour"
    )
    parser.add_argument(
        "--measured-rows", type=rows, metavar="N", help="rows of the measured run, if it is not what it counts itself"
    )
    parser.add_argument("--prices", metavar="FILE", help="a price sheet of your own")
    parser.add_argument(
        "--seeds", type=count, default=_SEEDS, metavar="N", help=f"simulations, for a range (default: {_SEEDS})"
    )
    parser.add_argument("--out", metavar="FILE", help="write a page with pictures; it loads nothing from the network")
    parser.add_argument("--json", action="store_true", help="print everything as JSON instead")
    add_folder_option(parser)
    parser.set_defaults(command=_command)


def _command(parsed: argparse.Namespace) -> int:
    from luminosity.errors import WriteError
    from luminosity.operate.cost.prices import load_prices
    from luminosity.operate.simulation.forecast import forecast
    from luminosity.operate.simulation.picture import page
    from luminosity.operate.simulation.workload import Scenario
    from luminosity.report_page.document import write_page
    from luminosity.runs.records import find

    scenario = Scenario(
        rows=parsed.rows,
        models=parsed.models,
        pools=tuple(parsed.pool),
        cores=parsed.cores,
        autoscale=tuple(parsed.autoscale),
        preempted_per_hour=parsed.preempt,
        measured_rows=parsed.measured_rows,
    )
    record = find(chosen_folder(parsed), parsed.run)
    result = forecast(record, scenario, load_prices(parsed.prices), parsed.seeds)
    if parsed.out is not None:
        write_page(parsed.out, page(result, _title(result, parsed.models)), WriteError)
    if parsed.json:
        print(json.dumps(result.to_json(), indent=2))
    else:
        _print_report(result, parsed.models)
        if parsed.out is not None:
            print(f"\nThe pictures are in {parsed.out}.", file=sys.stderr)
    return 0


def amount(text: str) -> float:
    """Return a number such as 14, 1.5k, 100M or 2G.

    >>> amount("14"), amount("1.5k"), amount("100M")
    (14.0, 1500.0, 100000000.0)
    """
    match = _AMOUNT.fullmatch(text.strip())
    if match is None or not (found := float(re.sub("[_,]", "", match[1])) * _UNITS[match[2]]):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number above 0, such as 14, 1.5k or 100M")
    if found > _MOST:
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number up to {_MOST / 1e9:,.0f}G")
    return found


def rows(text: str) -> float:
    """Return a number of rows, at least one."""
    found = amount(text)
    if found < 1:
        raise argparse.ArgumentTypeError(f"{text!r}: expected at least 1 row")
    return found


def at_least_zero(text: str) -> float:
    """Return a number from 0."""
    found = number(text)
    if not 0 <= found < float("inf"):
        raise argparse.ArgumentTypeError(f"{text!r}: expected a number from 0")
    return found


def pool(text: str) -> PoolOrder:
    """Return what to give a pool.

    >>> pool("device=500:T4,cores=4,ram=15GB,speed=0.07")
    PoolOrder(name='device', workers=500, device='T4', cores=4.0, ram=15000000000, speed=0.07, startup_seconds=None)
    """
    first, *settings = text.split(",")
    name, equals, value = first.rpartition("=")  # names of pools may hold one, such as cpu ram=1GiB
    workers, _, device = value.partition(":")
    if not name or not equals or not workers.strip():
        raise argparse.ArgumentTypeError(f"{text!r}: expected {_POOL_FORM}")
    given: dict[str, float | int] = {}
    for setting in settings:
        key, _, given_value = (part.strip() for part in setting.partition("="))
        if key not in _SETTINGS:
            known = ", ".join(_SETTINGS)
            hint = did_you_mean(key, _SETTINGS)
            raise argparse.ArgumentTypeError(
                f"{text!r}: found the setting {key!r}, expected one of {known}. {hint}".strip()
            )
        given[key] = _READERS.get(key, amount)(given_value)
    count = amount(workers)
    if count != int(count) or count > _MOST_WORKERS:
        raise argparse.ArgumentTypeError(
            f"{text!r}: found {workers} workers, expected a whole number up to {_MOST_WORKERS:,}"
        )
    return PoolOrder(
        name.strip(),
        int(count),
        device.strip(),
        given.get("cores"),
        given.get("ram"),
        given.get("speed"),
        given.get("startup"),
    )


def autoscale(text: str) -> tuple[str, AutoscaleRange]:
    """Return the name of a pool, or an empty one, and its range of workers.

    >>> autoscale("1:500"), autoscale("device=2:40")[0]
    (('', AutoscaleRange(least=1, most=500)), 'device')
    """
    name, _, numbers = text.rpartition("=")
    least, colon, most = numbers.partition(":")
    if not colon or not least.isdecimal() or not most.isdecimal() or not 0 < int(least) <= int(most):
        raise argparse.ArgumentTypeError(f"{text!r}: expected [POOL=]MIN:MAX, such as 1:500 or device=1:500")
    if int(most) > _MOST_WORKERS:
        raise argparse.ArgumentTypeError(f"{text!r}: found {most} workers, expected at most {_MOST_WORKERS:,}")
    return name, AutoscaleRange(int(least), int(most))


def _size(text: str) -> int:
    found = parse_size(text)
    if not found:
        raise argparse.ArgumentTypeError(f"ram={text}: expected a size such as 15GB or 8GiB")
    return found


_READERS: dict[str, Callable[[str], float | int]] = {"ram": _size, "startup": at_least_zero}
"""What reads the value of a setting that is no amount."""


def _title(forecast: Forecast, models: int | None) -> str:
    """Return what is simulated, in a few words."""
    rows = f"{words.number(round(forecast.workload.rows))} rows"
    return f"{rows} \N{MULTIPLICATION SIGN} {models} models" if models else rows


def _print_report(forecast: Forecast, models: int | None) -> None:
    """Print the answer, pools and stages, and every input with its source."""
    from rich.text import Text

    from luminosity.operate.simulation.picture import (
        check_sentence,
        cost_sentence,
        hold_up_sentence,
        hours,
        range_sentence,
    )

    console = output_console()
    median = forecast.seconds[1]
    console.print(Text(f"{_title(forecast, models)}: {hours(median)} ({range_sentence(forecast)})", style="bold"))
    console.print(Text(f"cost       {cost_sentence(forecast)}"))
    console.print(Text(f"held back  {'by ' if forecast.hold_up.pool else ''}{hold_up_sentence(forecast)}"))
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


def _pools(forecast: Forecast) -> Table:
    from rich.table import Table
    from rich.text import Text

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
    from rich.table import Table
    from rich.text import Text

    from luminosity.operate.simulation.picture import main_state

    table = Table(box=None, pad_edge=False)
    table.add_column("stage", ratio=2, overflow="ellipsis", no_wrap=True)
    table.add_column("worker hours", justify="right", no_wrap=True)
    table.add_column("its time goes to", ratio=3, overflow="fold")
    for stage in forecast.workload.stages:
        spent = f"{stage.seconds_per_row * forecast.workload.rows / 3600:,.2f}"
        table.add_row(Text(stage.label), spent, Text(main_state(forecast.middle.states[stage.id])))
    return table


def _inputs(forecast: Forecast) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("input", ratio=3, overflow="fold")
    table.add_column("value", ratio=2, overflow="fold")
    table.add_column("source", no_wrap=True)
    table.add_column("note", ratio=3, overflow="fold")
    for each in forecast.inputs:
        source = Text("measured") if each.is_measured else Text("assumed", style="yellow")
        table.add_row(Text(each.name), Text(each.value), source, Text(each.note, style="dim"))
    return table
