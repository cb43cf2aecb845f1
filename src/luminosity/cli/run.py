"""``lum run``: run a script, a pipeline in YAML or a project; and ``lum replay FILE``: run a saved element alone."""

from __future__ import annotations

import faulthandler
import os
import pdb
import sys
import traceback
from itertools import takewhile
from typing import TYPE_CHECKING, Any

from luminosity._shared.flags import MODEL_FLAGS, RUNNER_FLAGS, help_text
from luminosity.beam_fixes.lean_beam import import_beam
from luminosity.cli.common.exits import FAILED, WRONG_USE, fail, script_failed
from luminosity.cli.common.options import add_command
from luminosity.cli.common.scripts import is_wrong_file, problem, run_script
from luminosity.engine.workers.launcher import warm_up
from luminosity.errors import LuminosityError, ReplayError

if TYPE_CHECKING:
    from luminosity.engine.debugging.replay import Output
    from luminosity.engine.debugging.savefile import Manifest

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
With --ui --read-only, the page can stop no run and save no savepoint.
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
    """Add both commands to the subparsers of ``lum``."""
    _add_run(commands)
    _add_replay(commands)


def _add_run(commands: Any) -> None:
    parser = add_command(
        commands,
        "run",
        "run a pipeline: a script, or YAML; or a project of several",
        _DESCRIPTION,
        _EPILOG,
        usage="lum run PIPELINE.py [options]",
    )
    parser.add_argument("words", nargs="*", metavar="PIPELINE.py [options]", help="the script, then its options")
    parser.set_defaults(command=lambda parsed: run(parsed.words))


def run(words: list[str]) -> int:
    """Run the script that ``words`` names with the options that follow; return the exit code."""
    of_page = list(takewhile(("--ui", "--read-only").__contains__, words))
    with_page = "--ui" in of_page
    script, *options = words[len(of_page) :] or [""]
    if of_page and not with_page:
        return fail("run", "found --read-only without --ui, expected both: it is about the page", WRONG_USE)
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
        page = open_beside(options, read_only="--read-only" in of_page)
    except LuminosityError as error:
        return fail("run", error, WRONG_USE)
    try:
        return _run(script, options)
    except KeyboardInterrupt:
        page.is_wanted = False
        raise


def _run(script: str, options: list[str]) -> int:
    if script.lower().endswith(".toml"):
        from luminosity.cli.rerun.project import run_project

        return run_project(script, options)
    warm_up("auto")  # the worker's imports run while the script is imported
    import_beam()
    try:
        run_script(script, options)
    except LuminosityError as error:
        if is_wrong_file(error, script):
            return fail("run", error, WRONG_USE)
        message = "\n".join([str(error), *getattr(error, "__notes__", ())])
        return fail("run", message, FAILED)  # the remedy for Python: the user has the script
    except Exception as error:
        return script_failed(error)
    return 0


_SHOWN = 20  # elements of each step's output
_REPLAY_DESCRIPTION = """\
Run the element that --save_failed saved, alone and in this process: print() and
breakpoint() work. You see its output, or where it fails.

The file contains code that is run. Only replay files from people you trust.
"""
_REPLAY_EPILOG = """\
exit codes:
  0  the element runs through
  1  it fails
  2  the file can't be replayed

examples:
  lum run pipeline.py --save_failed=failed.lum     save the element that fails
  lum replay failed.lum                            run it alone
  lum replay failed.lum --pdb                      debug it where it fails
"""


def _add_replay(commands: Any) -> None:
    parser = add_command(commands, "replay", "run a saved element alone", _REPLAY_DESCRIPTION, _REPLAY_EPILOG)
    parser.add_argument("file", metavar="FILE", help="a file that --save_failed wrote")
    parser.add_argument("--pdb", action="store_true", help="open the debugger where it fails")
    parser.set_defaults(command=lambda parsed: replay(parsed.file, with_debugger=parsed.pdb))


def replay(path: str, *, with_debugger: bool) -> int:
    """Replay a file and print its output; return the exit code."""
    from luminosity.engine.debugging.replay import Replay  # imports Beam, which takes a second: --help needs none

    try:
        saved = Replay(path)
        _introduce(saved.manifest)
        try:
            outputs = saved.run()
        except (LuminosityError, KeyboardInterrupt):
            raise
        except BaseException as error:  # user code may call sys.exit
            _report(error, saved.manifest)
            if with_debugger:
                _debug(error)
            return FAILED
    except LuminosityError as error:
        return fail("replay", str(error), WRONG_USE if isinstance(error, ReplayError) else FAILED)
    _show(outputs)
    return 0


def _introduce(manifest: Manifest) -> None:
    kind = "timer" if manifest.timers else "element"
    if manifest.count == 1:
        print(f"1 {kind} of step {manifest.label!r}: {manifest.element}")
    else:
        print(
            f"{manifest.count} {kind}s of step {manifest.label!r}, which fails on all of them together, on none alone"
        )
    print(f"  the run failed with: {manifest.error}")
    if manifest.exit_code is not None:
        print("  it may end this process, too")
        faulthandler.enable()  # prints the stack of a crash
    sys.stdout.flush()


def _show(outputs: list[Output]) -> None:
    from luminosity.engine.workers.failure import describe_element

    print("It runs through.")
    for output in outputs:
        print(f"{output.step!r} outputs {len(output.values):,}:")
        for value in output.values[:_SHOWN]:
            print(f"  {describe_element(value)}")
        if len(output.values) > _SHOWN:
            print("  …")


def _report(error: BaseException, manifest: Manifest) -> None:
    from luminosity.engine.workers.failure import Failure, is_of_main, user_traceback

    trace, below = user_traceback(error)
    shown = traceback.TracebackException(type(error), error, trace)
    del shown.stack[len(shown.stack) - below :]
    print("".join(shown.format()), end="")
    surroundings = manifest.surroundings
    if Failure.of(error).exception == manifest.error:
        print("The same as in the run.")
        if is_of_main(error):
            print(f"This code is part of {surroundings.script or 'the notebook'} itself, which is saved in the file:")
            print("a change to it has no effect here; a change to a module that it imports has.")
    elif os.getcwd() != surroundings.working_directory:
        print(f"Not the same as in the run, whose working directory was {surroundings.working_directory}.")


def _debug(error: BaseException) -> None:
    """Open the debugger like ``pdb.post_mortem``, but in the last frame of the user's code."""
    from luminosity.engine.workers.failure import user_traceback

    trace, below = user_traceback(error)
    debugger = pdb.Pdb()
    debugger.reset()
    if below:
        debugger.cmdqueue.append(f"up {below}")
    debugger.interaction(None, trace)
