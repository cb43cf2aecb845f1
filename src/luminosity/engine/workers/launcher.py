"""Start and end worker processes, from the runner's side."""

from __future__ import annotations

import atexit
import contextlib
import json
import os
import socket
import subprocess
import sys
import threading
from collections.abc import Callable
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import asdict
from typing import Any, Protocol

from luminosity.engine.workers.request import WorkerRequest
from luminosity.errors import WorkerStartFailed

_START_TIMEOUT_S = 60.0
_END_TIMEOUT_S = 5.0

OnExit = Callable[[int], None]  # gets the exit code; negative: the signal that ended it


class Process(Protocol):
    """A worker process as the runner sees it."""

    @property
    def pid(self) -> int: ...

    def kill(self) -> None: ...


class Launcher(Protocol):
    def start(self, request: WorkerRequest, on_exit: OnExit) -> Process: ...


def launcher(method: str) -> Launcher:
    """``fork``, ``spawn``, or ``auto``: fork where that is safe."""
    if method == "auto":
        method = "spawn" if sys.platform == "darwin" else "fork"
    return ForkServer.shared() if method == "fork" else SpawnLauncher()


def warm_up(method: str) -> None:
    """Begin, in the background, what makes starting the first worker slow: a process that imports Beam.

    Called before a pipeline's options are known. Where the command line says ``--debug`` no worker is to be expected;
    one that is needed all the same starts later.
    """
    if "--debug" in sys.argv:
        return
    threading.Thread(target=launcher, args=(method,), name="luminosity-warm-up", daemon=True).start()


class _ForkedProcess:
    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid = pid
        self._server = server

    def kill(self) -> None:
        self._server.kill(self.pid)


class ForkServer:
    """The runner's end of the process in :mod:`luminosity.engine.workers.forkserver`.

    One serves all runs of this process: importing Beam is most of what starting a worker would cost.
    """

    _shared: ForkServer | None = None
    _shared_lock = threading.Lock()

    @classmethod
    def shared(cls) -> ForkServer:
        """The one of this process, started on first use and again if it has died."""
        with cls._shared_lock:
            if cls._shared is None or not cls._shared.is_alive():
                cls._shared = cls()
                atexit.register(cls._shared.close)
            return cls._shared

    def __init__(self) -> None:
        control, theirs = socket.socketpair()
        read_end, self._lifeline = os.pipe()
        self._owner = os.getpid()
        self._process = subprocess.Popen(
            [sys.executable, "-m", "luminosity.engine.workers.forkserver", str(theirs.fileno()), str(read_end)],
            pass_fds=[theirs.fileno(), read_end],
            stdin=subprocess.DEVNULL,
            # BLAS threads would make it unsafe to fork; a worker's share of cores is set when it starts.
            env={**os.environ, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": os.pathsep.join(filter(None, sys.path))},
        )
        theirs.close()
        os.close(read_end)
        self._control = control
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._starting: dict[str, tuple[Future[int], OnExit]] = {}  # by worker
        self._on_exit: dict[int, OnExit] = {}
        self._is_closed = False
        threading.Thread(target=self._listen, name="luminosity-forkserver", daemon=True).start()

    def is_alive(self) -> bool:
        return self._owner == os.getpid() and not self._is_closed and self._process.poll() is None

    def start(self, request: WorkerRequest, on_exit: OnExit) -> Process:
        line = json.dumps({"start": asdict(request)})
        started: Future[int] = Future()
        with self._lock:
            if self._is_closed:
                raise WorkerStartFailed("the process that starts workers has ended; a new run starts another")
            self._starting[request.worker_id] = started, on_exit
        try:
            self._send(line)
            return _ForkedProcess(started.result(timeout=_START_TIMEOUT_S), self)
        except (OSError, FutureTimeoutError) as error:
            raise WorkerStartFailed(f"the process that starts workers does not answer: {error!r}") from error
        finally:
            with self._lock:
                self._starting.pop(request.worker_id, None)

    def kill(self, pid: int) -> None:
        # Where it can't be reached it has ended, and its workers with it.
        with contextlib.suppress(OSError):
            self._send(json.dumps({"kill": pid}))

    def _send(self, line: str) -> None:
        with self._send_lock:  # a line is longer than what is written at once
            self._control.sendall(line.encode() + b"\n")

    def close(self) -> None:
        """End it and its workers."""
        if self._owner != os.getpid():
            return  # a fork of the process that owns it
        self._is_closed = True
        os.close(self._lifeline)
        self._control.shutdown(socket.SHUT_RDWR)
        try:
            self._process.wait(_END_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_TIMEOUT_S)

    def _listen(self) -> None:
        try:
            with self._control.makefile() as lines:
                for line in lines:
                    self._hear(json.loads(line))
        except OSError as error:
            reason = str(error)
        else:
            reason = "its connection closed"
        with self._lock:
            self._is_closed = True
            for started, _ in self._starting.values():
                started.set_exception(WorkerStartFailed(f"the process that starts workers ended: {reason}"))
            self._starting.clear()
        for on_exit in list(self._on_exit.values()):
            on_exit(1)
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)  # or it would be there as a zombie, for which a notebook's kernel waits

    def _hear(self, message: dict[str, Any]) -> None:
        if "started" in message:
            with self._lock:
                waiting = self._starting.pop(message["worker"], None)
            if waiting is None:
                self.kill(message["started"])  # nobody waits for it any more
                return
            started, on_exit = waiting
            self._on_exit[message["started"]] = on_exit
            started.set_result(message["started"])
        elif "failed" in message:
            with self._lock:
                waiting = self._starting.pop(message["worker"], None)
            if waiting is not None:
                waiting[0].set_exception(WorkerStartFailed(f"no process can be forked: {message['failed']}"))
        elif "ended" in message and (on_exit := self._on_exit.pop(message["ended"], None)) is not None:
            on_exit(message["code"])


class SpawnLauncher:
    """A fresh interpreter for each worker: slower to start, and safe where forking is not."""

    def start(self, request: WorkerRequest, on_exit: OnExit) -> Process:
        request_end, our_end = os.pipe()
        lifeline_end, lifeline = os.pipe()
        process = subprocess.Popen(
            [sys.executable, "-m", "luminosity.engine.workers", str(request_end), str(lifeline_end)],
            pass_fds=[request_end, lifeline_end],
            stdin=subprocess.DEVNULL,
            env={**request.environment, "PYTHONPATH": os.pathsep.join(filter(None, request.import_path))},
        )
        os.close(request_end)
        os.close(lifeline_end)

        def wait() -> None:
            code = process.wait()
            os.close(lifeline)
            on_exit(code)

        threading.Thread(target=wait, name=f"luminosity-wait-{process.pid}", daemon=True).start()
        # One that has died already is no other failure than one that dies later: its exit tells.
        with contextlib.suppress(BrokenPipeError), os.fdopen(our_end, "w") as file:
            file.write(request.to_json())
        return process
