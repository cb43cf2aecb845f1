"""What a process can tell about a thread that takes long: its stack, and what it waits for.

A process that runs Python code tells the stacks of its threads itself (:func:`frames_of`). Native code that holds the
interpreter prevents that. Then another process of the machine sends a signal, and the stacks of all threads are written
from C, without the interpreter, into memory that the other process reads (:func:`ask_for_stacks`). Nothing is sent
before a hang is certain, since native code may not expect a signal.
"""

from __future__ import annotations

import contextlib
import faulthandler
import os
import re
import signal
import sys
import threading
import traceback
from collections.abc import Callable, Generator
from dataclasses import dataclass
from types import FrameType

__all__ = [
    "Frames",
    "Wait",
    "ask_for_stacks",
    "frames_of",
    "is_stopped",
    "parse_stacks",
    "read_stacks",
    "stack_text",
    "wait_of",
    "waiting_for",
    "write_stacks_on_signal",
]

_SIGNAL = getattr(signal, "SIGRTMIN", 0) + 9  # real-time signals are hardly used; SIGUSR1 and SIGUSR2 are
_MEMORY_NAME = "luminosity-stacks"
_MOST_DUMP = 200_000  # bytes that are read: faulthandler writes at most 100 threads of 100 frames
_THREAD = re.compile(r"^(?:Current thread|Thread) 0x", re.MULTILINE)
_FRAME = re.compile(r'^  File "(.*)", line (\d+) in (.*)$', re.MULTILINE)

Frames = list[tuple[FrameType, int]]
"""The frames of a thread and their lines, the innermost last."""

_memories: dict[int, int] = {}  # by process id: the descriptor of the memory for stacks; a fork has its parent's


@dataclass(frozen=True)
class Wait:
    """What a thread waits for in another thread or process, and how that one does."""

    what: str  # such as "the model gpt2"
    quiet_seconds: float  # for how long nothing has come of it
    is_loading: bool = False  # whether it prepares itself: that may take long
    pid: int = 0  # of the other process; 0: it is a thread of this one
    state: str = ""  # what is wrong with the other process: "stopped" or "does not answer"
    stack: str = ""  # of the thread that works on it
    location: str = ""  # file and line of the user's code there


_waits: dict[int, Callable[[], Wait]] = {}  # by the id of the thread that waits


@contextlib.contextmanager
def waiting_for(describe: Callable[[], Wait]) -> Generator[None]:
    """Within the context, let others learn what this thread waits for. Another thread may call ``describe``."""
    thread = threading.get_ident()
    _waits[thread] = describe
    try:
        yield
    finally:
        del _waits[thread]


def wait_of(thread: int) -> Wait | None:
    """Return what the thread with this id waits for, if it has said so. May take a few seconds."""
    describe = _waits.get(thread)
    return None if describe is None else describe()


def frames_of(thread: int) -> Frames:
    """Return the frames of a thread of this process; none if it has ended."""
    frame = sys._current_frames().get(thread)  # pyright: ignore[reportPrivateUsage]
    return [] if frame is None else list(traceback.walk_stack(frame))[::-1]


def stack_text(frames: Frames) -> str:
    """Return a stack as text, the innermost frame last. Has no values of variables."""
    summary = traceback.StackSummary.extract(iter(frames), lookup_lines=True)
    return "".join(traceback.format_list(summary)).rstrip("\n")


def write_stacks_on_signal() -> None:
    """Let this process write its stacks when :func:`ask_for_stacks` asks for them. Does nothing where it can't."""
    if not hasattr(os, "memfd_create") or os.getpid() in _memories:
        return
    memory = os.memfd_create(_MEMORY_NAME)
    _memories[os.getpid()] = memory
    faulthandler.register(_SIGNAL, file=memory, all_threads=True, chain=False)


def ask_for_stacks(pid: int) -> int | None:
    """Ask a process of this machine for its stacks. Returns where they will begin for :func:`read_stacks`.

    Returns None, and sends nothing, if the process would not write them: the signal could end it.
    """
    caught = int(_status(pid).get("SigCgt", "0"), 16)
    path = _memory_of(pid)
    if path is None or not caught >> (_SIGNAL - 1) & 1:
        return None
    try:
        size = os.stat(path).st_size
        os.kill(pid, _SIGNAL)
    except OSError:
        return None  # it has ended
    return size


def read_stacks(pid: int, begin: int) -> str:
    """Return the stacks that a process has written since; an empty string if there are none yet."""
    path = _memory_of(pid)
    if path is None:
        return ""
    try:
        with open(path, "rb") as file:
            file.seek(begin)
            return file.read(_MOST_DUMP).decode(errors="replace")
    except OSError:
        return ""  # it has ended


def parse_stacks(dump: str) -> list[list[tuple[str, int, str]]]:
    """Return the stacks in what a process has written: file, line and function, the innermost frame last.

    >>> parse_stacks('Thread 0x1 (most recent first):\\n  File "a.py", line 5 in f\\n  File "b.py", line 7 in g\\n')
    [[('b.py', 7, 'g'), ('a.py', 5, 'f')]]
    """
    parts = _THREAD.split(dump)[1:]
    found = [[(path, int(line), name) for path, line, name in _FRAME.findall(part)][::-1] for part in parts]
    return [stack for stack in found if stack]


def is_stopped(pid: int) -> bool:
    """Return whether a process of this machine is stopped, by a signal or by a debugger."""
    return _status(pid).get("State", "")[:1] in ("T", "t")


def _status(pid: int) -> dict[str, str]:
    try:
        with open(f"/proc/{pid}/status") as file:
            pairs = (line.partition(":") for line in file)
            return {name: value.strip() for name, _, value in pairs}
    except OSError:
        return {}


def _memory_of(pid: int) -> str | None:
    folder = f"/proc/{pid}/fd"
    with contextlib.suppress(OSError):
        for name in os.listdir(folder):
            path = os.path.join(folder, name)
            with contextlib.suppress(OSError):  # it was closed meanwhile
                if _MEMORY_NAME in os.readlink(path):
                    return path
    return None
