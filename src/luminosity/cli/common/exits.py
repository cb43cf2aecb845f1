"""The ends of commands: exit codes, errors, signals, closed pipes, and output that takes only some characters."""

from __future__ import annotations

import codecs
import contextlib
import gc
import io
import os
import re
import signal
import sys
import threading
from collections.abc import Collection, Generator, Mapping
from types import FrameType
from typing import NoReturn

from luminosity._shared.user_code import from_user_code, is_users
from luminosity.errors import InvalidArgument, InvalidType, LuminosityError, ModelUnavailable, OptionError
from luminosity.runs.manifest.masking import mask_text

__all__ = [
    "DIFFERENT",
    "DRIFT",
    "FAILED",
    "NOT_MET",
    "NOT_READY",
    "TOO_FEW_ROWS",
    "WRONG_USE",
    "cancel_runs",
    "discard_output",
    "end_process",
    "fail",
    "fail_of",
    "interrupted",
    "print_any_character",
    "print_ignoring_closed_pipe",
    "script_failed",
    "set_options",
    "sigterm_as_ctrl_c",
    "unknown_options",
    "was_terminated",
]

FAILED = 1  # the work was started and failed
WRONG_USE = 2  # the command line or the input is wrong; also what argparse exits with
DRIFT = 3  # `lum drift` found drift
DIFFERENT = 3  # `lum rerun`: outputs or, with --check, surroundings are not the same
NOT_MET = 3  # `lum evaluate`: a metric does not meet a requirement
NOT_READY = 3  # `lum export`: the job has errors
TOO_FEW_ROWS = 4  # `lum drift` has too few rows to find drift, however different they are
_INTERRUPTED = 130  # as a shell reports a command that Ctrl-C ended
_TERMINATED = 143  # as a shell reports a command that SIGTERM ended

# Signs of our own texts, and what stands for them if the output takes only ASCII.
_PLAIN = str.maketrans("─│├└┌┐┘┬┴┼▸✗≈•", "-|++++++++>x~*") | str.maketrans(
    {"…": "...", "\u2013": "-", "→": "->", "\u00d7": "x", "·": "-", "≤": "<=", "µ": "u", "²": "^2"}
)
_PLAIN_ERRORS = "luminosity.plain"

_COMMAND_OR_OPTION = re.compile(r"\blum (?P<command>[a-z]+)\b|(?<![\w-])(?P<option>--[a-z][a-z_-]*)")
_options: dict[str, Collection[str]] = {}  # by command

_RETRY_S = 0.05  # a garbage collection is over by then, or the signal is sent once more
_CANCEL_TIMEOUT_S = 15.0  # workers end within a few seconds; after this, the process ends without them


def fail_of(command: str, error: LuminosityError) -> int:
    """Print an error like :func:`fail`, and return the exit code: ``WRONG_USE`` if options or their values are wrong.

    The columns, tests and files that options name belong to them; what the rows hold and a server that is
    away do not.
    """
    is_wrong = isinstance(error, OptionError | InvalidArgument | InvalidType | ModelUnavailable)
    return fail(command, error, WRONG_USE if is_wrong and not error.may_pass else FAILED)


def fail(command: str, error: LuminosityError | str, status: int) -> int:
    """Print ``lum COMMAND: …`` with the error's remedy to standard error, and return ``status``.

    A remedy with an option that this command does not have is left out: an error of reading a table, for example, may
    come from several commands.
    """
    if isinstance(error, LuminosityError):
        advice = error.fix.command if error.fix is not None else ""
        message = error.for_command() if not unknown_options(advice, command) else error.message
    else:
        message = error
    print(f"lum {command}: {mask_text(message)}", file=sys.stderr)
    return status


def script_failed(error: Exception) -> int:
    """Print an exception of the user's script as Python does, from the script's own frames on; return the exit code."""
    trace = from_user_code(error.__traceback__)
    if isinstance(error, SyntaxError) and trace is not None and not is_users(trace.tb_frame):
        trace = None  # the script itself can't be compiled, so it has no frame; the error names the line
    sys.excepthook(type(error), error.with_traceback(trace), trace)
    return FAILED


def unknown_options(advice: str, command: str) -> list[str]:
    """Return the options in ``advice`` that the commands don't have: the command in use, or the one named before them.

    >>> set_options({"enrich": {"--columns", "--rows"}, "drift": {"--rows"}})
    >>> unknown_options("add --columns", "drift"), unknown_options("use lum enrich --columns C", "drift")
    (['--columns'], [])
    """
    found: list[str] = []
    for word in _COMMAND_OR_OPTION.finditer(advice):
        if word["command"]:
            command = word["command"]
        elif (known := _options.get(command)) is not None and word["option"] not in known:
            found.append(word["option"])
    return found


