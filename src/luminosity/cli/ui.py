"""``lum ui``, and the page beside ``lum run --ui``: runs in the browser; and ``lum metrics``: runs for Prometheus."""

from __future__ import annotations

import argparse
import atexit
import os
import secrets
import sys
import threading
import webbrowser
from collections.abc import Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from luminosity._shared.shared_files import who_else_writes
from luminosity.cli.common.exits import interrupted, was_terminated
from luminosity.cli.common.options import add_command, add_folder_option, chosen_folder
from luminosity.drift.history import DriftHistory
from luminosity.errors import OptionError
from luminosity.extras import check
from luminosity.report_page.document import write_page

if TYPE_CHECKING:
    from luminosity.operate.page.beside import PageBeside
    from luminosity.operate.page.team.settings import TeamSettings

__all__ = ["add_to", "open_beside", "ui"]
_HOST = "127.0.0.1"
_DESCRIPTION = """\
Open a page of runs, live and past, in the browser: the graph of a run, its
steps, throughput, workers, devices and models over time, failures and logs.

The page reads the records of runs; it can also stop your own runs and save
savepoints of them, unless you add --read-only. It is for you, on this
machine: the address that the command prints contains a token, and no other
machine can connect. With --listen and --login, it is for a team that signs in.
"""
_EXAMPLES = """\
examples:
  lum ui                         open the page of all recorded runs
  lum ui --port 8080             on this port, such as for a bookmark
  lum ui --no-browser            only print the address
  lum ui --read-only             a page that can stop no run
  lum ui --run_dir /data/runs    the runs that are recorded there
  lum run --ui pipeline.py       open the page beside a run
  lum ui --listen 0.0.0.0:443 --login team.toml
                                 a page for a team, behind a sign-in

From another machine, forward the port and open the printed address there:
  ssh -L 4747:127.0.0.1:4747 THIS_MACHINE
"""


def add_to(commands: Any) -> None:
    """Add both commands to the subparsers of ``lum``."""
    _add_ui(commands)
    _add_metrics(commands)


def _add_ui(commands: Any) -> None:
    parser = add_command(commands, "ui", "open a page of runs in the browser", _DESCRIPTION, _EXAMPLES)
    parser.add_argument(
        "--port",
        type=int,
        metavar="N",
        help="the port; 0 picks a free one (default: 4747, or a free one if it is taken)",
    )
    parser.add_argument(
        "--host",
        help="the loopback address to listen on: 127.0.0.1, localhost or ::1 (default: 127.0.0.1)",
    )
    parser.add_argument(
        "--listen",
        metavar="ADDRESS:PORT",
        help="let a team read the page from other machines; needs --login (default port: 4747)",
    )
    parser.add_argument(
        "--login",
        metavar="FILE",
        help="for --listen: a TOML file that says who may read and act, how they sign in, and the certificate",
    )
    parser.add_argument(
        "--read-only", action="store_true", help="let nobody stop a run or save a savepoint on the page"
    )
    parser.add_argument("--no-browser", action="store_true", help="print the address, open no browser")
    add_folder_option(parser)
    parser.add_argument(
        "--drift",
        action="append",
        default=[],
        metavar="FILE",
        help="also show this history of drift, see `lum drift --history`; may be repeated (default: those in "
        "$LUMINOSITY_DRIFT_DIR, or ~/.luminosity/drift)",
    )
    parser.add_argument(
        "--prices", metavar="FILE", help="a price sheet for the costs of runs (default: the list prices in the package)"
    )
    parser.set_defaults(command=ui)


def ui(parsed: argparse.Namespace) -> int:
    """Serve the page until Ctrl-C or SIGTERM; return the exit code."""
    folder = chosen_folder(parsed)
    for module in ("starlette", "uvicorn"):
        check(module, "ui")
    from luminosity.operate.cost.prices import load_prices
    from luminosity.operate.page.app import Sources, serve_page
    from luminosity.operate.web_server import Access, address, bind, listen

    said = who_else_writes(folder) if folder.is_dir() else ""
    if said:
        print(f"lum ui: {_only_reads(said)}", file=sys.stderr)
    team, host, port = _team(parsed)
    can_act = not parsed.read_only and not said and (team is None or bool(team.actors))
    sources = Sources(folder, tuple(_existing(parsed.drift)), parsed.prices, can_act, team)
    load_prices(parsed.prices)  # an error is more useful before the page is open
    with bind(host, port) if team is None else listen(host, port or 0) as listener:
        token = _token(folder)

        def introduce(access: Access) -> None:
            if team is not None:
                print(f"The runs in {folder} are at {team.origin}/runs for who may sign in ({', '.join(team.users)})")
                print(f"{', '.join(team.actors)} may act." if can_act else "The page only reads.")
                print("Ctrl-C stops the server.", flush=True)
                return
            print(f"The runs in {folder} are at {address(listener, token)}")
            print("Ctrl-C stops the server.", flush=True)
            if not parsed.no_browser and _has_screen():
                # On a thread of its own: some browsers return when they are closed, and the server begins after this.
                url = address(listener, access.once())
                threading.Thread(target=webbrowser.open, args=(url,), name="browser", daemon=True).start()

        serve_page(sources, token, listener, introduce)
    return interrupted("ui") if was_terminated() else 0


