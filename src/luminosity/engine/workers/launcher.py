"""Launchers: start and end worker processes, in the runner's process."""

from __future__ import annotations

import atexit
import contextlib
import json
import logging
import multiprocessing
import os
import pickle
import select
import socket
import subprocess
import sys
import threading
import time
from collections.abc import Callable, Mapping, Sequence
from concurrent.futures import Future
from concurrent.futures import TimeoutError as FutureTimeoutError
from dataclasses import asdict
from typing import TYPE_CHECKING, Any, ClassVar, Protocol

from luminosity._shared import descendants
from luminosity._shared.text import LOST_WITH_FORK_SERVER, describe_exit
from luminosity.core import OPENMP_VARIABLES
from luminosity.engine.process import check_address_space, describe_limits
from luminosity.engine.workers.request import Entry, WorkerRequest
from luminosity.errors import ResourcesExceeded, WorkerStartFailed

if TYPE_CHECKING:
    from luminosity.engine.resources.python_environments import PythonEnvironment

__all__ = [
    "ForkServer",
    "Launcher",
    "LocalProcess",
    "OnExit",
    "Process",
    "SpawnLauncher",
    "forks",
    "warm_up",
    "warm_up_early",
]


_LOGGER = logging.getLogger(__name__)

_START_TIMEOUT_S = 60.0  # importing Beam may take this long on a busy machine
_END_TIMEOUT_S = 5.0  # then the fork server is killed

_WITHOUT_WORKERS_HERE = ("--debug",)  # flags of runs that start no process on this machine
# Where processes start: Python looks for modules there first, so it must not be the user's folder, whose files may have
# the names of libraries. A worker goes to its working directory before it runs user code.
_ROOT = "/"
# A worker always has threads inside gRPC. If a step forks a process then, gRPC prints that it can't prepare for it.
_QUIET_FORKS = {"GRPC_ENABLE_FORK_SUPPORT": "0"}
_ENGINE = "luminosity.engine.runner"
_MORE_THREADS = "more threads"  # not an interpreter: names a second fork server of this process

OnExit = Callable[[int], None]  # gets the exit code; a negative one is the signal that killed the process


class Process(Protocol):
    """A worker process, in the runner's process."""

    @property
    def pid(self) -> int:
        """The process id."""
        ...

    def kill(self) -> None:
        """Kill the process. Does not wait for its end."""
        ...

    def waits_for(self) -> str:
        """Return what the process needs in order to start, such as "1 GPU"; empty if it has started."""
        ...

    def node(self) -> str:
        """Return the id of its node of a cluster; empty if it runs on this machine, or has no place yet."""
        ...

    def is_leaving(self) -> bool:
        """Return whether the process's machine will be gone soon, so that it gets no more work."""
        ...


class LocalProcess:
    """What all processes of this machine have in common: they start at once and stay."""

    def waits_for(self) -> str:
        """Return nothing: it has started."""
        return ""

    def node(self) -> str:
        """Return nothing: it is here."""
        return ""

    def is_leaving(self) -> bool:
        """Return False: it stays."""
        return False


class Launcher(Protocol):
    """Starts worker processes."""

    def start(self, request: WorkerRequest, on_exit: OnExit) -> Process:
        """Start a worker. ``on_exit`` is called, on another thread, when it has ended.

        Raises :class:`WorkerStartFailed`.
        """
        ...


def forks(method: str) -> bool:
    """Return whether ``--worker_start`` means that workers are forked."""
    return sys.platform != "darwin" if method == "auto" else method == "fork"


def warm_up(method: str) -> None:
    """Start the fork server in the background: it imports Beam, which makes the first worker slow.

    Called before a pipeline's options are known. With ``--debug`` on the command line it does nothing: most likely no
    worker is needed here, and one that is needed after all starts later.
    """
    if not forks(method) or any(word.partition("=")[0] in _WITHOUT_WORKERS_HERE for word in sys.argv):
        return
    check_address_space()
    threading.Thread(target=ForkServer.shared, name="luminosity-warm-up", daemon=True).start()