def set_options(options: Mapping[str, Collection[str]]) -> None:
    """Set which options each command has, for :func:`fail`. A command that is not in it may have any."""
    _options.clear()
    _options.update(options)


def print_ignoring_closed_pipe(text: str) -> None:
    """Print ``text``. If the reader has closed the pipe, as ``head`` does, discard it and all further output.

    Output that can't be written for another reason, such as a full disk, is discarded with a line on standard error:
    the work is done, and the exit code tells its result.
    """
    try:
        print(text, flush=True)
    except BrokenPipeError:
        discard_output()
    except OSError as error:
        discard_output()
        print(f"lum: standard output can't be written and is lost: {error.strerror or error}", file=sys.stderr)


def discard_output() -> None:
    """Discard everything that is still written to standard output, after its reader has closed the pipe."""
    os.dup2(os.open(os.devnull, os.O_WRONLY), sys.stdout.fileno())


def interrupted(command: str, detail: str = "") -> int:
    """Print that Ctrl-C or SIGTERM ended the command, and return the exit code for it."""
    word, status = ("terminated", _TERMINATED) if was_terminated() else ("interrupted", _INTERRUPTED)
    return fail(command, f"{word}{detail}", status)


class _Signals:
    """What this process has received."""

    is_terminated = False


def was_terminated() -> bool:
    """Return whether SIGTERM has arrived since the command began."""
    return _Signals.is_terminated


@contextlib.contextmanager
def sigterm_as_ctrl_c() -> Generator[None]:
    """Within the context, let SIGTERM raise ``KeyboardInterrupt``, so that it ends a command like Ctrl-C does."""
    _Signals.is_terminated = False
    if threading.current_thread() is not threading.main_thread():
        yield
        return
    # Not if Ctrl-C is ignored, as in the background of a shell script.
    numbers = [signal.SIGTERM]
    numbers += [signal.SIGINT] if signal.getsignal(signal.SIGINT) is signal.default_int_handler else []
    before = {number: signal.signal(number, _interrupt) for number in numbers}
    try:
        yield
    finally:
        for number, handler in before.items():
            signal.signal(number, handler)


def print_any_character() -> None:
    """Let this process print characters that its output's encoding lacks: as ASCII if they are ours, else escaped.

    Otherwise ``PYTHONIOENCODING=ascii`` or an old locale would end a command with a ``UnicodeEncodeError``.
    """
    codecs.register_error(_PLAIN_ERRORS, _as_plain)
    for stream in (sys.stdout, sys.stderr):
        if not isinstance(stream, io.TextIOWrapper):
            continue  # a test's or a notebook's
        is_utf8 = codecs.lookup(stream.encoding).name == "utf-8"
        # The C locale has surrogateescape, which also fails for all but file names.
        if stream.errors in ("strict", "backslashreplace") or (stream.errors == "surrogateescape" and not is_utf8):
            stream.reconfigure(errors=_PLAIN_ERRORS)


def _as_plain(error: UnicodeError) -> tuple[str, int]:
    """Return what replaces the characters that can't be encoded.

    >>> _as_plain(UnicodeEncodeError("ascii", "a … é", 2, 3, "no"))
    ('...', 3)
    >>> _as_plain(UnicodeEncodeError("ascii", "a … é", 4, 5, "no"))
    ('\\\\xe9', 5)
    """
    if not isinstance(error, UnicodeEncodeError):
        raise error
    text = error.object[error.start : error.end].translate(_PLAIN)
    return text.encode("ascii", "backslashreplace").decode("ascii"), error.end


def end_process(code: int) -> NoReturn:
    """End this process at once, without waiting for threads that still compute.

    Python would free what native libraries such as JAX still use on those threads, and crash.
    """
    for stream in (sys.stdout, sys.stderr):
        with contextlib.suppress(OSError, ValueError):
            stream.flush()
    os._exit(code)


def cancel_runs() -> None:
    """Cancel the runs of this process. Needed if Ctrl-C arrives while the script isn't waiting for its run."""
    if "luminosity.engine.run" in sys.modules:  # otherwise there is no run, and importing Beam takes a second
        from luminosity.engine.run import cancel_all

        cancel_all(_CANCEL_TIMEOUT_S)


def _interrupt(number: int, frame: FrameType | None) -> None:
    _Signals.is_terminated = _Signals.is_terminated or number == signal.SIGTERM
    collecting = {getattr(callback, "__code__", None) for callback in gc.callbacks}
    while frame is not None:
        if frame.f_code in collecting:
            # Python drops exceptions in callbacks of its garbage collector, which JAX has: try again after it.
            threading.Timer(_RETRY_S, os.kill, (os.getpid(), number)).start()
            return
        frame = frame.f_back
    raise KeyboardInterrupt