def _only_reads(said: str) -> str:
    return f"the page may show forged records, and only reads: {said}; expected a folder that only you can write to"


def _team(parsed: argparse.Namespace) -> tuple[TeamSettings | None, str, int | None]:
    """Return the settings of a team's page, or None, and where to listen."""
    from luminosity.operate.page.team.settings import place_of, read_settings

    if parsed.listen is None and parsed.login is None:
        return None, parsed.host or _HOST, parsed.port
    if parsed.listen is None or parsed.login is None:
        found, missing = ("--login", "--listen") if parsed.listen is None else ("--listen", "--login")
        raise OptionError(
            f"found {found} without {missing}, expected both: a page that other machines can reach needs a sign-in",
            fix="add --listen ADDRESS:PORT and --login FILE",
        )
    if parsed.host is not None or parsed.port is not None:
        raise OptionError("found --listen and --host or --port, expected --listen ADDRESS:PORT alone")
    host, port = place_of(parsed.listen)
    return read_settings(parsed.login, host), host, port


def _existing(paths: Sequence[str]) -> Sequence[str]:
    for path in paths:
        if not os.path.isfile(path):
            raise OptionError(
                f"--drift={path}: found no such file, expected a history that `lum drift --history` wrote"
            )
    return paths


def _token(folder: Path) -> str:
    from luminosity.operate.web_server import TOKEN_FILE, token_of

    try:
        return token_of(folder)
    except OSError as error:
        print(
            f"lum ui: the token can't be kept in {folder / TOKEN_FILE} ({error.strerror or error}); it is valid until "
            "this server ends",
            file=sys.stderr,
        )
        return secrets.token_urlsafe()


def _has_screen() -> bool:
    names = ("DISPLAY", "WAYLAND_DISPLAY", "BROWSER")
    return sys.stdout.isatty() and any(os.environ.get(name) for name in names)


def open_beside(options: Sequence[str], *, read_only: bool = False) -> PageBeside:
    """Start the page of the run with these options, print its address, and end it with this process.

    With a terminal, the page stays when the run has ended, until Ctrl-C: its reader wants to see how it ended. Raises
    :class:`luminosity.errors.LuminosityError` if it can't be started.
    """
    from luminosity.operate.page.beside import PageBeside

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--run_dir")
    page = PageBeside(chosen_folder(parser.parse_known_args(options)[0]), read_only=read_only)
    has_terminal = sys.stdin.isatty() and sys.stderr.isatty()
    if page.shared:
        print(f"lum run: {_only_reads(page.shared)}", file=sys.stderr)
    if has_terminal or page.token_file is None:
        print(f"The page of this run is at {page.address}", file=sys.stderr, flush=True)
    else:  # the output may be a log that others read
        address = page.address.partition("?")[0]
        print(f"The page of this run is at {address}?token=TOKEN, with the token in {page.token_file}", file=sys.stderr)
    # Functions of atexit run after the script's traceback was printed, and before this one those of the run's parts.
    atexit.register(_end, page, has_terminal)
    return page


def _end(page: PageBeside, stays: bool) -> None:
    try:
        if stays and page.is_wanted:
            print(f"The page stays at {page.address} until Ctrl-C.", file=sys.stderr, flush=True)
            page.wait()
    except KeyboardInterrupt:
        print(file=sys.stderr)  # the line with ^C ends
    finally:
        page.end()


_METRICS_DESCRIPTION = """\
Print metrics of the newest run of each pipeline, and of the newest tests for
drift, in the text format of Prometheus. `lum ui` serves the same metrics at
/metrics; use this command where no server should run, such as in cron.
"""
_METRICS_EPILOG = """\
examples:
  lum metrics                                 print the metrics
  lum metrics --out /var/lib/node_exporter/luminosity.prom
                                              for node_exporter's textfile
                                              collector; replaced as a whole
  lum metrics --history drift.sqlite          with the newest tests for drift
  lum metrics --rules luminosity.yaml         write alert rules for Prometheus
  lum metrics --dashboard luminosity.json     write a dashboard for Grafana
"""


def _add_metrics(commands: Any) -> None:
    parser = add_command(
        commands, "metrics", "print metrics of runs for Prometheus", _METRICS_DESCRIPTION, _METRICS_EPILOG
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
