"""``lum plan PIPELINE.py [options]``: show how a pipeline, in Python or YAML, would run."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
from pathlib import Path
from typing import TYPE_CHECKING, Any

from luminosity.cli.common.exits import FAILED, WRONG_USE, discard_output, fail
from luminosity.cli.common.options import add_command
from luminosity.cli.common.output import json_text
from luminosity.cli.common.scripts import ending_of, own_options, problem, tell_ending

if TYPE_CHECKING:
    from rich.console import Console

    from luminosity.engine.explain.dryrun import DryRun
    from luminosity.engine.explain.explanation import Explanation
    from luminosity.engine.options import EngineConfig

__all__ = ["add_to", "plan"]


_DESCRIPTION = """\
Show how a pipeline would run on this machine, or on a Ray cluster with
--ray_address: the worker pools and their sizes, the stages and their steps, and
each place where fusion breaks, with the reason.

A script runs, but its pipelines are only planned. Its output goes to standard
error. A pipeline in Beam's YAML is planned as well.
"""
_EPILOG = """\
The script's own options and those of `lum run` follow the script's name. If the
script has its own --dot, --svg, --json or --all, put it after a --.

examples:
  lum plan pipeline.py                        show the plan
  lum plan pipeline.yaml                      the same, of a pipeline in YAML
  lum plan pipeline.py --accelerators=2       plan for two accelerators
  lum plan pipeline.py --ray_address=auto     plan for the cluster of this node
  lum plan pipeline.py --svg plan.svg         draw the plan, too
  lum plan pipeline.py --dot - | dot -Tpdf    pass it to Graphviz
"""


def add_to(commands: Any) -> None:
    """Add this command to the subparsers of ``lum``."""
    parser = add_command(
        commands,
        "plan",
        "show how a pipeline would run",
        _DESCRIPTION,
        _EPILOG,
        usage="lum plan PIPELINE.py [options] [--all] [--dot FILE] [--svg FILE] [--json]",
    )
    _add_options(parser)
    parser.add_argument("words", nargs="*", metavar="PIPELINE.py [options]", help="the script, then its options")
    parser.set_defaults(command=lambda parsed: plan(parsed.words))


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="show every transform that Beam made of each step")
    parser.add_argument("--dot", metavar="FILE", help="write the plan for Graphviz to FILE; - is standard output")
    parser.add_argument("--svg", metavar="FILE", help="draw the plan to FILE; - is standard output")
    parser.add_argument("--json", action="store_true", help="print the plan as JSON instead of text")


def plan(words: list[str]) -> int:
    """Plan the pipelines of the script that ``words`` names; return the exit code."""
    parser = argparse.ArgumentParser(prog="lum plan", add_help=False, allow_abbrev=False)
    _add_options(parser)
    own, rest = own_options(parser, words)
    script, *options = rest or [""]
    if wrong := problem(script):
        return fail("plan", f"{wrong}, expected PIPELINE.py, then options", WRONG_USE)
    if own.dot == own.svg == "-":
        return fail("plan", "--dot and --svg can't both write to standard output; give one of them a file", WRONG_USE)
    if own.json and "-" in (own.dot, own.svg):
        return fail("plan", "--json and a drawing can't both write to standard output; give it a file", WRONG_USE)
    from luminosity.engine.explain.dryrun import dry_runs

    with dry_runs() as runs, contextlib.redirect_stdout(sys.stderr):  # standard output is for the plan
        ending = ending_of(script, options)
    if runs:
        try:
            _show(runs, os.path.basename(script), own)
        except BrokenPipeError:  # the reader has closed the pipe, as in `lum plan … | head`
            discard_output()
        except OSError as error:
            return fail("plan", f"can't write {error.filename or 'to standard output'}: {error.strerror}", FAILED)
    return tell_ending("plan", ending, script, has_pipeline=bool(runs), unseen="not shown") or 0


def _show(runs: list[DryRun], name: str, own: argparse.Namespace) -> None:
    from rich.console import Console

    from luminosity.engine.explain.explain import explain
    from luminosity.engine.explain.export import dot, plan_json
    from luminosity.engine.explain.svg import svg
    from luminosity.engine.explain.text import print_plan

    plans: dict[str, Explanation] = {}
    for number, one in enumerate(runs, start=1):
        title = name if len(runs) == 1 else f"{name}, pipeline {number} of {len(runs)}"
        plans[title] = explain(one.prepared, one.pipeline, is_full=own.all)
        if one.other_runner:
            said = f"{title} is meant for {one.other_runner}; this is how LuminosityRunner would run it"
            print(f"lum plan: {said}", file=sys.stderr)
    if own.json:
        print(json_text([plan_json(explanation, title) for title, explanation in plans.items()]))
    elif "-" not in (own.dot, own.svg):
        console = Console(highlight=False)
        for index, (title, explanation) in enumerate(plans.items()):
            console.print("\n" if index else "", end="")
            print_plan(console, explanation, title)
        _print_hints(console, runs[0].prepared.config)
    for file, draw in ((own.dot, dot), (own.svg, svg)):
        if file == "-":
            sys.stdout.write(draw(plans))
        elif file:
            Path(file).write_text(draw(plans), encoding="utf-8")
    sys.stdout.flush()


def _print_hints(console: Console, config: EngineConfig) -> None:
    """Print which steps a resource hint would help, if a recorded run of the same pipeline shows it."""
    from rich.text import Text

    from luminosity.engine.reporting.run_names import RunName
    from luminosity.operate.advice.rules import hints_for_plan
    from luminosity.runs.records import folder

    helped = hints_for_plan(RunName.of(config.job_name), folder(config.run_dir))
    if helped:
        console.print(Text("\nHints that would help", "bold"))
    for sentence in helped:
        console.print(Text(sentence))
    if helped:
        console.print(Text("`lum advise` says more about the run.", "dim"))
