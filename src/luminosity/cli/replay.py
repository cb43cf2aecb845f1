"""``lum replay FILE``."""

from __future__ import annotations

import argparse
import faulthandler
import os
import pdb
import sys
import traceback
from typing import TYPE_CHECKING, Any

from luminosity._text import shorten_repr
from luminosity.cli.exits import INTERRUPTED
from luminosity.errors import LuminosityError, ReplayError
from luminosity.noise import quiet

if TYPE_CHECKING:
    from luminosity.engine.debugging.replay import Output
    from luminosity.engine.debugging.savefile import Manifest

_SHOWN = 20  # of each step's output

_DESCRIPTION = """\
Run, in this process, the element that --save_failed saved: breakpoint() works,
and print prints here. Says what it gives, or where it fails.

The file holds code that is run: replay no file from somebody you do not trust.
"""
_EXAMPLES = """\
examples:
  lum run pipeline.py --save_failed=failed.lum     save the element that fails
  lum replay failed.lum                            run it alone
  lum replay failed.lum --pdb                      look around where it fails
"""


def add_to(commands: Any) -> None:
    parser = commands.add_parser(
        "replay",
        help="run a saved element alone",
        description=_DESCRIPTION,
        epilog=_EXAMPLES,
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument("file", metavar="FILE", help="what --save_failed wrote")
    parser.add_argument("--pdb", action="store_true", help="open the debugger where it fails")
    parser.set_defaults(command=lambda parsed: replay(parsed.file, with_debugger=parsed.pdb))


def replay(path: str, *, with_debugger: bool) -> int:
    quiet()
    from luminosity.engine.debugging.replay import Replay  # imports Beam, which takes a second: not for --help

    try:
        saved = Replay(path)
        _introduce(saved.manifest)
        try:
            outputs = saved.run()
        except (LuminosityError, KeyboardInterrupt):
            raise
        except BaseException as error:  # user code may call sys.exit
            _tell(error, saved.manifest)
            if with_debugger:
                _debug(error)
            return 1
    except LuminosityError as error:
        print(f"lum replay: {error}", file=sys.stderr)
        return 2 if isinstance(error, ReplayError) else 1
    except KeyboardInterrupt:
        print("lum replay: interrupted", file=sys.stderr)
        return INTERRUPTED
    _show(outputs)
    return 0


def _introduce(manifest: Manifest) -> None:
    kind = "timer" if manifest.timers else "element"
    if manifest.count == 1:
        print(f"1 {kind} of step {manifest.label!r}: {manifest.element}")
    else:
        print(f"{manifest.count} {kind}s of step {manifest.label!r}, which fails on all of them but on none alone")
    print(f"  the run failed with: {manifest.error}")
    if manifest.exit_code is not None:
        print("  it may end this process, too")
        faulthandler.enable()  # a crash then tells where it was
    sys.stdout.flush()


def _show(outputs: list[Output]) -> None:
    from luminosity.engine.workers.failure import ELEMENT_CHARACTERS

    print("It runs through.")
    for output in outputs:
        print(f"{output.step!r} gives {len(output.values):,}:")
        for value in output.values[:_SHOWN]:
            print(f"  {shorten_repr(value, ELEMENT_CHARACTERS)}")
        if len(output.values) > _SHOWN:
            print("  …")


def _tell(error: BaseException, manifest: Manifest) -> None:
    from luminosity.engine.workers.failure import Failure, is_of_main, user_traceback

    trace, below = user_traceback(error)
    told = traceback.TracebackException(type(error), error, trace)
    del told.stack[len(told.stack) - below :]
    print("".join(told.format()), end="")
    surroundings = manifest.surroundings
    if Failure.of(error).exception == manifest.error:
        print("The same as in the run.")
        if is_of_main(error):
            print(
                f"This code is part of {surroundings.script or 'the notebook'} itself, which is saved as it was then:"
            )
            print("a change there has no effect here, a change to a module that it imports has.")
    elif os.getcwd() != surroundings.working_directory:
        print(f"Not the same as in the run, whose working directory was {surroundings.working_directory}.")


def _debug(error: BaseException) -> None:
    """As ``pdb.post_mortem``, but in the user's frame where that is not the last."""
    from luminosity.engine.workers.failure import user_traceback

    trace, below = user_traceback(error)
    debugger = pdb.Pdb()
    debugger.reset()
    if below:
        debugger.cmdqueue.append(f"up {below}")
    debugger.interaction(None, trace)
