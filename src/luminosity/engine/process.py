"""What the system does to the process of a run: limits, named in errors that they cause, and signals that end it.

SIGTERM ends a script like Ctrl-C does, and neither can break the wait for an end.
"""

from __future__ import annotations

import contextlib
import errno
import os
import resource
import signal
import sys
import threading
import time
from collections.abc import Callable, Generator
from typing import Any

from luminosity._shared.text import ENDED_WHILE_STOPPED, format_bytes
from luminosity.core import machine_ram_bytes
from luminosity.errors import Fix, ResourcesExceeded

__all__ = [
    "Ending",
    "Terminated",
    "cancel_on_sigterm",
    "check_address_space",
    "describe_limits",
    "explain_exit",
    "limits_named",
    "oom_kills",
]

_LEAST_ADDRESS_SPACE = 2_000_000_000  # bytes: libraries, thread stacks and buffers of a process that runs a pipeline
_MEMORY = {resource.RLIMIT_AS: ("address space", "v"), resource.RLIMIT_DATA: ("data", "d")}
_KIB = 1024  # the unit of ulimit
_FIX = "raise the limit in the shell that starts this: ulimit -v unlimited"
_CRASHES = frozenset([signal.SIGSEGV, signal.SIGBUS, signal.SIGILL, signal.SIGFPE, signal.SIGABRT])
_LIMITS = {signal.SIGXCPU: "CPU time (ulimit -t)", signal.SIGXFSZ: "the size of a file (ulimit -f)"}
_LESS_MEMORY = (
    "let a step hold less at once, use fewer workers (--cpu_workers), or give the step min_ram as a resource hint"
)
_SENDER = "look for what sends it: os.kill in the step's code, a supervisor of processes, or a limit of the machine"
_SEE_LINE = (
    "save the element with --save_failed=FILE; then `lum replay FILE` prints the line of Python at which it happens"
)
_STANDARD_ERROR = 2  # its file descriptor
_CHECK_EVERY_S = 1.0  # how late a waiting thread notices the end if Ctrl-C breaks the lock


def oom_kills() -> int | None:
    """Return a number that grows when the kernel kills a process for lack of memory; None if no counter can be read.

    It is the sum of several counters: control groups count their own processes, ``/proc/vmstat`` all of the machine.
    """
    files = ["/proc/vmstat"]
    with contextlib.suppress(OSError), open("/proc/self/cgroup") as file:
        for line in file:
            _, controllers, path = line.rstrip("\n").split(":", 2)
            for place in dict.fromkeys((path.rstrip("/"), "")):  # in a container, the path may be that outside of it
                if not controllers:
                    files.append(f"/sys/fs/cgroup{place}/memory.events")
                elif controllers == "memory":
                    files.append(f"/sys/fs/cgroup/memory{place}/memory.oom_control")
    counts: list[int] = []
    for path in dict.fromkeys(files):
        with contextlib.suppress(OSError), open(path) as file:
            counts += [int(line.split()[1]) for line in file if line.startswith("oom_kill ")]
    return sum(counts) if counts else None


def explain_exit(code: int, kills_before: int | None, *, is_here: bool = True) -> tuple[str, Fix]:
    """Return the likely cause of a worker's end, given its return code, and what to do about it.

    ``kills_before`` is what :func:`oom_kills` returned when the run began. ``is_here`` says that the worker ran on this
    machine, whose memory and counters are known.

    >>> explain_exit(0, None)[0]
    'Code of the step ended the process, as os._exit(0) does; what the worker had not sent yet is lost.'
    >>> explain_exit(-11, None)[0]
    'A native library that the step uses crashed (SIGSEGV).'
    """
    if code == ENDED_WHILE_STOPPED:
        return "Another program, or code of the step, stopped the process, and the run ended it.", _fix(_SENDER)
    if code >= 0:
        return (
            f"Code of the step ended the process, as os._exit({code}) does; what the worker had not sent yet is lost.",
            _fix("raise an exception instead: its message and its line are then in the error"),
        )
    try:
        number = signal.Signals(-code)
    except ValueError:
        return "Another program, or code of the step, sent the signal.", _fix(_SENDER)
    if number in _CRASHES:
        return f"A native library that the step uses crashed ({number.name}).", _fix(_SEE_LINE)
    if number in _LIMITS:
        return f"The process came to the limit of {_LIMITS[number]}.", _fix("raise the limit")
    if number != signal.SIGKILL:
        return f"Another program, or code of the step, sent {number.name} to the process.", _fix(_SENDER)
    if not is_here:
        return "The process probably ran out of memory on its node, and the kernel killed it.", _fix(_LESS_MEMORY)
    limit, kills_now = format_bytes(machine_ram_bytes()), oom_kills()
    if kills_before is None or kills_now is None:
        cause = (
            f"The process probably ran out of memory, and the kernel killed it: there are {limit} for all processes."
        )
        return cause, _fix(_LESS_MEMORY)
    if kills_now != kills_before:
        cause = f"Memory ran out: the kernel has killed a process for it since the run began. There are {limit} in all."
        return cause, _fix(_LESS_MEMORY)
    cause = (
        "Another program, or code of the step, probably sent SIGKILL: the kernel counts no process that it killed for "
        f"lack of memory since the run began. There are {limit} in all."
    )
    return cause, _fix(_SENDER)