def warm_up_early() -> None:
    """Start the fork server of a script that is about to import the engine, which takes as long as Beam's worker.

    Does nothing if the engine is imported: then the runner decides, which may only plan pipelines. Nor does it anything
    in a process that is not a script's own, such as a worker that imports a module of the user.
    """
    is_script = getattr(sys.modules.get("__main__"), "__spec__", None) is None
    if _ENGINE in sys.modules or not is_script or multiprocessing.parent_process() is not None:
        return
    with contextlib.suppress(ResourcesExceeded):  # the runner raises it where it is made
        warm_up("auto")


def _joined(import_path: Sequence[str]) -> str:
    """Return a value of PYTHONPATH with the same folders, also for a process in another directory."""
    return os.pathsep.join(os.path.abspath(folder) for folder in import_path if folder)


class _ForkedProcess(LocalProcess):
    def __init__(self, pid: int, server: ForkServer) -> None:
        self.pid = pid
        self._server = server

    def kill(self) -> None:
        self._server.kill(self.pid)


class _SpawnedProcess(LocalProcess):
    def __init__(self, process: subprocess.Popen[bytes]) -> None:
        self.pid = process.pid
        self._process = process

    def kill(self) -> None:
        self._process.kill()


class ForkServer:
    """The runner's side of the process in :mod:`luminosity.engine.workers.forkserver`.

    One fork server for each Python environment serves all runs of this process, because importing Beam is most of the
    cost of starting a worker.
    """

    _shared: ClassVar[dict[str, ForkServer]] = {}  # by interpreter; empty for this process's, or _MORE_THREADS
    _shared_lock = threading.Lock()

    @classmethod
    def shared(cls, environment: PythonEnvironment | None = None) -> ForkServer:
        """Return this process's fork server. Starts it on first use, and again if it has died."""
        with cls._shared_lock:
            return cls._living("" if environment is None else environment.python, environment)

    @classmethod
    def of_run(cls, openmp: Sequence[str] | None) -> ForkServer:
        """Return this process's fork server for the workers of one run.

        If each of them has one thread for OpenMP, the fork server imports the modules ``openmp``, which load OpenMP,
        and workers share their memory. With None, the workers may have other numbers of threads, and OpenMP reads its
        number only when it is loaded: a fork server that has loaded it is not theirs, and theirs never loads it.
        """
        with cls._shared_lock:
            server = cls._living("")
            if openmp is None:
                server = cls._living(_MORE_THREADS) if server._has_openmp else server
                server._has_more_threads = True
            elif openmp and not server._has_more_threads:
                server._has_openmp = True
                server.preload(openmp, dict.fromkeys(OPENMP_VARIABLES, "1"))
            return server

    @classmethod
    def _living(cls, name: str, environment: PythonEnvironment | None = None) -> ForkServer:
        server = cls._shared.get(name)
        if server is None or not server.is_alive():
            server = cls._shared[name] = cls(environment)
            atexit.register(server.close)
        return server

    def __init__(self, environment: PythonEnvironment | None = None, import_path: Sequence[str] | None = None) -> None:
        """Start it, in this process's environment or another one; ``import_path`` replaces ``sys.path``."""
        python, variables = sys.executable, dict(os.environ)
        import_path = sys.path if import_path is None else import_path
        self.name, self._advice = "the fork server", "run the pipeline again: it starts a new one"
        if environment is not None:
            python, import_path = environment.python, environment.import_path
            variables = environment.variables(os.environ)
            self.name += f" of the Python environment {environment.prefix}"
            self._advice = f"see above what it can't import, and install that with {python} -m pip"
        self._owner = os.getpid()
        self._family = descendants.Keeper.shared().family
        with descendants.fork_lock:
            control, theirs = socket.socketpair()
            read_end, self._lifeline = os.pipe()
            self._process = subprocess.Popen(
                [
                    python,
                    "-m",
                    "luminosity.engine.workers.forkserver",
                    *map(str, (theirs.fileno(), read_end, self._family)),
                ],
                pass_fds=[theirs.fileno(), read_end],
                stdin=subprocess.DEVNULL,
                cwd=_ROOT,
                # BLAS threads would make forking unsafe; a worker's share of the cores is set when it starts.
                env={**_QUIET_FORKS, **variables, "OPENBLAS_NUM_THREADS": "1", "PYTHONPATH": _joined(import_path)},
            )
            theirs.close()
            os.close(read_end)
        self._control = control
        self._lock = threading.Lock()
        self._send_lock = threading.Lock()
        self._starting: dict[str, tuple[Future[int], OnExit]] = {}  # by worker
        self._on_exit: dict[int, OnExit] = {}
        self._is_closed = False  # whether it can't start workers any more
        self._has_forked = False  # whether it was asked for a worker
        self.has_started_workers = False
        self._has_openmp = self._has_more_threads = False  # at most one of them: see of_run()
        threading.Thread(target=self._listen, name="luminosity-forkserver", daemon=True).start()

    def is_alive(self) -> bool:
        """Return whether it can start workers for this process."""
        return self._owner == os.getpid() and not self._is_closed and self._process.poll() is None

    @property
    def pid(self) -> int:
        """Its process id."""
        return self._process.pid

    def broke(self) -> bool:
        """Return whether it ended by itself before it had forked a worker: another one would do the same."""
        code = self._process.poll()
        return code is not None and code > 0 and not self.has_started_workers

    def describe_end(self) -> str:
        """Say how it ended, if it has."""
        code = self._process.poll()
        return "closed its connection" if code is None else describe_exit(code)

    def start(self, request: WorkerRequest, on_exit: OnExit, entry: Entry | None = None) -> Process:
        """Fork a worker, which calls ``entry``, or else the harness. Blocks until it runs.

        ``on_exit`` gets ``LOST_WITH_FORK_SERVER`` for a worker that ends because the fork server has died.
        """
        pickled = pickle.dumps(entry).hex() if entry is not None else ""
        line = json.dumps({"start": asdict(request), "entry": pickled})
        started: Future[int] = Future()
        with self._lock:
            if self._is_closed:
                raise WorkerStartFailed(f"{self.name} has ended", fix=self._advice)
            self._starting[request.worker_id] = started, on_exit
            self._has_forked = True
        try:
            self._send(line)
            return _ForkedProcess(started.result(timeout=_START_TIMEOUT_S), self)
        except FutureTimeoutError as error:  # first: it is an OSError, too
            raise WorkerStartFailed(f"{self.name} does not respond: {error!r}") from error
        except OSError as error:
            self._wait_for_death()
            raise WorkerStartFailed(f"{self.name} ended: {error!r}", fix=self._advice) from error
        finally:
            with self._lock:
                self._starting.pop(request.worker_id, None)

    def preload(self, modules: Sequence[str], variables: Mapping[str, str] | None = None) -> None:
        """Let the fork server import modules before it forks the next worker. Does not wait for it.

        Meanwhile, the fork server has these environment variables, too.
        """
        # If it can't be reached, the start of the next worker says so.
        with contextlib.suppress(OSError):
            self._send(json.dumps({"import": list(modules), "variables": dict(variables or {})}))

    def kill(self, pid: int) -> None:
        """Kill a worker. Does not wait for its end."""
        # If the fork server can't be reached, it has ended, and so have its workers.
        with contextlib.suppress(OSError):
            self._send(json.dumps({"kill": pid}))

    def _send(self, line: str) -> None:
        with self._send_lock:  # a line may be written in several pieces
            self._control.sendall(line.encode() + b"\n")

    def close(self) -> None:
        """End the fork server and its workers."""
        if self._owner != os.getpid():
            return  # this process is a fork of the owner
        with self._lock:
            if self._is_closed:
                return
            self._is_closed = True
        os.close(self._lifeline)
        self._control.shutdown(socket.SHUT_RDWR)
        if not self._has_forked:
            self._process.kill()  # it would end its imports first; it has no workers yet
        try:
            self._wait_for_end()
        except subprocess.TimeoutExpired:
            self._process.kill()
            self._process.wait(_END_TIMEOUT_S)

    def _wait_for_end(self) -> None:
        """Wait like ``subprocess``, which sleeps in steps of up to 50 ms, but return as soon as the process has ended.

        Raises ``TimeoutExpired``.
        """
        ends_at = time.monotonic() + _END_TIMEOUT_S
        with contextlib.suppress(OSError, AttributeError):  # the system has no such descriptors
            descriptor = os.pidfd_open(self._process.pid)
            try:
                waiting = select.poll()
                waiting.register(descriptor, select.POLLIN)
                waiting.poll(_END_TIMEOUT_S * 1000)
            finally:
                os.close(descriptor)
        self._process.wait(max(0.0, ends_at - time.monotonic()))

    def _listen(self) -> None:
        try:
            with self._control.makefile() as lines:
                for line in lines:
                    self._handle(json.loads(line))
        except OSError as error:
            reason = str(error)
        else:
            reason = "its connection closed"
        with self._lock:
            has_died, self._is_closed = not self._is_closed, True
            starting = list(self._starting.values())
            self._starting.clear()
        if has_died:
            self._wait_for_death()
            os.close(self._lifeline)  # also ends a worker of which nothing was heard yet
        for started, _ in starting:
            started.set_exception(WorkerStartFailed(f"{self.name} ended: {reason}", fix=self._advice))
        if has_died:  # it was killed, and its workers may still run
            _warn_of(descendants.end_owned_by(self._family, list(self._on_exit)))
        for on_exit in list(self._on_exit.values()):
            on_exit(LOST_WITH_FORK_SERVER if has_died else 1)
        self._wait_for_death()
        if has_died:
            self._control.close()
            atexit.unregister(self.close)

    def _wait_for_death(self) -> None:
        """Wait for a process that is about to end: it would stay as a zombie, for which a notebook's kernel waits."""
        with contextlib.suppress(subprocess.TimeoutExpired):
            self._process.wait(_END_TIMEOUT_S)

    def _handle(self, message: dict[str, Any]) -> None:
        if "started" in message:
            with self._lock:
                waiting = self._starting.pop(message["worker"], None)
            if waiting is None:
                self.kill(message["started"])  # the caller has given up
                return
            started, on_exit = waiting
            self._on_exit[message["started"]] = on_exit
            self.has_started_workers = True
            started.set_result(message["started"])
        elif "failed" in message:
            with self._lock:
                waiting = self._starting.pop(message["worker"], None)
            if waiting is not None:
                waiting[0].set_exception(_no_fork(message["failed"]))
        elif "ended" in message and (on_exit := self._on_exit.pop(message["ended"], None)) is not None:
            _warn_of(message["left"])
            on_exit(message["code"])


