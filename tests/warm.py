"""Starts scripts and commands such as ``lum`` in processes that have Beam imported already.

``python -m luminosity.cli.main …`` takes two seconds of imports before it does anything. A template process imports
Beam, pyarrow and this package once, and forks for each command. The fork is a process like any other: it has its own
arguments, environment, folder, output and exit code, gets signals, and starts its own fork server for workers.
A command that ``add_command`` writes gets its process from the same template, also if a shell starts it.

Use ``subprocess`` if a test is about the start of a process: what it imports, its limits, or its output's encoding.
"""

from __future__ import annotations

import atexit
import gc
import importlib
import json
import os
import runpy
import select
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import warnings
from collections.abc import Mapping
from pathlib import Path
from typing import IO, Any

__all__ = ["WarmProcess", "add_command", "run_module"]

# Nothing here starts a thread, which a fork would lose, and nothing here imports an accelerator library.
_IMPORTED = (
    "luminosity",  # first: it drops a warning of Beam's
    "apache_beam",
    "luminosity.cli.bench",
    "luminosity.cli.stop",
    "luminosity.cli.describe",
    "luminosity.cli.drift.command",
    "luminosity.cli.enrich.enrich",
    "luminosity.cli.evaluate.evaluate",
    "luminosity.cli.plan",
    "luminosity.cli.run",
    "luminosity.cli.runs",
    "luminosity.cli.serve",
    "luminosity.engine.explain.dryrun",
    "luminosity.engine.runner",
    "luminosity.inference.run_inference",
    "luminosity.io.read_table",
    "luminosity.io.write_table",
    "pyarrow.parquet",
    "rich.console",
)
_POLL_S = 0.01  # short beside any command
_START_TIMEOUT_S = 240.0  # of the template and of a fork, on a busy machine
_REQUEST_SIZE = 1 << 20  # the arguments and the environment fit


def run_module(
    module: str,
    *words: str,
    cwd: Path | None = None,
    env: Mapping[str, str] | None = None,
    input: str = "",
    timeout: float = 280,
) -> subprocess.CompletedProcess[str]:
    """Do what ``python -m module words`` does, wait for its end, and return its exit code and output.

    A ``module`` that ends with ``.py`` is a script.
    """
    with (
        tempfile.TemporaryFile("w+") as stdin,
        tempfile.TemporaryFile("w+") as stdout,
        tempfile.TemporaryFile("w+") as stderr,
    ):
        stdin.write(input)
        stdin.seek(0)
        process = WarmProcess(module, *words, cwd=cwd, env=env, stdin=stdin, stdout=stdout, stderr=stderr)
        try:
            code = process.wait(timeout)
        except subprocess.TimeoutExpired:
            process.kill()
            raise
        for file in (stdout, stderr):
            file.seek(0)
        return subprocess.CompletedProcess([module, *words], code, stdout.read(), stderr.read())


# Asks the template for a process, passes signals on to it, and ends as it ends.
_COMMAND = """#!{python} -IS
import json, os, signal, socket, sys
ours, theirs = socket.socketpair()
with socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as control:
    control.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, {request_size})
    control.connect({address!r})
    request = dict(module={module!r}, words=sys.argv[1:], cwd=os.getcwd(), env=dict(os.environ))
    socket.send_fds(control, [json.dumps(request).encode()], [0, 1, 2, theirs.fileno()])
theirs.close()
with ours.makefile() as answers:
    pid = int(answers.readline())
    for number in (signal.SIGINT, signal.SIGTERM):
        signal.signal(number, lambda number, _: os.kill(pid, number))
    code = int(answers.readline())
if code < 0:
    signal.signal(-code, signal.SIG_DFL)
    os.kill(os.getpid(), -code)
sys.exit(code)
"""


