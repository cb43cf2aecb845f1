"""Measures a whole process from its start to its exit, with all processes that it starts: seconds, CPU, memory."""

from __future__ import annotations

import contextlib
import ctypes
import os
import re
import select
import signal
import subprocess
import time
from collections.abc import Callable, Iterator, Mapping, Sequence
from pathlib import Path

import psutil

Costs = dict[str, float]  # by the names below
SECONDS, RUN, CPU, PSS, PROCESSES = "seconds", "run s", "CPU s", "PSS MB", "processes"

_TIMEOUT_S = 300.0  # many times what any side takes, for a busy machine
_LOOK_S = 0.02  # between two looks at the output
_SAMPLE_S = 0.1  # between two looks at memory; each takes a few milliseconds
_STREAM_S = 4.0  # how long a stream goes on after its first output, for its second worker to have work
_ORPHANS_S = 10.0  # from the end of a process to the end of what it has started
_KILLED_S = 30.0  # until a killed process is gone, on a busy machine
_OUTPUT_SHOWN = 5_000  # characters of a process that has failed
_INTERRUPTED = 130  # the exit code after Ctrl-C
_PR_SET_CHILD_SUBREAPER = 36


def measure(
    command: Sequence[str],
    folder: Path,
    check: Callable[[str], None],
    environment: Mapping[str, str] | None = None,
    with_memory: bool = False,
) -> Costs:
    """Run a command in a folder, let ``check`` look at its output, and return what it took.

    If it prints a line such as ``run s: 1.23``, which is what its pipeline took without imports, that is returned, too.
    Memory is the largest sum of all processes' proportional set sizes. Looking at it takes a little time itself.
    """
    with _Running(command, folder, environment or {}) as running:
        costs: Costs = {}
        if with_memory:
            while not running.has_ended(_SAMPLE_S):
                running.sample(costs)
        while not running.has_ended(1.0):
            pass
        costs |= {SECONDS: running.seconds, CPU: running.reap(0)}
        running.checked(check)
        if printed := re.search(rf"^{RUN}: ([\d.]+)$", running.output, re.MULTILINE):
            costs[RUN] = float(printed[1])
    return costs


def measure_stream(command: Sequence[str], folder: Path, check: Callable[[str], None], first: str) -> Costs:
    """Measure a process without an end up to the output ``first``, and its memory some seconds longer; then Ctrl-C."""
    with _Running(command, folder, {}) as running:
        costs: Costs = {}
        while first not in running.output:
            if running.has_ended(_LOOK_S):
                raise running.failed("it ended")
        costs |= {SECONDS: running.seconds, CPU: running.cpu_s}
        while running.seconds < costs[SECONDS] + _STREAM_S:
            if running.has_ended(_SAMPLE_S):
                raise running.failed("it ended")
            running.sample(costs)
        running.interrupt()
        while not running.has_ended(1.0):
            pass
        running.reap(_INTERRUPTED)
        running.checked(check)
    return costs