def _warn_of(left: Sequence[int]) -> None:
    if left:
        _LOGGER.warning("these processes, which a worker had started, can't be ended: %s", ", ".join(map(str, left)))


def _no_fork(reason: str) -> WorkerStartFailed:
    limits = describe_limits()
    return WorkerStartFailed(f"can't fork a process: {reason}" + (f"; a process may use {limits}" if limits else ""))


class SpawnLauncher:
    """Starts a new interpreter for each worker: slower, but safe where forking is not."""

    def start(self, request: WorkerRequest, on_exit: OnExit) -> Process:
        """Spawn a worker. Returns before it has imported Beam."""
        family = descendants.Keeper.shared().family
        with descendants.fork_lock:
            request_end, our_end = os.pipe()
            lifeline_end, lifeline = os.pipe()
            arguments = map(str, (request_end, lifeline_end, family))
            process = subprocess.Popen(
                [request.python or sys.executable, "-m", "luminosity.engine.workers", *arguments],
                pass_fds=[request_end, lifeline_end],
                stdin=subprocess.DEVNULL,
                cwd=_ROOT,
                env={**_QUIET_FORKS, **request.environment, "PYTHONPATH": _joined(request.import_path)},
            )
            os.close(request_end)
            os.close(lifeline_end)

        def wait() -> None:
            code = process.wait()
            os.close(lifeline)
            descendants.end_group(process.pid)
            _warn_of(descendants.end_owned_by(family, [process.pid]))
            on_exit(code)

        threading.Thread(target=wait, name=f"luminosity-wait-{process.pid}", daemon=True).start()
        # A worker that has died already is handled like one that dies later: by on_exit.
        with contextlib.suppress(BrokenPipeError), os.fdopen(our_end, "w") as file:
            file.write(request.to_json() + "\n")
        return _SpawnedProcess(process)
