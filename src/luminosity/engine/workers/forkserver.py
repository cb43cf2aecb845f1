"""The fork server: a process that has imported Beam and its worker, and forks a worker for each request.

It has one thread, opens no gRPC channel and never imports an accelerator library, so that forking is safe. Requests and
responses are lines of JSON. Requests: ``{"import": modules, "variables": variables}``, ``{"start": request, "entry":
function}`` and ``{"kill": pid}``. ``variables`` are environment variables to have while importing. ``function`` is
pickled; it runs a worker that differs from those of one machine. Responses:
``{"started": pid}`` or ``{"failed": reason}`` with the worker's id, and ``{"ended": pid, "code": code, "left": pids}``.
A worker has ended when the processes that it had started have ended, too; ``left`` are those that can't be ended. When
its input closes, the fork server ends all of them, removes the folders of their runs, and ends.
"""

from __future__ import annotations

import contextlib
import gc
import importlib
import json
import logging
import os
import pickle
import select
import selectors
import shutil
import signal
import socket
import sys
import warnings
from collections.abc import Mapping
from typing import Any

from luminosity._shared import descendants
from luminosity.beam_fixes.lean_beam import collect_seldom

__all__ = ["main"]


_LOGGER = logging.getLogger(__name__)

_POLL_S = 0.01  # while processes of a worker that has ended are about to end
# The engine does not use these, but a pipeline of tables and models needs them in every worker at once.
_PRELOADED_IF_TIME_IS_LEFT = (
    "pyarrow",
    "luminosity.inference.enrich.transform",
    "luminosity.inference.run_inference",
    "luminosity.io.read_table",
    "luminosity.io.write_table",
    "pyarrow.parquet",
)
_SOON_S = 0.2  # a small script asks for its first worker within this: an import that has begun would delay it


def main() -> None:
    """Serve the runner whose socket and lifeline are given as file descriptors on the command line, with the family."""
    control = socket.socket(fileno=int(sys.argv[1]))
    lifeline, family = int(sys.argv[2]), int(sys.argv[3])
    runner = os.getppid()
    signal.signal(signal.SIGINT, signal.SIG_IGN)
    # A service manager sends SIGTERM to the whole process group; the runner decides. Not SIG_IGN: workers would inherit
    # it, and so would every process that user code starts in them.
    signal.signal(signal.SIGTERM, lambda *_: None)
    _preload()
    _Server(control, lifeline, family, runner).serve()


def _preload() -> None:
    gc.disable()  # imports make little garbage; workers enable it again
    logging.disable(logging.WARNING)  # the runner has logged Beam's messages about optional packages already
    import grpc._channel  # noqa: F401  # pyright: ignore  # grpc imports it only when a worker opens its first channel

    from luminosity.beam_fixes.quick_building import build_quickly

    # With Beam and its worker.
    from luminosity.engine.workers import harness  # noqa: F401  # pyright: ignore[reportUnusedImport]

    build_quickly()
    logging.disable(logging.NOTSET)
    logging.getLogger().handlers.clear()  # workers log through the runner
    gc.freeze()  # a worker's collector would write to shared pages and so copy them


def _preload_more(control: socket.socket) -> None:
    """Import further modules until the first request arrives: importing a larger script takes a second or more."""
    patience = _SOON_S
    for module in _PRELOADED_IF_TIME_IS_LEFT:
        if select.select([control], [], [], patience)[0]:
            break
        patience = 0.0
        importlib.import_module(module)
    gc.freeze()


def _import_for_workers(modules: list[str], variables: Mapping[str, str]) -> None:
    """Import what the workers of a run will need. A module that can't be imported fails in the worker that uses it."""
    before = dict(os.environ)
    os.environ.update(variables)
    try:
        _import_all(modules)
    finally:
        os.environ.clear()
        os.environ.update(before)
    gc.freeze()


def _import_all(modules: list[str]) -> None:
    for name in modules:
        try:
            module = importlib.import_module(name)
            for library in getattr(module, "FORK_SAFE_IMPORTS", ()):
                importlib.import_module(library)
        except ImportError:
            _LOGGER.debug("could not import %s ahead of the workers", name, exc_info=True)


def _fork() -> int:
    """Fork without the warning of Python 3.12 about numpy's threads: numpy's BLAS ends them before a fork."""
    with warnings.catch_warnings():
        warnings.simplefilter("ignore", DeprecationWarning)
        return os.fork()


