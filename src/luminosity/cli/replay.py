"""``lum replay FILE``: run a saved element alone."""

from __future__ import annotations

import argparse
import faulthandler
import os
import pdb
import sys
import traceback
from typing import TYPE_CHECKING, Any

from luminosity.cli.common.exits import FAILED, WRONG_USE, fail
from luminosity.errors import LuminosityError, ReplayError

if TYPE_CHECKING:
    from luminosity.engine.debugging.replay import Output
    from luminosity.engine.debugging.savefile import Manifest

__all__ = ["add_to", "replay"]


_SHOWN = 20  # elements of each step's output

_DESCRIPTION = """\
Run the element that --save_failed saved, alone and in this process: print() and
breakpoint() work. You see its output, or where it fails.

The file contains code that is run. Only replay files from people you trust.
"""
_EPILOG = """\
exit codes:
  0  the element runs through
  1  it fails
  2  the file can't be replayed

examples:
  lum run pipeline.py --save_failed=failed.lum     save the element that fails
  lum replay failed.lum                            run it alone
  lum replay failed.lum --pdb                      debug it where it fails
"""


def add_to(commands: Any) -> None:
    """Add this command to the subparsers of ``lum``."""
    parser = commands.add_parser(
        "replay",
        help="run a saved element alone",
        description=_DESCRIPTION,
        epilog=_EPILOG,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
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
