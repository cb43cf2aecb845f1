"""``lum export dataflow PIPELINE.py [options]``: describe a pipeline as a job of Dataflow, and check it."""

from __future__ import annotations

import argparse
import contextlib
import json
import os
import sys
import textwrap
from collections.abc import Mapping, Sequence
from pathlib import Path
from typing import TYPE_CHECKING, Any

from luminosity._shared.shared_files import replace_file
from luminosity._shared.text import list_some
from luminosity.cli.common.exits import FAILED, NOT_READY, WRONG_USE, discard_output, fail
from luminosity.cli.common.options import add_command
from luminosity.cli.common.output import output_console
from luminosity.cli.common.scripts import ending_of, own_options, problem, tell_ending

if TYPE_CHECKING:
    from rich.console import Console

    from luminosity.dataflow.check import CheckedJob
    from luminosity.dataflow.job import CapturedPipeline
    from luminosity.dataflow.steps import Finding

__all__ = ["add_to", "export"]

_DATAFLOW = "dataflow"
_RUNNER = "DataflowRunner"
_JOB_FILE = "job.json"
_DESCRIPTION = """\
Describe a pipeline as a job of Dataflow and check the description, without a
network and without credentials. Nothing is run, and nothing is sent.

The script runs, but its pipeline is only translated, as Beam's DataflowRunner
does it. The options are those that you would pass to the script: --project,
--region, --temp_location, --sdk_container_image and others.

It says which container and resource hints each step has, and what would fail or
have no effect there: hints, options, local files, missing libraries.
"""
_EPILOG = f"""\
With --out, FOLDER gets {_JOB_FILE}, the body of the request that creates the job
(projects.locations.jobs.create), and pipeline.pb, the pipeline in Beam's format,
with the environments and hints of its steps. With errors, nothing is written.
If the script has its own --out, put it after a --.

exit codes:
  0  no errors were found; there may be warnings
  1  the script failed, or it runs no pipeline
  2  the command line is wrong, or FOLDER has other files
  3  the job has errors

examples:
  lum export dataflow p.py --project=shop --region=europe-west4 \\
    --temp_location=gs://shop/temp --sdk_container_image=REGISTRY/shop
                                              check it
  lum export dataflow p.py … --out job        and write the description
"""
_MOST_STEPS = 6  # names of steps in a line


def add_to(commands: Any) -> None:
    """Add this command to the subparsers of ``lum``."""
    parser = add_command(
        commands,
        "export",
        "check a pipeline for Dataflow, and describe its job",
        _DESCRIPTION,
        _EPILOG,
        usage=f"lum export {_DATAFLOW} PIPELINE.py [options] [--out FOLDER]",
    )
    _add_options(parser)
    parser.add_argument(
        "words", nargs="*", metavar=f"{_DATAFLOW} PIPELINE.py [options]", help="the engine, the script, its options"
    )
    parser.set_defaults(command=lambda parsed: export(parsed.words))


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--out", metavar="FOLDER", help="write the description to FOLDER, new or of an earlier export")


def export(words: list[str]) -> int:
    """Describe the pipeline of the script that ``words`` names, and check it; return the exit code."""
    parser = argparse.ArgumentParser(prog="lum export", add_help=False, allow_abbrev=False)
    _add_options(parser)
    own, rest = own_options(parser, words)
    engine, script, *options = [*rest, *[""] * (2 - len(rest))]
    if engine != _DATAFLOW:
        found = f"found {engine!r}" if engine else "found no engine"
        return fail("export", f"{found}, expected {_DATAFLOW}, then PIPELINE.py and options", WRONG_USE)
    if wrong := problem(script):
        return fail("export", f"{wrong}, expected {_DATAFLOW} PIPELINE.py, then options", WRONG_USE)
    folder = Path(own.out) if own.out else None
    if folder is not None and (there := _foreign_files(folder)):
        return fail(
            "export", f"--out {folder}: found {there}, expected a new folder or that of an earlier export", WRONG_USE
        )
    from luminosity.dataflow.job import captured_pipelines

    with captured_pipelines() as captured, contextlib.redirect_stdout(sys.stderr):
        ending = ending_of(script, options, _RUNNER)
    code = tell_ending("export", ending, script, has_pipeline=bool(captured), unseen="not checked")
    return code if code is not None else _report(captured, script, options, folder)


