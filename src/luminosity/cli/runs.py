"""``lum runs``: list the recorded runs; and ``lum show RUN``: show one."""

from __future__ import annotations

import argparse
import json
import os
import sys
from dataclasses import asdict
from datetime import datetime
from pathlib import Path
from typing import TYPE_CHECKING, Any

from luminosity._shared.user_code import fold
from luminosity.cli.common.options import add_command, add_folder_option, chosen_folder, count
from luminosity.cli.common.output import output_console
from luminosity.events import BundleRetried, BundleStalled, Event, MetricView, StageView, WorkerLost, to_json
from luminosity.runs import records
from luminosity.runs.records import Damaged, Record, find
from luminosity.runs.views import step_lines, words
from luminosity.runs.views.step_times import step_times

if TYPE_CHECKING:  # rich takes a while to import: not for --help
    from rich.table import Table

__all__ = ["add_to", "runs", "show"]
_LIMIT = 20  # runs; about a screen
_HEADS = ("run", "started", "pipeline", "state", "took")
_GAP = 2  # columns between fields
_LEAST_REASON = 12  # columns; a shorter piece of a reason says nothing
_STYLES = {"done": "green", "failed": "red", "cancelled": "yellow", "running": "cyan", "lost": "red"} | {
    "stopped": "yellow",
    "drained": "green",
}
_EPILOG = """\
Runs are recorded in ~/.luminosity/runs, or in the folder that --run_dir or
LUMINOSITY_RUN_DIR names. A run is done, failed, cancelled, running, or lost:
the process of a lost run was killed. A run with --checkpoint_dir may also be
stopped, so that its next start continues it, or drained.

A pipeline is named by --job_name, or else by its script. Pipelines with the
same name in different folders are listed with a part of their folders.

On a terminal you get a table. In a pipe you get one line for each run, with its
fields separated by tabs: those of the table, why it failed, and the folder of
the script.

examples:
  lum runs                      list the newest runs
  lum runs --limit=100          list more of them
  lum runs | grep failed        find the runs that failed
"""


def add_to(commands: Any) -> None:
    """Add both commands to the subparsers of ``lum``."""
    _add_runs(commands)
    _add_show(commands)


def _add_runs(commands: Any) -> None:
    parser = add_command(commands, "runs", "list recorded runs", "List recorded runs, newest first.", _EPILOG)
    parser.add_argument("--limit", type=count, default=_LIMIT, metavar="N", help=f"at most N runs (default: {_LIMIT})")
    add_folder_option(parser)
    parser.set_defaults(command=lambda parsed: runs(chosen_folder(parsed), parsed.limit))


def runs(folder: Path, limit: int) -> int:
    """Print the newest runs in ``folder``; return the exit code."""
    from rich.console import Console

    ids = records.run_ids(folder)
    loaded = [records.load(records.path_of(folder, run_id), only_last=True) for run_id in ids[:limit]]
    found = [record for record in loaded if isinstance(record, Record)]
    if not ids:
        print(f"No run is recorded in {folder} yet.", file=sys.stderr)
    elif sys.stdout.isatty():
        console = Console(highlight=False)
        console.print(_table(found, console.width))
    else:
        for record in found:
            print("\t".join((*_fields(record, record.started.title).values(), record.started.folder)))
    if len(ids) > limit and sys.stdout.isatty():
        print(f"and {len(ids) - limit} older runs; --limit=N lists more", file=sys.stderr)
    for damaged in loaded:
        if isinstance(damaged, Damaged):
            print(f"lum runs: {damaged.path} is damaged: {damaged.reason}", file=sys.stderr)
    return 0


def _fields(record: Record, title: str) -> dict[str, str]:
    started = f"{datetime.fromtimestamp(record.started.started_at):%Y-%m-%d %H:%M}"
    took = words.duration(record.last.seconds) if record.last is not None else ""
    why = record.ended.failure if record.ended is not None and record.state == "failed" else ""
    fields = (record.started.run, started, title, record.state, took)
    return {**dict(zip(_HEADS, fields, strict=True)), "why": why}


def _table(found: list[Record], width: int) -> Table:
    from rich.table import Table
    from rich.text import Text

    titles = words.titles([record.started for record in found])
    rows = [_fields(record, title) for record, title in zip(found, titles, strict=True)]
    widths = {head: max(len(head), *(len(row[head]) for row in rows)) + _GAP for head in _HEADS}
    if width < sum(widths.values()):
        del widths["started"]  # the run's id contains it
    room = width - sum(widths.values())
    table = Table(box=None, pad_edge=False, padding=(0, _GAP, 0, 0))
    for head in widths:
        table.add_column(head, no_wrap=True, justify="right" if head == "took" else "left")
    table.add_column(no_wrap=True)
    for row in rows:
        reason = words.shortened(row["why"], room) if room >= _LEAST_REASON else ""
        cells = [Text(row[head], style=_STYLES[row[head]] if head == "state" else "") for head in widths]
        table.add_row(*cells, Text(reason, style="dim"))
    return table


