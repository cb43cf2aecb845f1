"""``lum run PIPELINE.py [options]``: run a script, or a pipeline in YAML, on ``LuminosityRunner``; or a project."""

from __future__ import annotations

import argparse
import sys
from typing import Any

from luminosity._shared.flags import MODEL_FLAGS, RUNNER_FLAGS, help_text
from luminosity.beam_fixes.lean_beam import import_beam
from luminosity.cli.common.exits import FAILED, WRONG_USE, fail, script_failed
from luminosity.cli.common.scripts import is_yaml, problem, run_script
from luminosity.engine.workers.launcher import warm_up
from luminosity.errors import LuminosityError, OptionError, PipelineFileError

__all__ = ["add_to", "run"]

_DESCRIPTION = """\
Run a script that builds and runs a Beam pipeline. The pipeline runs on
LuminosityRunner, unless the script or --runner names another runner.

All words after the script's name are its sys.argv, as with Python, and Beam's
PipelineOptions reads the options among them. The runner's own options also take
effect if the script passes no options to its pipeline.

PIPELINE may also be a file in Beam's YAML, with a name that ends in .yaml or
.yml: its transforms are Beam's and Luminosity's. For its Jinja variables, there
are Beam's --jinja_variables and --jinja_variable_flags.

PIPELINE may also be a project file, with a name that ends in .toml: it names
several steps with their inputs and outputs. They run in order; a step that is
up to date is skipped. Its options are --force (skip none), --from STEP (begin
there) and --dry-run (only say what would run).

--ui before PIPELINE opens a page of runs, see `lum ui`, and prints its address.
With a terminal the page stays after the run, until Ctrl-C; without one it ends
with the run.
"""
_EPILOG = f"""\
options of the runner:
{help_text(RUNNER_FLAGS)}
options of models, for RunInference and Enrich on any runner:
{help_text(MODEL_FLAGS)}
examples:
  lum run pipeline.py                          run it with the defaults
  lum run pipeline.py --input=in.csv           pass an option to the script
  lum run pipeline.py --cpu_workers=2          use two CPU worker processes
  lum run pipeline.py --debug                  debug it with breakpoint()
  lum run pipeline.yaml --jinja_variables='{{"input": "in.csv"}}'
                                               run a pipeline in YAML
  lum run project.toml                         run what is not up to date
  lum run --ui pipeline.py                     watch it in the browser
"""


def add_to(commands: Any) -> None:
    """Add this command to the subparsers of ``lum``."""
    parser = commands.add_parser(
        "run",
        usage="lum run PIPELINE.py [options]",
        help="run a pipeline: a script, or YAML; or a project of several",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("words", nargs="*", metavar="PIPELINE.py [options]", help="the script, then its options")
    parser.set_defaults(command=lambda parsed: run(parsed.words))


def run(words: list[str]) -> int:
    """Run the script that ``words`` names with the options that follow; return the exit code."""
    with_page = words[:1] == ["--ui"]
    script, *options = words[with_page:] or [""]
    if wrong := problem(script):
        return fail("run", f"{wrong}, expected PIPELINE.py, then options", WRONG_USE)
    if not with_page:
        if "--ui" in options:
            print(
                f"lum run: --ui after {script} belongs to the script; for the page of runs, write it first",
                file=sys.stderr,
            )
        return _run(script, options)
    from luminosity.cli.ui import open_beside

    try:
        page = open_beside(options)
    except LuminosityError as error:
        return fail("run", error, WRONG_USE)
    try:
        return _run(script, options)
    except KeyboardInterrupt:
        page.is_wanted = False
        raise


def _run(script: str, options: list[str]) -> int:
    if script.lower().endswith(".toml"):
        from luminosity.cli.project import run_project

        return run_project(script, options)
    warm_up("auto")  # the worker's imports run while the script is imported
    import_beam()
    try:
        run_script(script, options)
    except LuminosityError as error:
        if is_yaml(script) and isinstance(error, OptionError | PipelineFileError):
            return fail("run", error, WRONG_USE)
        message = "\n".join([str(error), *getattr(error, "__notes__", ())])
        return fail("run", message, FAILED)  # the remedy for Python: the user has the script
    except Exception as error:
        return script_failed(error)
    return 0
