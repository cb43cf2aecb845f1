"""``lum simulate RUN``: what a larger run would take, from what a small one has measured."""

from __future__ import annotations

import argparse
import json
import sys
from typing import Any

from luminosity.cli.common.options import add_folder_option, chosen_folder, count
from luminosity.cli.simulate.parsing import amount, at_least_zero, autoscale, pool, rows

__all__ = ["add_to"]

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


def add_to(commands: Any) -> None:
    """Add this command to the subparsers of ``lum``."""
    parser = commands.add_parser(
        "simulate",
        help="estimate what a larger run would take",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
    from luminosity.cli.simulate.report import print_report, title
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
        write_page(parsed.out, page(result, title(result, parsed.models)), WriteError)
    if parsed.json:
        print(json.dumps(result.to_json(), indent=2))
    else:
        print_report(result, parsed.models)
        if parsed.out is not None:
            print(f"\nThe pictures are in {parsed.out}.", file=sys.stderr)
    return 0
