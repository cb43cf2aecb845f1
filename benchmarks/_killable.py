"""A script in a process group of its own, all of which can be killed at once."""

from __future__ import annotations

import contextlib
import os
import re
import signal
import subprocess
import sys
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import psutil

_POLL_S = 0.02
_LONGEST_S = 900.0  # until something happens that a benchmark waits for


class Killable:
    """A process with a script, as leader of a new group. Use it as a context: it is killed at its end."""

    def __init__(self, output: Path, *arguments: str) -> None:
        """Start this script again, with other arguments. ``output`` gets what it prints."""
        self._output = output
        self._started_at = time.monotonic()
        with open(output, "wb") as file:
            self._process = subprocess.Popen(
                [sys.executable, sys.argv[0], *arguments],
                stdout=file,
                stderr=subprocess.STDOUT,
                stdin=subprocess.DEVNULL,
                start_new_session=True,
            )

    def __enter__(self) -> Killable:
        return self

    def __exit__(self, *error: object) -> None:
        self.kill()

    @property
    def output(self) -> str:
        """What the process has printed."""
        return self._output.read_text(errors="replace")

    @property
    def seconds(self) -> float:
        """The time since the process was started."""
        return time.monotonic() - self._started_at

    @property
    def cpu_seconds(self) -> float:
        """The CPU time of the process itself, without its children."""
        return sum(psutil.Process(self._process.pid).cpu_times()[:2])

    def memory_mb(self, name: str) -> float:
        """Return the resident memory of the process now (``VmRSS``) or at its peak (``VmHWM``)."""
        status = Path(f"/proc/{self._process.pid}/status").read_text()
        return int(re.findall(rf"{name}:\s+(\d+) kB", status)[0]) / 1000

    def wait_for(self, is_there: Callable[[], Any], what: str, every_s: float = _POLL_S) -> float:
        """Wait until a condition holds, and return the seconds since the process was started."""
        while not is_there():
            if self._process.poll() is not None or self.seconds > _LONGEST_S:
                raise RuntimeError(f"found no {what} after {self.seconds:.0f} s:\n{self.output[-5_000:]}")
            time.sleep(every_s)
        return self.seconds

    def wait(self) -> float:
        """Wait for the end of the process, which must succeed, and return its seconds."""
        if status := self._process.wait(_LONGEST_S):
            raise RuntimeError(f"the process ended with status {status}:\n{self.output[-5_000:]}")
        return self.seconds

    def kill(self) -> None:
        """Kill the process, its workers, and all others that it has started."""
        if self._process.poll() is not None:
            return
        family = psutil.Process(self._process.pid).children(recursive=True)
        os.killpg(self._process.pid, signal.SIGKILL)
        for each in family:
            with contextlib.suppress(psutil.NoSuchProcess):
                each.kill()
        self._process.wait()
        psutil.wait_procs(family, timeout=30)