_MOST_HAPPENINGS = 20  # lines
_MOST_STEPS = 12  # lines
_MOST_STALLS = 3  # bundles that hang, each with its stack
_MOST_FRAME_LINES = 8  # of a traceback: its end, which is the user's own code
_LEAST_SHARE = 0.01  # of the time of all steps: a step with less is not listed
_LEAST_S = 0.001  # for which a snapshot counts, even if it is the only one
_SHOW_EPILOG = """\
You get the run's summary (time, pools, models, memory, and what your code
counted with beam.metrics.Metrics), a table of its stages with their elements
and what they waited for, the steps that took most time, and its retries and
lost workers. What hangs, and where a failed run failed, comes first.

examples:
  lum show last                       show the newest run
  lum show 20260301T101500-4f2a9c     show the run with this id, see `lum runs`
  lum show 4f2a9c                     the start or end of an id is enough
  lum show last --traceback           print the whole traceback of a failure
  lum show last --json                print it all as JSON
  lum show last --manifest            print what the run was made from
"""


def _add_show(commands: Any) -> None:
    parser = add_command(commands, "show", "show a recorded run", "Show a recorded run.", _SHOW_EPILOG)
    parser.add_argument("run", metavar="RUN", help="the id of a run, its unique start or end, or last")
    parser.add_argument("--json", action="store_true", help="print the whole record as JSON, with all metrics")
    add_folder_option(parser)
    parser.add_argument("--manifest", action="store_true", help="print the run's manifest, see `lum rerun`, as JSON")
    parser.add_argument("--traceback", action="store_true", help="print the whole traceback with which the run failed")
    parser.set_defaults(command=_command)


def _command(parsed: argparse.Namespace) -> int:
    folder = chosen_folder(parsed)
    record = find(folder, parsed.run)
    if parsed.manifest:
        from luminosity.runs.manifest.manifest import load

        print(json.dumps(load(folder, record.started.run).to_json(), indent=2))
        return 0
    if parsed.traceback:
        found = record.ended.traceback if record.ended is not None else ""
        print(found.rstrip() or f"run {record.started.run} has no traceback: it is {record.state}")
        return 0
    return show(record, parsed.json)


def show(record: Record, as_json: bool = False) -> int:
    """Print a recorded run; return the exit code."""
    from rich.text import Text

    if as_json:
        print(json.dumps(_data(record), indent=2))
        return 0
    from luminosity.runs.views.plain import summary  # it imports numpy, which `lum runs` does not need

    console = output_console()
    started = f"{datetime.fromtimestamp(record.started.started_at):%Y-%m-%d %H:%M:%S}"
    console.print(Text(f"run {record.started.run}, started {started}{_origin(record)}"))
    for line in _first(record):
        console.print(Text(line, style="bold red" if not line.startswith(" ") else ""))
    if record.ended is not None:
        console.print(summary(record.started, record.ended))
    else:
        console.print(Text(f"{record.started.title}  {_unfinished(record)}", style="bold"))
        for version in dict.fromkeys(words.model_version(each) for each in record.started.models):
            console.print(Text(f"version {version}"))
        for view in step_lines.kafka_of(record.last) if record.last is not None else ():
            console.print(Text(f"kafka {step_lines.sentence(view)}"))
        for view in step_lines.models_of(record.last) if record.last is not None else ():
            console.print(Text(f"model {step_lines.sentence(view)}"))
    console.print()
    console.print(_stages(record))
    if (steps := _steps(record)) is not None:
        console.print()
        console.print(steps)
    happened = [text for event in record.happenings if (text := _happening(event))]
    if happened:
        console.print()
    for text in happened[:_MOST_HAPPENINGS]:
        console.print(Text(text))
    shown = (BundleRetried.__name__, BundleStalled.__name__, WorkerLost.__name__)
    of_kind = record.left_out_of
    left_out = sum(of_kind.get(kind, 0) for kind in shown) if of_kind else record.left_out
    more = max(0, len(happened) - _MOST_HAPPENINGS) + left_out
    if more > 0:
        console.print(f"and {more} more")
    return 0


def _first(record: Record) -> list[str]:
    """Return what a reader must know first: where a run hangs, or at which element and line it has failed."""
    ended = record.ended
    if ended is not None and ended.state == "failed":
        about = [f"failed in step {ended.step!r}"] if ended.step else []
        about += [f"  element: {ended.element}"] if ended.element else []
        about += [f"  at {ended.place}"] if ended.place else []
        frames = fold(ended.traceback).splitlines() if about and ended.traceback else []
        return [*about, *(f"  {line}" for line in frames[-_MOST_FRAME_LINES:])]
    if ended is not None or record.last is None:
        return []
    lines: list[str] = []
    stacks = {(e.stall.step, e.stall.worker): e for e in record.happenings if isinstance(e, BundleStalled)}
    stalls = [stall for stage in record.last.stages for stall in stage.stalls if stall.is_stalled]
    for stall in sorted(stalls, key=lambda each: -each.seconds)[:_MOST_STALLS]:
        lines.append(words.stall(stall))
        event = stacks.get((stall.step, stall.worker))
        if event is not None and event.traceback:
            lines += [f"  {line}" for line in event.traceback.splitlines()[-_MOST_FRAME_LINES:]]
    return lines


