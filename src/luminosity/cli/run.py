"""``lum run PIPELINE.py [options]``: run a script, or a pipeline in YAML, on ``LuminosityRunner``; or a project."""

from __future__ import annotations

import argparse
import contextlib
import os
import runpy
import sys
from collections.abc import Generator
from typing import Any

from luminosity._shared.flags import MODEL_FLAGS, RUNNER_FLAGS, help_text
from luminosity.beam_fixes.lean_beam import import_beam
from luminosity.cli.exits import FAILED, WRONG_USE, fail, script_failed
from luminosity.engine.workers.launcher import warm_up
from luminosity.errors import LuminosityError, OptionError, PipelineFileError

__all__ = ["add_to", "is_yaml", "own_options", "problem", "run", "run_script"]

_RUNNER = "luminosity.LuminosityRunner"

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
    from luminosity.cli.ui.beside_run import open_beside

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
        from luminosity.cli.project.command import run_project

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


def run_script(script: str, options: list[str], runner: str = _RUNNER) -> None:
    """Run ``script`` as Python would, with ``options`` as its command line; build and run a pipeline in YAML.

    Pipelines run on ``runner``, unless ``options`` or the script name another one.
    """
    runner = _apply(options, runner)
    sys.argv = [script, *options]
    sys.path.insert(0, os.path.dirname(os.path.abspath(script)))
    with _runner_by_default(runner):
        if is_yaml(script):
            from luminosity.beam_yaml.pipeline_file import PipelineFile

            PipelineFile(script, options).run()
        else:
            runpy.run_path(script, run_name="__main__")


@contextlib.contextmanager
def _runner_by_default(runner: str) -> Generator[None]:
    """Within the context, ``runner`` is the default of ``--runner`` in each parser that has it: Beam's, a script's.

    The option is not added to ``sys.argv``: a script may count its arguments, or take all of them for its own.
    """
    parse = argparse.ArgumentParser.parse_known_args

    def parse_with_default(self: Any, args: Any = None, namespace: Any = None) -> Any:
        option = self._option_string_actions.get("--runner")
        if option is not None and option.nargs is None and (option.choices is None or runner in option.choices):
            option.default, option.required = runner, False
        return parse(self, args, namespace)

    argparse.ArgumentParser.parse_known_args = parse_with_default
    try:
        yield
    finally:
        argparse.ArgumentParser.parse_known_args = parse


def is_yaml(script: str) -> bool:
    """Return whether a file's name says that it is a pipeline in YAML."""
    return script.lower().endswith((".yaml", ".yml"))


def own_options(parser: argparse.ArgumentParser, words: list[str]) -> tuple[argparse.Namespace, list[str]]:
    """Return a command's own options among ``words``, and the other words. All that follows ``--`` is the script's."""
    cut = words.index("--") if "--" in words else len(words)
    own, rest = parser.parse_known_args(words[:cut])
    return own, [*rest, *words[cut + 1 :]]


def problem(script: str) -> str:
    """Return what is wrong with the word in the script's place, or an empty string."""
    if not script:
        return "found no script"
    if script.startswith("-"):
        return f"found {script} before the script"
    if os.path.isdir(script):
        return f"{script} is a folder"
    return "" if os.path.exists(script) else f"{script}: no such file"


def _apply(options: list[str], runner: str) -> str:
    """Make the runner's options among ``options`` the defaults of all pipelines; return the default runner's name."""
    from apache_beam.options.pipeline_options import StandardOptions

    from luminosity.runner_options import LuminosityOptions

    parser = argparse.ArgumentParser(add_help=False, allow_abbrev=False)
    parser.add_argument("--runner", default=runner)
    for flag in RUNNER_FLAGS:
        if flag.metavar:
            parser.add_argument(f"--{flag.name}", action="append" if flag.is_list else "store")
        else:
            parser.add_argument(f"--{flag.name}", action="store_true", default=None)
    known = vars(parser.parse_known_args(options)[0])
    StandardOptions.DEFAULT_RUNNER = named = known.pop("runner")
    LuminosityOptions.defaults.update({name: value for name, value in known.items() if value is not None})
    return named
