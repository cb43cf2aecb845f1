"""A worker's side: find the host of this run, or start it."""

from __future__ import annotations

import contextlib
import os
import signal
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

from luminosity.errors import HostUnavailable
from luminosity.inference.files.locks import try_exclusive
from luminosity.inference.ipc import logs
from luminosity.inference.ipc.authentication import AuthenticationFailed, NoRoom, is_same_user, prove_as_client
from luminosity.inference.ipc.channel import Channel
from luminosity.inference.ipc.folder import HostFolder
from luminosity.inference.ipc.sockets import close_in_children

__all__ = ["connect", "last_words"]

_MODULE = "luminosity.inference.ipc"
_POLL_S = 0.02
_MOST_REFUSALS = 20
_MOST_KILLED = 5
"""Hosts in a row that a signal ended before they were ready: after that it is no accident."""


def connect(
    run_id: str,
    talk: str,
    *,
    timeout: float = 60.0,
    idle_seconds: float = 2.0,
    environment: Mapping[str, str] | None = None,
) -> Channel:
    """A channel to the host of this run, which the first who calls this starts.

    In the host, the function that ``talk`` names as ``module:function`` is called with the other end of the channel.
    A host that is started here ends when it had no client for ``idle_seconds``, and has the variables of
    ``environment`` besides those of this process. `HostUnavailable` where after ``timeout`` seconds there is none.
    """
    command = [sys.executable, "-u", "-m", _MODULE, run_id, talk, f"--idle_seconds={idle_seconds:g}"]
    return _Search(HostFolder(run_id), command, environment or {}, time.monotonic() + timeout).channel()


def last_words(run_id: str) -> str:
    """The last lines that the host of this run wrote to its standard streams; they may say why it ended."""
    return logs.last_words(HostFolder(run_id).output)


class _Search:
    """For one channel. Several of one process know as little of each other as those of several processes."""

    def __init__(self, folder: HostFolder, command: list[str], environment: Mapping[str, str], deadline: float) -> None:
        self._folder = folder
        self._command = command
        self._environment = environment
        self._deadline = deadline
        self._refusals = 0
        self._killed = 0
        self._obstacle = "nobody listens"

    def channel(self) -> Channel:
        while True:
            self._folder.make()
            with contextlib.suppress(FileNotFoundError):  # a host that leaves removes the folder
                if found := self._try() or self._try_to_start():
                    return found
            self._pause()

    def _try(self) -> Channel | None:
        """None where nobody listens, or nobody has time."""
        secret = self._folder.secret()
        connection = close_in_children(socket.socket(socket.AF_UNIX, socket.SOCK_STREAM))
        try:
            connection.settimeout(self._time_left())
            connection.connect(self._folder.socket)
            if not is_same_user(connection, os.getuid()):
                raise HostUnavailable(f"another user listens at {self._folder.socket}, which only this one should do")
            prove_as_client(connection, secret, self._time_left())
            return Channel(connection)
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return None
        except (NoRoom, BlockingIOError, TimeoutError) as error:
            connection.close()
            self._obstacle = str(error) or "it takes no connection"
            return None
        except (AuthenticationFailed, ConnectionError) as error:
            connection.close()
            self._count_refusal(error)
            return None
        except BaseException:
            connection.close()
            raise

    def _try_to_start(self) -> Channel | None:
        """None where another process is at it."""
        with try_exclusive(self._folder.lock) as is_ours:
            if not is_ours:
                return None
            if found := self._try():  # the one that was at it has just let go
                return found
            with try_exclusive(self._folder.alive) as is_dead:
                pass
            return self._start() if is_dead else None

    def _start(self) -> Channel | None:
        process = self._spawn()
        try:
            while process.poll() is None:
                if found := self._try():
                    return found
                self._pause()
        except BaseException:
            process.kill()
            raise
        self._killed += process.returncode < 0
        if process.returncode > 0 or self._killed > _MOST_KILLED:
            raise HostUnavailable(f"the model host {_ending(process.returncode)} before it was ready{self._words()}")
        return None  # it found another one, or was killed: once more

    def _spawn(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)  # '' is where this process is
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        output = os.open(self._folder.output, flags, 0o600)
        try:
            process = subprocess.Popen(
                self._command,
                stdin=subprocess.DEVNULL,
                stdout=output,
                stderr=output,
                start_new_session=True,
                # Nothing that lies around here comes before what this process imports.
                env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", **self._environment},
            )
        finally:
            os.close(output)
        # It may end long before this process does, and must not stay as a zombie.
        threading.Thread(target=process.wait, name=f"luminosity-wait-{process.pid}", daemon=True).start()
        return process

    def _count_refusal(self, error: Exception) -> None:
        """One may be chance: the host left just then, or another one came, with another secret."""
        self._refusals += 1
        self._obstacle = f"what listens there {error}"
        if self._refusals > _MOST_REFUSALS:
            raise HostUnavailable(
                f"the model host of run {self._folder.run_id} and this process don't recognize each other: it {error}; "
                f"are there two versions of the program that use {self._folder.path}?{self._words()}"
            ) from error

    def _time_left(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    def _pause(self) -> None:
        if time.monotonic() >= self._deadline:
            raise HostUnavailable(
                f"no model host for run {self._folder.run_id} in time: {self._obstacle}{self._words()}"
            )
        time.sleep(_POLL_S)

    def _words(self) -> str:
        words = logs.last_words(self._folder.output)
        return f"; it wrote:\n{words}" if words else ""


def _ending(code: int) -> str:
    if code > 0:
        return f"ended with code {code}"
    with contextlib.suppress(ValueError):
        return f"was ended by {signal.Signals(-code).name}"
    return f"was ended by signal {-code}"