def add_command(folder: Path, name: str, module: str) -> None:
    """Write a command that does what ``python -m module`` does. It works as long as this process lives."""
    _template()
    command = folder / name
    command.write_text(
        _COMMAND.format(python=sys.executable, address=_Template.address, module=module, request_size=_REQUEST_SIZE)
    )
    command.chmod(0o755)


class WarmProcess:
    """A running ``python -m module words``, forked from the template. Its owner waits for it or kills it."""

    def __init__(
        self,
        module: str,
        *words: str,
        cwd: Path | None = None,
        env: Mapping[str, str] | None = None,
        stdin: IO[Any] | None = None,
        stdout: IO[Any] | int | None = None,
        stderr: IO[Any] | int | None = None,
        start_new_session: bool = False,
    ) -> None:
        request = {
            "module": module,
            "words": list(words),
            "cwd": str(cwd or Path.cwd()),
            "env": dict(os.environ if env is None else env),
            "start_new_session": start_new_session,
        }
        self.args = [module, *words]
        self.returncode: int | None = None
        self._status, theirs = socket.socketpair()
        with theirs, open(os.devnull) as nothing:
            streams = (
                nothing if stdin is None else stdin,
                1 if stdout is None else stdout,
                2 if stderr is None else stderr,
            )
            numbers = [each if isinstance(each, int) else each.fileno() for each in streams]
            socket.send_fds(_template(), [json.dumps(request).encode()], [*numbers, theirs.fileno()])
        self._received = b""
        self._status.settimeout(_START_TIMEOUT_S)
        self.pid = int(self._read_line())

    def poll(self) -> int | None:
        """Return the exit code, negative if a signal ended the process; None while it runs."""
        if self.returncode is None and select.select([self._status], [], [], 0)[0]:
            self.returncode = int(self._read_line())
            self._status.close()
        return self.returncode

    def wait(self, timeout: float | None = None) -> int:
        """Wait for the end of the process, and return its exit code."""
        deadline = None if timeout is None else time.monotonic() + timeout
        while (code := self.poll()) is None:
            if deadline is not None and time.monotonic() > deadline:
                raise subprocess.TimeoutExpired(self.args, timeout or 0)
            select.select([self._status], [], [], _POLL_S)
        return code

    def send_signal(self, number: int) -> None:
        """Send a signal to the process, unless it has ended."""
        if self.poll() is None:
            os.kill(self.pid, number)

    def terminate(self) -> None:
        """Send SIGTERM."""
        self.send_signal(signal.SIGTERM)

    def kill(self) -> None:
        """Send SIGKILL."""
        self.send_signal(signal.SIGKILL)

    def _read_line(self) -> bytes:
        while b"\n" not in self._received:
            chunk = self._status.recv(100)
            if not chunk:
                raise ChildProcessError("the template process has ended")
            self._received += chunk
        line, _, self._received = self._received.partition(b"\n")
        return line


class _Template:
    """The connection to the template process of this process, once one is needed."""

    connection: socket.socket | None = None
    owner = 0  # a fork of this process starts its own
    address = ""  # where the template also listens, for the commands of ``add_command``


def _template() -> socket.socket:
    if _Template.connection is None or _Template.owner != os.getpid():
        ours, theirs = socket.socketpair(socket.AF_UNIX, socket.SOCK_SEQPACKET)
        for end in (ours, theirs):
            end.setsockopt(socket.SOL_SOCKET, socket.SO_SNDBUF, _REQUEST_SIZE)
        folder = tempfile.mkdtemp(prefix="warm-")
        _Template.address = f"{folder}/socket"
        with theirs, socket.socket(socket.AF_UNIX, socket.SOCK_SEQPACKET) as listener:
            listener.bind(_Template.address)
            listener.listen()
            process = subprocess.Popen(
                [sys.executable, "-m", "tests.warm", str(theirs.fileno()), str(listener.fileno())],
                cwd=Path(__file__).resolve().parent.parent,
                pass_fds=[theirs.fileno(), listener.fileno()],
                stdin=subprocess.DEVNULL,
                stdout=subprocess.DEVNULL,
            )
        _Template.connection, _Template.owner = ours, os.getpid()
        atexit.register(_end, ours, process, os.getpid(), folder)
    return _Template.connection


