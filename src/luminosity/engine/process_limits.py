"""Limits that the shell or the system sets for a process (``ulimit``, memory), named in errors that they cause."""

from __future__ import annotations

import contextlib
import errno
import resource
import signal
from collections.abc import Generator

from luminosity._shared.text import ENDED_WHILE_STOPPED, format_bytes
from luminosity.core import machine_ram_bytes
from luminosity.errors import Fix, ResourcesExceeded

__all__ = ["check_address_space", "describe_limits", "explain_exit", "limits_named", "oom_kills"]

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
