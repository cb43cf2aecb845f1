"""Prints the description of a job: the containers and hints of its steps, errors and warnings."""

from __future__ import annotations

import sys
import textwrap
from collections.abc import Mapping, Sequence
from typing import TYPE_CHECKING

from rich.console import Console
from rich.table import Table
from rich.text import Text

from luminosity._shared.text import list_some
from luminosity.dataflow.findings import Finding
from luminosity.dataflow.steps import name_steps

if TYPE_CHECKING:
    from luminosity.dataflow.check import CheckedJob

__all__ = ["print_job"]

_MOST_STEPS = 6  # names of steps in a line
_PIPED_WIDTH = 120  # characters a line where there is no terminal


def print_job(job: CheckedJob, script: str) -> None:
    """Print a job that was checked."""
    console = Console(highlight=False, width=None if sys.stdout.isatty() else _PIPED_WIDTH)
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