class _Server:
    def __init__(self, control: socket.socket, lifeline: int, family: int, runner: int) -> None:
        self._control = control
        self._lifeline = lifeline
        self._family = family
        self._runner = runner
        self._workers: set[int] = set()
        self._ended: dict[int, int] = {}  # exit codes of workers that are not reported yet
        self._endings: dict[int, descendants.Ending] = {}  # of what they, and other owners, have left
        self._is_ending = False
        self._folders: set[str] = set()
        self._wakeup, write_end = socket.socketpair()
        for end in (self._wakeup, write_end):
            end.setblocking(False)
        self._write_end = write_end
        signal.signal(signal.SIGCHLD, lambda *_: None)
        signal.set_wakeup_fd(write_end.fileno(), warn_on_full_buffer=False)

    def serve(self) -> None:
        selector = selectors.DefaultSelector()
        selector.register(self._control, selectors.EVENT_READ)
        selector.register(self._wakeup, selectors.EVENT_READ)
        # A process that the runner has forked holds the control socket, too, and may outlive the runner.
        with contextlib.suppress(OSError, AttributeError):  # the system has no such descriptors
            selector.register(os.pidfd_open(self._runner), selectors.EVENT_READ, "runner")
        _preload_more(self._control)
        received = b""
        while True:
            for key, _ in selector.select(_POLL_S if self._is_ending else None):
                if key.data == "runner":
                    self._end()
                if key.fileobj is self._wakeup:
                    self._wakeup.recv(4096)
                    self._reap()
                    continue
                try:
                    chunk = self._control.recv(1 << 16)
                except ConnectionError:
                    chunk = b""
                if not chunk:
                    self._end()
                *lines, received = (received + chunk).split(b"\n")
                for line in lines:
                    self._handle(json.loads(line))
            if self._ended or self._is_ending:
                self._end_left_over()

    def _handle(self, message: dict[str, Any]) -> None:
        if "import" in message:
            _import_for_workers(message["import"], message["variables"])
            return
        if "kill" in message:
            if message["kill"] in self._workers:
                os.kill(message["kill"], signal.SIGKILL)
            return
        self._folders.update(message["start"]["private_folders"])
        worker = message["start"]["worker_id"]
        try:
            pid = _fork()
        except OSError as error:
            self._respond({"failed": str(error), "worker": worker})
            return
        if pid == 0:
            self._become_worker(message["start"], message["entry"])
        self._workers.add(pid)
        self._respond({"started": pid, "worker": worker})

    def _become_worker(self, request: dict[str, Any], entry: str) -> None:
        code = 1
        try:
            signal.set_wakeup_fd(-1)
            signal.signal(signal.SIGCHLD, signal.SIG_DFL)
            signal.signal(signal.SIGTERM, signal.SIG_DFL)
            self._control.close()
            self._wakeup.close()
            self._write_end.close()
            descendants.join(self._family)
            gc.enable()
            collect_seldom()
            from luminosity.engine.workers import harness
            from luminosity.engine.workers.request import Entry, WorkerRequest

            harness.end_with(self._lifeline)
            run: Entry = pickle.loads(bytes.fromhex(entry)) if entry else harness.run
            code = run(WorkerRequest(**request)) or 0
        except BaseException:
            import traceback

            traceback.print_exc()
        finally:
            sys.stdout.flush()
            sys.stderr.flush()
            os._exit(code)

    def _reap(self) -> None:
        while self._workers:
            try:
                pid, status = os.waitpid(-1, os.WNOHANG)
            except ChildProcessError:
                return
            if pid == 0:
                return
            self._workers.discard(pid)
            descendants.end_group(pid)
            self._ended[pid] = os.waitstatus_to_exitcode(status)

    def _end_left_over(self) -> None:
        """End what workers have left, and report the workers of which nothing is left."""
        left: dict[int, list[int]] = {owner: [] for owner in self._ended}
        for pid, owner in descendants.left_over(self._family).items():
            left.setdefault(owner, []).append(pid)
        self._endings = {owner: self._endings.get(owner) or descendants.Ending() for owner in left}
        is_done = {owner: self._endings[owner].step(pids) for owner, pids in left.items()}
        for worker in [owner for owner in self._ended if is_done[owner]]:
            self._respond({"ended": worker, "code": self._ended.pop(worker), "left": left[worker]})
        self._is_ending = not all(is_done.values())

    def _end(self) -> None:
        for pid in self._workers:
            os.kill(pid, signal.SIGKILL)
            descendants.end_group(pid)
        descendants.end_owned_by(self._family, self._workers)
        for folder in self._folders:  # they still exist if the runner was killed
            shutil.rmtree(folder, ignore_errors=True)
        os._exit(0)

    def _respond(self, message: dict[str, Any]) -> None:
        try:
            self._control.sendall(json.dumps(message).encode() + b"\n")
        except ConnectionError:
            self._end()


if __name__ == "__main__":
    main()