def _end(connection: socket.socket, process: subprocess.Popen[bytes], owner: int, folder: str) -> None:
    if os.getpid() == owner:
        connection.close()  # which ends the template
        process.wait(timeout=60)
        shutil.rmtree(folder)


# ---- what follows runs in the template process


def _serve(control: socket.socket, listener: socket.socket) -> dict[str, Any]:
    """Fork for each request. Returns in the forked process, with its request; never in the template."""
    waking, woken = socket.socketpair()
    for end in (waking, woken):
        end.setblocking(False)
    signal.signal(signal.SIGINT, signal.SIG_IGN)  # Ctrl-C is for the tests
    signal.signal(signal.SIGCHLD, lambda *_: None)
    signal.set_wakeup_fd(waking.fileno(), warn_on_full_buffer=False)
    running: dict[int, socket.socket] = {}
    while True:
        ready, _, _ = select.select([control, listener, woken], [], [])
        if woken in ready:
            woken.recv(4096)
            _reap(running)
        if control in ready:
            message, numbers, _, _ = socket.recv_fds(control, _REQUEST_SIZE, 4)
            if not message:
                os._exit(0)
        elif listener in ready:
            with listener.accept()[0] as command:
                message, numbers, _, _ = socket.recv_fds(command, _REQUEST_SIZE, 4)
            if not message:
                continue  # the command was killed before it could ask
        else:
            continue
        status = socket.socket(fileno=numbers.pop())
        with warnings.catch_warnings():
            warnings.simplefilter("ignore", DeprecationWarning)  # of Python 3.12, about numpy's threads
            pid = os.fork()
        if pid:
            for number in numbers:
                os.close(number)
            running[pid] = status
            continue
        signal.set_wakeup_fd(-1)
        signal.signal(signal.SIGCHLD, signal.SIG_DFL)
        signal.signal(signal.SIGINT, signal.default_int_handler)
        request = json.loads(message)
        if request.get("start_new_session"):
            os.setsid()  # before the test knows the process, which it may kill with its group
        status.sendall(f"{os.getpid()}\n".encode())
        for each in (control, listener, waking, woken, status, *running.values()):
            each.close()
        for ours, number in enumerate(numbers):
            os.dup2(number, ours)  # sys.stdin, sys.stdout and sys.stderr use these
            os.close(number)
        return request


def _reap(running: dict[int, socket.socket]) -> None:
    while running:
        pid, status = os.waitpid(-1, os.WNOHANG)
        if pid == 0:
            return
        with running.pop(pid) as connection:
            try:
                connection.sendall(f"{os.waitstatus_to_exitcode(status)}\n".encode())
            except ConnectionError:
                continue  # a test that does not wait for its process


def _main() -> None:
    for module in _IMPORTED:
        importlib.import_module(module)
    gc.freeze()  # otherwise each fork would look through all of it when it ends, and so copy it
    request = _serve(*(socket.socket(fileno=int(number)) for number in sys.argv[1:]))
    # The template's own streams may seek, which pipes can't.
    sys.stdin, sys.stdout = os.fdopen(0, closefd=False), os.fdopen(1, "w", closefd=False)
    sys.stderr = os.fdopen(2, "w", buffering=1, errors="backslashreplace", closefd=False)
    os.environ.clear()
    os.environ.update(request["env"])
    os.chdir(request["cwd"])
    sys.path[0] = request["cwd"]  # as with ``python -m``
    sys.argv = [request["module"], *request["words"]]
    if request["module"].endswith(".py"):
        runpy.run_path(request["module"], run_name="__main__")
    else:
        runpy.run_module(request["module"], run_name="__main__", alter_sys=True)


if __name__ == "__main__":
    _main()