def _data(record: Record) -> dict[str, Any]:
    """Return the record for ``json.dumps``: its events, and the metrics of user code with all their fields."""
    ended = record.ended
    return {
        "run": record.started.run,
        "name": record.started.name,
        "job": record.started.job,
        "folder": record.started.folder,
        "state": record.state,
        "seconds": record.last.seconds if record.last is not None else 0.0,
        "failure": ended.failure if ended is not None else "",
        "metrics": [_metric(view) for view in ended.metrics] if ended is not None else [],
        "metrics_left_out": ended.metrics_left_out if ended is not None else 0,
        "started": to_json(record.started),
        "last": to_json(record.last) if record.last is not None else None,
        "steps": [asdict(each) for each in step_times(record.started, record.last)],
        "happenings": [to_json(event) for event in record.happenings],
    }


def _metric(view: MetricView) -> dict[str, Any]:
    names = {"kind": view.kind, "step": view.step, "namespace": view.namespace, "name": view.name}
    if view.kind != "distribution":
        return {**names, "value": view.value}
    return {**names, "count": view.count, "sum": view.value, "min": view.min, "max": view.max, "mean": view.mean}


def _origin(record: Record) -> str:
    """Return where the run's script is, if the record says so."""
    name, folder = record.started.name, record.started.folder
    return f", of {os.path.join(folder, name)}" if folder and name[:4] != "lum " else f" in {folder}" if folder else ""


def _unfinished(record: Record) -> str:
    seen = f", last seen after {words.duration(record.last.seconds)}" if record.last is not None else ""
    if record.state == "running":
        return f"running{seen}"
    return f"lost{seen}: its process ended before the run did"


def _stages(record: Record) -> Table:
    from rich.table import Table
    from rich.text import Text

    table = Table(box=None, pad_edge=False)
    table.add_column("stage", overflow="fold")  # columns of text share what the numbers leave
    table.add_column("pool", no_wrap=True)
    for name in ("elements", "work"):
        table.add_column(name, no_wrap=True, justify="right")
    has_streams = any(stage.is_stream for stage in record.started.stages)
    if has_streams:
        table.add_column("stream", overflow="fold")
    table.add_column("its time went to", overflow="fold")
    last = {view.id: view for view in record.last.stages} if record.last is not None else {}
    for stage in record.started.stages:
        view = last.get(stage.id)
        table.add_row(
            Text(stage.label),
            Text(stage.pool),
            words.number(view.elements) if view is not None else "",
            words.duration(view.busy_seconds) if view is not None else "",
            *([_stream(record, view)] if has_streams else []),
            _shares(record, stage.id),
        )
    return table


def _steps(record: Record) -> Table | None:
    """Return a table of the steps that took most time; None if the record does not have the time of steps."""
    from rich.table import Table
    from rich.text import Text

    times = [each for each in step_times(record.started, record.last) if each.share >= _LEAST_SHARE][:_MOST_STEPS]
    if not times:
        return None
    table = Table(box=None, pad_edge=False)
    table.add_column("step", overflow="fold")
    for name in ("elements out", "time", "of all steps", "an element"):
        table.add_column(name, no_wrap=True, justify="right")
    for each in times:
        table.add_row(
            Text(each.step),
            words.number(each.elements) if each.elements else "",
            words.duration(each.seconds),
            words.percent(each.share),
            f"{words.milliseconds(each.seconds / each.elements)} ms" if each.elements else "",
        )
    return table


def _stream(record: Record, view: StageView | None) -> str:
    """Return rate, lag, backlog and late data of a stage of a stream, over the whole run."""
    if view is None or view.stream is None or record.last is None:
        return ""
    return " · ".join(words.stream_parts(view, seconds=record.last.seconds)[1:])


def _shares(record: Record, stage_id: str) -> str:
    """Return the states of a stage before it was done, by the time for which snapshots saw them."""
    times: dict[str, float] = {}
    before = 0.0
    for snapshot in record.snapshots:
        for view in snapshot.stages:
            if view.id == stage_id and view.status != "done":
                # Without the time of a stall, which differs in each snapshot.
                status = words.doing(view) or words.status(view)
                times[status] = times.get(status, 0.0) + max(snapshot.seconds - before, _LEAST_S)
        before = snapshot.seconds
    longest = sorted(times.items(), key=lambda each: -each[1])[:3]
    return ", ".join(f"{status} {words.percent(s / sum(times.values()))}" for status, s in longest)


def _happening(event: Event) -> str:
    after = words.duration(event.seconds)
    if isinstance(event, BundleRetried):
        return f"after {after}, step {event.step!r} failed, attempt {event.tries}: {event.exception}"
    if isinstance(event, BundleStalled):
        place = f", at {event.stall.place}" if event.stall.place else ""
        return f"after {after}, {event.message}{place}"
    if isinstance(event, WorkerLost):
        where = f" on node {event.node[:8]}" if event.node else ""
        what = f"worker {event.worker} of pool {event.pool!r}{where} {event.reason}"
        return f"after {after}, {what}; it had {event.bundles} bundle(s)"
    return ""
