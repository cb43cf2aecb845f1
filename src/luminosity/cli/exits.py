"""The ends of commands: exit codes, errors on standard error, interruptions, closed pipes."""

from __future__ import annotations

import os
import signal
import sys

from luminosity.errors import LuminosityError

__all__ = [
    "DRIFT",
    "FAILED",
    "INTERRUPTED",
    "TOO_FEW_ROWS",
    "WRONG_USE",
    "cancel_runs",
    "discard_output",
    "fail",
    "print_ignoring_closed_pipe",
    "treat_sigterm_as_ctrl_c",
]

FAILED = 1  # the work was started and failed
WRONG_USE = 2  # the command line or the input is wrong; also what argparse exits with
DRIFT = 3  # `lum drift` found drift
TOO_FEW_ROWS = 4  # `lum drift` has too few rows to find drift, however different they are
INTERRUPTED = 130  # as a shell reports a command that Ctrl-C ended

_CANCEL_TIMEOUT_S = 15.0  # workers end within a few seconds; after this, the process ends without them


def fail(command: str, error: LuminosityError | str, status: int) -> int:
    """Print ``lum COMMAND: …`` with the error's remedy to standard error, and return ``status``."""
    message = error.for_command() if isinstance(error, LuminosityError) else error
    print(f"lum {command}: {message}", file=sys.stderr)
    return status


def print_ignoring_closed_pipe(text: str) -> None:
    """Print ``text``. If the reader has closed the pipe, as ``head`` does, discard it and all further output."""
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard_output()


def discard_output() -> None:
    """Discard everything that is still written to standard output, after its reader has closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def treat_sigterm_as_ctrl_c() -> None:
    """Let SIGTERM raise ``KeyboardInterrupt``, so that it ends a command like Ctrl-C does."""
    signal.signal(signal.SIGTERM, _interrupt)


def cancel_runs() -> None:
    """Cancel the runs of this process. Needed if Ctrl-C arrives while the script isn't waiting for its run."""
    from luminosity.engine.run import cancel_all

    cancel_all(_CANCEL_TIMEOUT_S)


def _interrupt(*_: object) -> None:
    raise KeyboardInterrupt