def _report(captured: list[CapturedPipeline], script: str, options: list[str], folder: Path | None) -> int:
    from luminosity.dataflow.check import check_job

    jobs = [check_job(each, script, options) for each in captured]
    try:
        for job in jobs:
            _print_job(job, os.path.basename(script))
        sys.stdout.flush()
    except BrokenPipeError:  # the reader has closed the pipe, as in `lum export … | head`
        discard_output()
    if folder is not None and len(jobs) > 1:
        return fail("export", f"{script} runs {len(jobs)} pipelines, expected one for --out", WRONG_USE)
    if any(job.has_errors for job in jobs):
        return NOT_READY
    if folder is not None:
        try:
            _write(jobs[0], folder)
        except OSError as error:
            return fail("export", f"can't write {error.filename or folder}: {error.strerror}", FAILED)
        print(f"\nWrote {folder / _JOB_FILE} and {folder / _pipeline_file()}.")
    return 0


def _write(job: CheckedJob, folder: Path) -> None:
    folder.mkdir(parents=True, exist_ok=True)
    body = json.dumps(job.job, indent=2, sort_keys=True, default=str) + "\n"
    for name, content in ((_pipeline_file(), job.pipeline), (_JOB_FILE, body.encode())):
        replace_file(folder / name, content)


def _foreign_files(folder: Path) -> str:
    """Return a name in the folder that no export has written, or the folder's own if it is a file."""
    if folder.exists() and not folder.is_dir():
        return "a file"
    ours = {_JOB_FILE, _pipeline_file()}
    ours |= {f"{name}.unfinished" for name in ours}
    return (
        next((each.name for each in sorted(folder.iterdir()) if each.name not in ours), "") if folder.exists() else ""
    )


def _pipeline_file() -> str:
    from luminosity.dataflow.job import PIPELINE_FILE

    return PIPELINE_FILE


def _print_job(job: CheckedJob, script: str) -> None:
    """Print the containers and hints of a job's steps, errors and warnings."""
    from rich.table import Table
    from rich.text import Text

    from luminosity.dataflow.steps import name_steps

    console = output_console()
    kind = "streaming" if job.is_streaming else "batch"
    groups = _groups(job)
    count = f"{len(job.steps)} steps in {len(groups)} environment" + "s" * (len(groups) != 1)
    console.print(Text(f"{script}: the {kind} job {job.name} of Dataflow, {count}. Nothing was sent."))
    every = [step.name for step in job.steps]
    images = sorted({image for _, image in groups})
    table = Table("steps", "resource hints", box=None, pad_edge=False, header_style="dim", padding=(0, 2, 0, 0))
    if len(images) > 1:
        table.add_column("container")
    else:
        console.print(Text(f"container: {list_some(images, 1)}"))
    for column in table.columns:
        column.overflow = "fold"
    for (hints, image), names in groups.items():
        steps = list_some(name_steps(names, every), _MOST_STEPS)
        table.add_row(*map(Text, [steps, hints or "none", image][: len(table.columns)]))
    console.print()
    console.print(table)
    for title, style, is_error in (("Errors", "bold red", True), ("Warnings", "bold yellow", False)):
        some = [finding for finding in job.findings if finding.is_error == is_error]
        if some:
            console.print(Text(f"\n{title}", style))
        for finding in some:
            _print_finding(console, finding, every)
    if not job.findings:
        console.print(Text("\nNothing is wrong with it, as far as this can be seen from here.", "green"))


def _groups(job: CheckedJob) -> Mapping[tuple[str, str], list[str]]:
    """Return the names of the steps by what they have in common: hints and container."""
    groups: dict[tuple[str, str], list[str]] = {}
    for step in job.steps:
        groups.setdefault((step.asks_for, step.image or "not a container"), []).append(step.name)
    return dict(sorted(groups.items()))


def _print_finding(console: Console, finding: Finding, every: Sequence[str]) -> None:
    from rich.text import Text

    from luminosity.dataflow.steps import name_steps

    steps = list_some(name_steps(finding.steps, every), _MOST_STEPS)
    for text, indent, style in (
        (f"{steps}: {finding.message}." if steps else f"{finding.message}.", "- ", ""),
        (f"To fix this: {finding.fix}.", "  ", "dim"),
    ):
        wrapped = textwrap.fill(
            text,
            console.width,
            initial_indent=indent,
            subsequent_indent="  ",
            break_on_hyphens=False,
            break_long_words=False,
        )
        console.print(Text(wrapped, style), soft_wrap=True)
