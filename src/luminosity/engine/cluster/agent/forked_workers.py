"""The workers of one node, in its agent: started by a fork server, and their ends kept for the driver."""

from __future__ import annotations

import os
import queue
import sys
import threading
from collections.abc import Sequence
from dataclasses import dataclass, replace

from luminosity._shared.hangs import is_stopped
from luminosity._shared.text import ENDED_WHILE_STOPPED
from luminosity.engine.workers.launcher import ForkServer, Process
from luminosity.engine.workers.request import Entry, WorkerRequest
from luminosity.errors import WorkerStartFailed

__all__ = ["Exit", "ForkedWorkers"]

_KILLED = -9  # the exit code of a process that was killed
_NOT_STARTED = 1  # the exit code of a worker that could not be started
_LONGEST_WAIT_S = 10.0  # of a call that asks for exits: the driver then asks again
_END_S = 5.0  # for the thread to end
_OF_RAY = "PYTHONBREAKPOINT"  # leads to a debugger of Ray's, which knows Ray's own processes only


@dataclass(frozen=True)
class Exit:
    """The end of a worker's process."""

    worker_id: str
    code: int
    reason: str = ""  # why it could not be started


class ForkedWorkers:
    """Starts and kills workers. Any thread may use it. The owner closes it; if the owner dies, so do the workers."""

    def __init__(self, preload: Sequence[str], *, is_shared: bool) -> None:
        """Start the fork server, which imports Beam and the modules ``preload``. Does not wait for it.

        If ``is_shared``, it is the one that all runs of this process use, and stays.
        """
        ray = os.path.join(os.path.dirname(sys.modules["ray"].__file__ or ""), "") if "ray" in sys.modules else None
        self.import_path = [path for path in sys.path if ray is None or not path.startswith(ray)]
        self.variables = {name: value for name, value in os.environ.items() if is_shared or name != _OF_RAY}
        self._preload = preload
        self._is_shared = is_shared
        self._server = self._serve()
        self._processes: dict[str, Process | None] = {}  # None for those that wait for their start
        self._asked_for: set[str] = set()  # all workers so far
        self._killed: set[str] = set()  # before they had started
        self._stopped: set[str] = set()  # when they were killed
        self._ended: list[Exit] = []
        self._changed = threading.Condition()
        self._is_closed = False
        self._requests: queue.SimpleQueue[tuple[WorkerRequest, Entry] | None] = queue.SimpleQueue()
        self._thread = threading.Thread(target=self._start_all, name="luminosity-starts", daemon=True)
        self._thread.start()

    def _serve(self) -> ForkServer:
        server = ForkServer.shared() if self._is_shared else ForkServer(import_path=self.import_path)
        server.preload(self._preload)
        return server

    def start(self, request: WorkerRequest, entry: Entry) -> None:
        """Start a worker soon, which calls ``entry``. Does not wait for it."""
        with self._changed:
            self._asked_for.add(request.worker_id)
            is_killed = request.worker_id in self._killed
            if not is_killed:
                self._processes[request.worker_id] = None
        if is_killed:
            self._note(Exit(request.worker_id, _KILLED))
        else:
            self._requests.put((request, entry))

    def kill(self, worker_id: str) -> None:
        """Kill a worker. One that has not started yet counts as ended at once, and never runs anything."""
        with self._changed:
            if worker_id not in self._asked_for:
                self._killed.add(worker_id)  # calls of an actor may overtake each other
                return
            if worker_id not in self._processes:
                return  # it has ended
            process = self._processes[worker_id]
            if process is None:
                self._killed.add(worker_id)
            elif is_stopped(process.pid):
                self._stopped.add(worker_id)
        if process is None:
            self._note(Exit(worker_id, _KILLED))
        else:
            process.kill()

    def exits(self) -> list[Exit]:
        """Return which workers have ended since the last call. Waits some seconds until there is one."""
        with self._changed:
            self._changed.wait_for(lambda: self._ended or self._is_closed, _LONGEST_WAIT_S)
            found, self._ended = self._ended, []
            return found

    def close(self) -> None:
        """Kill all workers, and end the fork server if it is not shared."""
        with self._changed:
            self._is_closed = True
            self._changed.notify_all()
            left = list(self._processes)
        self._requests.put(None)
        for worker_id in left:
            self.kill(worker_id)
        if not self._is_shared:
            self._server.close()
        self._thread.join(_END_S)

    def _start_all(self) -> None:
        while (asked := self._requests.get()) is not None:
            worker_id = asked[0].worker_id
            if worker_id not in self._killed:
                self._start(*asked)
            self._killed.discard(worker_id)

    def _start(self, request: WorkerRequest, entry: Entry) -> None:
        worker_id = request.worker_id
        try:
            if not self._server.is_alive() and not self._is_closed:
                self._server = self._serve()
            process = self._server.start(request, lambda code: self._note(Exit(worker_id, code)), entry)
        except (WorkerStartFailed, OSError) as error:  # the latter if the node has no room for a process
            self._note(Exit(worker_id, _NOT_STARTED, f"{error}"))
            return
        with self._changed:
            if worker_id in self._processes:
                self._processes[worker_id] = process
        if worker_id in self._killed or self._is_closed:
            process.kill()

    def _note(self, ended: Exit) -> None:
        with self._changed:
            self._processes.pop(ended.worker_id, None)
            if ended.worker_id in self._stopped:
                self._stopped.discard(ended.worker_id)
                ended = replace(ended, code=ENDED_WHILE_STOPPED)
            self._ended.append(ended)
            self._changed.notify_all()
