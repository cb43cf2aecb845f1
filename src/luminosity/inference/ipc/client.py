"""A client's side: find the serving process of a run, or start it."""

from __future__ import annotations

import contextlib
import os
import signal
import subprocess
import sys
import threading
import time
from collections.abc import Mapping

from luminosity._shared import descendants
from luminosity._shared.model_sizes import NODE_FOLDER_VARIABLE
from luminosity._shared.text import describe_exit
from luminosity.errors import HostUnavailable
from luminosity.inference.files.locks import try_exclusive
from luminosity.inference.ipc.channel import Channel
from luminosity.inference.ipc.folder import HostFolder, last_lines
from luminosity.inference.ipc.sockets import AuthenticationFailed, NoRoom, is_same_user, new_socket, prove_as_client

__all__ = ["connect", "last_output"]

_MODULE = "luminosity.inference.ipc"
_POLL_S = 0.02  # short beside the start of a process, long enough to cost no CPU time
_MOST_REFUSALS = 20  # one refusal may be chance: the host just left, or a new one has another secret
_SHELL_SIGNALS = 128  # a shell adds the signal that ended its command to this
_MOST_KILLED = 5  # hosts in a row that a signal ended before they were ready; more is no accident


def connect(
    run_id: str,
    serve_client: str,
    *,
    timeout: float = 60.0,
    idle_seconds: float = 2.0,
    environment: Mapping[str, str] | None = None,
) -> Channel:
    """Return a channel to the host of this run; the first caller starts the host. Blocks until it is ready.

    Args:
        run_id: hexadecimal digits that all processes of a run know.
        serve_client: ``module:function``, which the host calls with the other end of the channel.
        timeout: seconds after which ``HostUnavailable`` is raised.
        idle_seconds: how long a host that is started here lives without a client.
        environment: variables for a host that is started here, besides those of this process.
    """
    command = [sys.executable, "-u", "-m", _MODULE, run_id, serve_client, f"--idle_seconds={idle_seconds:g}"]
    return _Search(HostFolder(run_id), command, environment or {}, time.monotonic() + timeout).channel()


def last_output(run_id: str) -> str:
    """Return the last lines that the host of this run wrote to its standard streams; they may say why it ended."""
    return last_lines(HostFolder(run_id).output)


def _kill(process: subprocess.Popen[bytes]) -> None:
    """Kill a host that has just been started. It may have a shell above it."""
    with contextlib.suppress(ProcessLookupError):
        os.killpg(process.pid, signal.SIGKILL)  # it leads a session of its own


def _wait(process: subprocess.Popen[bytes]) -> None:
    """Wait for the end of a host, and end what it has started, in case that it was killed."""
    process.wait()
    descendants.end_left_over()


class _Search:
    """Searches a host for one channel. Searches of one process are as independent as those of several processes."""

    def __init__(self, folder: HostFolder, command: list[str], environment: Mapping[str, str], deadline: float) -> None:
        self._folder = folder
        self._command = command
        self._environment = environment
        self._deadline = deadline
        self._refusals = 0
        self._killed = 0
        self._obstacle = "no process listens"

    def channel(self) -> Channel:
        while True:
            self._folder.make()
            with contextlib.suppress(FileNotFoundError):  # A host that exits removes the folder.
                if found := self._try() or self._try_to_start():
                    return found
            self._pause()

    def _try(self) -> Channel | None:
        """Return a channel, or None if no host accepts the connection now."""
        secret = self._folder.secret()
        connection = new_socket()
        try:
            connection.settimeout(self._time_left())
            connection.connect(self._folder.socket)
            if not is_same_user(connection, os.getuid()):
                raise HostUnavailable(
                    f"found a process of another user that listens at {self._folder.socket}, expected one of user "
                    f"{os.getuid()}",
                    fix="set TMPDIR to another folder",
                )
            prove_as_client(connection, secret, self._time_left())
            return Channel(connection)
        except (FileNotFoundError, ConnectionRefusedError):
            connection.close()
            return None
        except (NoRoom, BlockingIOError, TimeoutError) as error:
            connection.close()
            self._obstacle = str(error) or "it accepts no connection"
            return None
        except (AuthenticationFailed, ConnectionError) as error:
            connection.close()
            self._count_refusal(error)
            return None
        except BaseException:
            connection.close()
            raise

    def _try_to_start(self) -> Channel | None:
        """Start a host; return None if another process does that now."""
        with try_exclusive(self._folder.lock) as is_ours:
            if not is_ours:
                return None
            if found := self._try():  # The process that held the lock has just started a host.
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
            _kill(process)
            raise
        code = process.returncode
        if code > _SHELL_SIGNALS and NODE_FOLDER_VARIABLE in os.environ:
            code = _SHELL_SIGNALS - code
        self._killed += code < 0
        if code > 0 or self._killed > _MOST_KILLED:
            exit_words = describe_exit(code)
            raise HostUnavailable(f"the model host {exit_words} before it was ready{self._output()}")
        return None  # It found another host, or was killed: try again.

    def _spawn(self) -> subprocess.Popen[bytes]:
        path = os.pathsep.join(os.path.abspath(entry) for entry in sys.path)  # '' is this process's working folder
        flags = os.O_CREAT | os.O_WRONLY | os.O_TRUNC | os.O_APPEND | os.O_CLOEXEC
        output = os.open(self._folder.output, flags, 0o600)
        command = self._command
        if NODE_FOLDER_VARIABLE in os.environ:
            # Ray kills the children of a worker that ends, and other workers of the node need the host. It kills this
            # shell; the host ends soon after its last client.
            command = ["/bin/sh", "-c", '"$@"; exit $?', "sh", *command]
        try:
            with descendants.fork_lock:
                process = subprocess.Popen(
                    command,
                    stdin=subprocess.DEVNULL,
                    stdout=output,
                    stderr=output,
                    start_new_session=True,
                    # PYTHONSAFEPATH keeps files of the working folder from shadowing what this process imports.
                    env={**os.environ, "PYTHONPATH": path, "PYTHONSAFEPATH": "1", **self._environment},
                )
        finally:
            os.close(output)
        # The host may end long before this process; without a waiting thread it would stay as a zombie.
        threading.Thread(target=_wait, args=(process,), name=f"luminosity-wait-{process.pid}", daemon=True).start()
        return process

    def _count_refusal(self, error: Exception) -> None:
        self._refusals += 1
        self._obstacle = f"the process that listens there {error}"
        if self._refusals > _MOST_REFUSALS:
            raise HostUnavailable(
                f"the model host of run {self._folder.run_id} and this process don't recognize each other: it {error}"
                f"{self._output()}",
                fix=f"check that only one version of the program uses {self._folder.path}",
            ) from error

    def _time_left(self) -> float:
        return max(0.001, self._deadline - time.monotonic())

    def _pause(self) -> None:
        if time.monotonic() >= self._deadline:
            raise HostUnavailable(
                f"no model host for run {self._folder.run_id} in time: {self._obstacle}{self._output()}"
            )
        time.sleep(_POLL_S)

    def _output(self) -> str:
        output = last_lines(self._folder.output)
        return f"; its last output:\n{output}" if output else ""