class _Running:
    """A process and all its descendants. None of them is left at the end of the context."""

    def __init__(self, command: Sequence[str], folder: Path, environment: Mapping[str, str]) -> None:
        # Processes whose parent has ended become children of this one, so that none is lost, nor its CPU time.
        if ctypes.CDLL(None, use_errno=True).prctl(_PR_SET_CHILD_SUBREAPER, 1, 0, 0, 0):
            raise OSError(ctypes.get_errno(), "this process can't adopt orphans")
        self._others = {child.pid for child in psutil.Process().children()}
        self._command = command
        self._output = folder / "output.txt"
        with open(self._output, "wb") as output:
            self._began = time.perf_counter()
            self._ended_at: float | None = None
            self._process = subprocess.Popen(
                command,
                cwd=folder,
                env={**os.environ, **environment},
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=subprocess.STDOUT,
            )
        self._end = os.pidfd_open(self._process.pid)
        self._poll = select.poll()
        self._poll.register(self._end, select.POLLIN)

    def __enter__(self) -> _Running:
        return self

    def __exit__(self, *error: object) -> None:
        os.close(self._end)
        if list(self._family()):
            self._kill()

    @property
    def output(self) -> str:
        """What all of them have printed."""
        return self._output.read_text(errors="replace")

    @property
    def seconds(self) -> float:
        """The time since the start, up to the end."""
        return (self._ended_at or time.perf_counter()) - self._began

    @property
    def cpu_s(self) -> float:
        """The CPU time until now of a process that runs, and of all others."""
        found = 0.0
        for each in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                found += sum(each.cpu_times()[:4])  # its own and that of its children that have ended
        return found

    def has_ended(self, within_s: float) -> bool:
        """Wait so long for the end of the process, and return whether it has come."""
        if self._poll.poll(1000 * within_s):
            self._ended_at = self._ended_at or time.perf_counter()
            return True
        if self.seconds > _TIMEOUT_S:
            raise self.failed(f"it did not end within {_TIMEOUT_S:.0f} s")
        return False

    def sample(self, costs: Costs) -> None:
        """Note the memory and the number of the processes, if there is more than before."""
        sizes: list[int] = []
        for each in self._family():
            with contextlib.suppress(psutil.NoSuchProcess):
                sizes.append(each.memory_full_info().pss)
        costs[PSS] = max(costs.get(PSS, 0), sum(sizes) / 1e6)
        costs[PROCESSES] = max(costs.get(PROCESSES, 0), len(sizes))

    def interrupt(self) -> None:
        """Do what Ctrl-C does."""
        os.kill(self._process.pid, signal.SIGINT)  # Popen would take its exit code, and the CPU time with it

    def reap(self, expected: int) -> float:
        """Wait until all processes have ended, check the exit code of the first, and return the CPU time of all."""
        found = 0.0
        deadline = time.monotonic() + _ORPHANS_S
        while left := self._children():
            for child in left:
                pid, status, usage = os.wait4(child.pid, os.WNOHANG)
                if pid:
                    found += usage.ru_utime + usage.ru_stime
                if pid == self._process.pid:
                    self._process.returncode = os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                names = ", ".join(_name(each) for each in self._family())
                raise self.failed(f"{_ORPHANS_S:.0f} s after its end these run: {names}")
            time.sleep(_LOOK_S)
        if self._process.returncode != expected:
            raise self.failed(f"found exit code {self._process.returncode}, expected {expected}")
        return found

    def checked(self, check: Callable[[str], None]) -> None:
        """Let a function look at the output, and show the output if it is wrong."""
        try:
            check(self.output)
        except Exception as error:
            raise self.failed(f"its result is wrong: {error}") from error

    def failed(self, why: str) -> RuntimeError:
        """Return the error to raise, with the end of the output."""
        return RuntimeError(f"{' '.join(self._command)}: {why}\n{self.output[-_OUTPUT_SHOWN:]}")

    def _children(self) -> list[psutil.Process]:
        return [child for child in psutil.Process().children() if child.pid not in self._others]

    def _family(self) -> Iterator[psutil.Process]:
        for child in self._children():
            yield child
            with contextlib.suppress(psutil.NoSuchProcess):
                yield from child.children(recursive=True)

    def _kill(self) -> None:
        deadline = time.monotonic() + _KILLED_S
        while family := list(self._family()):
            for each in family:
                with contextlib.suppress(psutil.NoSuchProcess):
                    each.kill()
            for child in self._children():
                pid, status, _ = os.wait4(child.pid, os.WNOHANG)
                if pid == self._process.pid:
                    self._process.returncode = os.waitstatus_to_exitcode(status)
            if time.monotonic() > deadline:
                raise TimeoutError(f"{', '.join(map(_name, family))} can't be killed")
            time.sleep(_LOOK_S)


def _name(process: psutil.Process) -> str:
    with contextlib.suppress(psutil.Error):
        return f"{process.pid} ({' '.join(process.cmdline())[:80]}, {process.status()})"
    return str(process.pid)
