"""``lum plan PIPELINE.py [options]``."""

from __future__ import annotations

import argparse
import contextlib
import os
import sys
import traceback
from pathlib import Path
from typing import TYPE_CHECKING, Any

from luminosity.cli.exits import INTERRUPTED, discard_output
from luminosity.cli.run import problem, run_script
from luminosity.errors import LuminosityError
from luminosity.noise import quiet

if TYPE_CHECKING:
    from luminosity.engine.explain.dryrun import DryRun
    from luminosity.engine.explain.explanation import Explanation


_DESCRIPTION = """\
Show how a pipeline would run here, without running it: worker pools and their
sizes, stages and their steps, and each place where fusion breaks, with the
reason. The script runs; its pipelines are planned where it would run them.
What the script prints goes to standard error.
"""
_EXAMPLES = """\
The pipeline's own options and those of `lum run` follow the script's name. A
script that has a --dot, --svg or --all of its own finds it behind a --.

examples:
  lum plan examples/bulk_inference.py
  lum plan pipeline.py --accelerators=2       the pools of another machine
  lum plan pipeline.py --svg plan.svg         draw it
  lum plan pipeline.py --dot - | dot -Tpdf    hand it to Graphviz
"""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "plan",
        usage="lum plan PIPELINE.py [options] [--all] [--dot FILE] [--svg FILE]",
        help="show how a pipeline would run",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    _add_options(parser)
    parser.add_argument("words", nargs="*", metavar="PIPELINE.py [options]", help="the script, then its options")
    parser.set_defaults(command=lambda parsed: plan(parsed.words))


def _add_options(parser: argparse.ArgumentParser) -> None:
    parser.add_argument("--all", action="store_true", help="name every transform that Beam made of each step")
    parser.add_argument("--dot", metavar="FILE", help="write the plan for Graphviz; - is standard output")
    parser.add_argument("--svg", metavar="FILE", help="draw the plan; - is standard output")


def plan(words: list[str]) -> int:
    parser = argparse.ArgumentParser(prog="lum plan", add_help=False, allow_abbrev=False)
    _add_options(parser)
    cut = words.index("--") if "--" in words else len(words)
    own, rest = parser.parse_known_args(words[:cut])
    script, *options = [*rest, *words[cut + 1 :]] or [""]
    if wrong := problem(script):
        return _say(f"{wrong}, expected PIPELINE.py, then options", 2)
    if own.dot == own.svg == "-":
        return _say("--dot and --svg can't both write to standard output; give one of them a file", 2)
    quiet()
    from luminosity.engine.explain.dryrun import dry_runs

    with dry_runs() as runs, contextlib.redirect_stdout(sys.stderr):  # standard output is the plan's
        ending = _run(script, options)
    if runs:
        try:
            _show(runs, os.path.basename(script), own)
        except BrokenPipeError:  # The reader has seen enough, as in `lum plan … | head`.
            discard_output()
        except OSError as error:
            return _say(f"can't write {error.filename or 'to standard output'}: {error.strerror}", 1)
    return _status(ending, script, has_plan=bool(runs))


def _run(script: str, options: list[str]) -> BaseException | None:
    """What ended the script early."""
    try:
        run_script(script, options)
    except BaseException as ending:
        return ending
    return None


def _show(runs: list[DryRun], name: str, own: argparse.Namespace) -> None:
    from rich.console import Console

    from luminosity.engine.explain.drawing.dot import dot
    from luminosity.engine.explain.drawing.svg import svg
    from luminosity.engine.explain.drawing.text import print_plan
    from luminosity.engine.explain.explain import explain

    plans: dict[str, Explanation] = {}
    for number, one in enumerate(runs, start=1):
        title = name if len(runs) == 1 else f"{name}, pipeline {number} of {len(runs)}"
        plans[title] = explain(one.prepared, one.pipeline, is_full=own.all)
        if one.other_runner:
            _say(f"{title} is meant for {one.other_runner}; this is how LuminosityRunner would run it")
    if "-" not in (own.dot, own.svg):
        console = Console(highlight=False)
        for index, (title, explanation) in enumerate(plans.items()):
            console.print("\n" if index else "", end="")
            print_plan(console, explanation, title)
    for file, draw in ((own.dot, dot), (own.svg, svg)):
        if file == "-":
            sys.stdout.write(draw(plans))
        elif file:
            Path(file).write_text(draw(plans), encoding="utf-8")
    sys.stdout.flush()


def _status(ending: BaseException | None, script: str, *, has_plan: bool) -> int:
    """Say what is to be said about the script's ending; the command's own status."""
    if isinstance(ending, KeyboardInterrupt):
        return _say("interrupted", INTERRUPTED)
    if isinstance(ending, LuminosityError):
        return _say(str(ending), 1)
    if isinstance(ending, SystemExit):
        if isinstance(ending.code, str):
            print(ending.code, file=sys.stderr)  # as Python does
        if not has_plan and (ending.code or {"-h", "--help"} & {*sys.argv}):
            return ending.code if isinstance(ending.code, int) else int(bool(ending.code))
    elif ending is not None:
        if not has_plan:
            raise ending
        where = _last_line(ending, script)
        what = "".join(traceback.format_exception_only(ending)).strip()
        return _say(
            f"after that the script ended with {what} ({where}). Nothing was run: that is to be expected where it "
            "looks for results. Pipelines behind that line are not shown."
        )
    if not has_plan:
        return _say(
            f"{script} ran no pipeline, so there is nothing to plan; expected a script that builds one and runs it", 1
        )
    return 0


def _last_line(ending: BaseException, script: str) -> str:
    """The last line of the script, or else of anything, that was on its way when it ended."""
    frames = traceback.extract_tb(ending.__traceback__)
    own = [frame for frame in frames if frame.filename == script] or frames
    return f"{os.path.basename(own[-1].filename)}:{own[-1].lineno}"


def _say(message: str, status: int = 0) -> int:
    print(f"lum plan: {message}", file=sys.stderr)
    return status