def _fix(advice: str) -> Fix:
    return Fix(advice, command=advice)


def describe_limits() -> str:
    """Return the limits of this process's memory and threads in words, or an empty string if there are none."""
    found = [
        f"{format_bytes(soft)} of {name} (ulimit -{option} {soft // _KIB})"
        for number, (name, option) in _MEMORY.items()
        if (soft := resource.getrlimit(number)[0]) != resource.RLIM_INFINITY
    ]
    return " and ".join(found)


def check_address_space() -> None:
    """Raise ``ResourcesExceeded`` if this process's address space is too small to run a pipeline.

    Threads that can't start in libraries below would make a run hang, or end it with a traceback about something else.
    """
    if 0 <= resource.getrlimit(resource.RLIMIT_AS)[0] < _LEAST_ADDRESS_SPACE:
        raise ResourcesExceeded(
            f"a process may use {describe_limits()}, expected at least {format_bytes(_LEAST_ADDRESS_SPACE)}",
            fix=Fix(_FIX, command=_FIX),
        )


@contextlib.contextmanager
def limits_named() -> Generator[None]:
    """Turn errors of a process that has no memory left for data, threads or libraries into ``ResourcesExceeded``.

    Only if a limit of this process may be the reason; otherwise they stay as they are.
    """
    try:
        yield
    except (MemoryError, RuntimeError, OSError, ImportError) as error:
        limits = describe_limits() if _is_for_lack_of_memory(error) else ""
        if not limits:
            raise
        what = f"{type(error).__name__}: {error}".rstrip(": ")
        raise ResourcesExceeded(
            f"there is no memory left ({what}): a process may use {limits}", fix=Fix(_FIX, command=_FIX)
        ) from error


def _is_for_lack_of_memory(error: BaseException) -> bool:
    """Return whether an error means that memory could not be allocated.

    >>> _is_for_lack_of_memory(RuntimeError("can't start new thread")), _is_for_lack_of_memory(RuntimeError("no"))
    (True, False)
    """
    if isinstance(error, MemoryError) or (isinstance(error, OSError) and error.errno == errno.ENOMEM):
        return True
    text = str(error)
    if isinstance(error, ImportError):
        return "failed to map segment" in text or "annot allocate memory" in text
    return type(error) is RuntimeError and "can't start new thread" in text


class Terminated(SystemExit):
    """Ends the script because of SIGTERM, with the exit code that a shell reports for it.

    Like every ``SystemExit`` it needs no handling: ``finally`` blocks run, and Python ends without a traceback.
    """

    def __init__(self, *_: Any) -> None:
        super().__init__(128 + signal.SIGTERM)


def cancel_on_sigterm(cancel: Callable[[], str]) -> None:
    """Handle SIGTERM from now on: call ``cancel``, then raise :class:`Terminated` in the main thread.

    ``cancel`` returns what happens to the runs, in words; if it returns nothing, there are none, and SIGTERM ends the
    process as without a handler. It must not block or take locks. Does nothing outside the main thread, if the script
    or ``lum`` handles SIGTERM itself, or in a notebook, whose kernel does not end with an exception.
    """
    if threading.current_thread() is not threading.main_thread() or "ipykernel" in sys.modules:
        return
    if signal.getsignal(signal.SIGTERM) != signal.SIG_DFL:
        return
    owner = os.getpid()

    def end(*_: object) -> None:
        if os.getpid() == owner and (what := cancel()):
            os.write(_STANDARD_ERROR, f"terminated: {what}\n".encode())  # print is not safe in a handler
            raise Terminated
        signal.signal(signal.SIGTERM, signal.SIG_DFL)
        os.kill(os.getpid(), signal.SIGTERM)

    signal.signal(signal.SIGTERM, end)


class Ending:
    """An event that is set once, like ``threading.Event``, but which Ctrl-C can't break.

    If Ctrl-C arrives while a waiting thread holds the lock of a ``threading.Event``, the lock is never released, and
    ``wait`` and ``set`` block forever. Here the lock can only be taken after the event was set.

    >>> ending = Ending()
    >>> ending.wait(0)
    False
    >>> ending.set()
    >>> ending.wait(None)
    True
    """

    def __init__(self) -> None:
        self._is_set = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def set(self) -> None:
        """Wake all threads that wait. Call it once."""
        self._is_set = True
        self._lock.release()

    def wait(self, seconds: float | None) -> bool:
        """Wait up to ``seconds``, or without a limit for None; return whether the event is set."""
        until = None if seconds is None else time.monotonic() + seconds
        while not self._is_set:
            left = _CHECK_EVERY_S if until is None else min(_CHECK_EVERY_S, until - time.monotonic())
            if left <= 0:
                return False
            if self._lock.acquire(timeout=left):
                self._lock.release()  # for the next thread; if Ctrl-C prevents it, that thread checks again soon
        return True
