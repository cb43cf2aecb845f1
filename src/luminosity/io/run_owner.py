"""The process that runs a pipeline, as part of the names of its temporary files and collections.

So another run can tell whether what it finds is left over from a run that was killed, or belongs to one that still
works. The kernel reuses process ids, so the time at which the process started belongs to its identity. A run with a
checkpoint may be continued by another process: its names contain the identity of the run instead.
"""

from __future__ import annotations

import contextlib
import os
import re
from dataclasses import dataclass

from luminosity._shared.text import shorten
from luminosity.core import process_began
from luminosity.runs.run_ids import CheckpointedRun, RunIdentity, machine_name

__all__ = ["RunOwner", "owner_in_name", "owner_of"]

_NAME = re.compile(r"m(?P<machine>[0-9a-f]{6})-p(?P<pid>\d+)-t(?P<started>\d+)(?!\d)")
_COMMAND_CHARACTERS = 80  # enough to recognise a command


@dataclass(frozen=True)
class RunOwner:
    """A process, identified by machine, id and start time.

    >>> owner = RunOwner.current()
    >>> RunOwner.in_name(f".luminosity-write-{owner}-1a2b") == owner, owner.is_alive()
    (True, True)
    """

    machine: str
    pid: int
    started: int  # clock ticks since the machine started; 0 where the system does not tell

    @classmethod
    def current(cls) -> RunOwner:
        """Return this process."""
        return cls.of(os.getpid())

    @classmethod
    def of(cls, pid: int) -> RunOwner:
        """Return a process of this machine."""
        return cls(machine_name(), pid, process_began(pid) or 0)

    @classmethod
    def in_name(cls, name: str) -> RunOwner | None:
        """Return the owner that a name contains, or None if it contains none."""
        found = _NAME.search(name)
        return cls(found["machine"], int(found["pid"]), int(found["started"])) if found else None

    def is_alive(self, folder: str = "") -> bool | None:
        """Return whether the process still runs; None if it ran on another machine. The folder does not matter."""
        if self.machine != machine_name():
            return None
        if self.started:
            return process_began(self.pid) == self.started
        try:
            os.kill(self.pid, 0)
        except ProcessLookupError:
            return False
        except PermissionError:
            return True
        return True

    def is_this_process(self) -> bool:
        """Return whether it is the process that asks."""
        return self == RunOwner.current()

    def describe(self) -> str:
        """Return the process in words, with its command if the system tells it."""
        with contextlib.suppress(OSError):
            with open(f"/proc/{self.pid}/cmdline", "rb") as file:
                command = file.read().replace(b"\0", b" ").decode(errors="replace").strip()
            if command:  # It is empty while the process starts its program.
                return f"process {self.pid} ({shorten(command, _COMMAND_CHARACTERS)})"
        return f"process {self.pid}"

    def __str__(self) -> str:
        return f"m{self.machine}-p{self.pid}-t{self.started}"


def owner_of(identity: RunIdentity) -> RunOwner | CheckpointedRun:
    """Return the owner of what a run is about to write: the run itself if it has a checkpoint, or this process."""
    return identity.run or RunOwner.current()


def owner_in_name(name: str) -> RunOwner | CheckpointedRun | None:
    """Return the owner that a name contains, or None if it contains none."""
    return CheckpointedRun.in_name(name) or RunOwner.in_name(name)
