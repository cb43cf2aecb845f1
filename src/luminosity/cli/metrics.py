"""``lum metrics``: print the metrics of runs for Prometheus, or write them, a dashboard or alert rules to a file."""

from __future__ import annotations

import argparse
import os
from pathlib import Path
from typing import Any

from luminosity.cli.common.options import add_folder_option, chosen_folder
from luminosity.drift.history import DriftHistory
from luminosity.errors import OptionError
from luminosity.extras import check
from luminosity.report_page.document import write_page

__all__ = ["add_to", "metrics"]

_DESCRIPTION = """\
Print metrics of the newest run of each pipeline, and of the newest tests for
drift, in the text format of Prometheus. `lum ui` serves the same metrics at
/metrics; use this command where no server should run, such as in cron.
"""
_EPILOG = """\
examples:
  lum metrics                                 print the metrics
  lum metrics --out /var/lib/node_exporter/luminosity.prom
                                              for node_exporter's textfile
                                              collector; replaced as a whole
  lum metrics --history drift.sqlite          with the newest tests for drift
  lum metrics --rules luminosity.yaml         write alert rules for Prometheus
  lum metrics --dashboard luminosity.json     write a dashboard for Grafana
"""


def add_to(commands: Any) -> None:
    """Add this command to the subparsers of ``lum``."""
    parser = commands.add_parser(
        "metrics",
        help="print metrics of runs for Prometheus",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("--out", metavar="FILE", help="write the metrics to this file instead of printing them")
    parser.add_argument(
        "--history",
        metavar="FILE",
        action="append",
        default=[],
        help="export the newest tests for drift in this history; may be given several times",
    )
    parser.add_argument("--prices", metavar="FILE", help="price sheet for the cost of runs (default: list prices)")
    parser.add_argument("--dashboard", metavar="FILE", help="write a dashboard for Grafana, and no metrics")
    parser.add_argument("--rules", metavar="FILE", help="write alert rules for Prometheus, and no metrics")
    add_folder_option(parser)
    parser.set_defaults(command=metrics)


def metrics(parsed: argparse.Namespace) -> int:
    """Do what the parsed command line asks for; return the exit code."""
    from luminosity.operate.prometheus import exporter

    wants_files = parsed.dashboard is not None or parsed.rules is not None
    if wants_files and (parsed.out is not None or parsed.history or parsed.prices):
        raise OptionError(
            "--dashboard and --rules write files that don't depend on runs; found options about metrics beside them",
            fix="run the command twice",
        )
    for target, source in ((parsed.dashboard, exporter.DASHBOARD), (parsed.rules, exporter.ALERT_RULES)):
        if target is not None:
            _check_not_changed(target, source)
            write_page(target, source.read_text(encoding="utf-8"), OptionError, "the file")
    if wants_files:
        return 0
    check("prometheus_client", "metrics")
    for history in parsed.history:
        if not Path(history).is_file():
            raise OptionError(
                f"--history {history}: found no such file, expected a history of drift",
                fix="pass the file of `lum drift --history`",
            )
        DriftHistory(history, read_only=True)  # raises an error if the file is something else
    found = exporter.metrics_text(chosen_folder(parsed), parsed.history, parsed.prices)
    if parsed.out is None:
        print(found, end="")
    else:
        write_page(parsed.out, found, OptionError, "the metrics")
    return 0


def _check_not_changed(target: str, source: Path) -> None:
    """Raise an error if the file exists with another content, such as with thresholds that the user has changed."""
    try:
        if not os.path.isfile(target) or Path(target).read_bytes() in (b"", source.read_bytes()):
            return
    except OSError:
        return  # writing it says why
    raise OptionError(
        f"{target}: found a file with another content, which may hold changes of yours; expected a new name",
        fix="name another file, or remove this one",
    )
