"""The one worker of a run with ``--debug``, as the loop sees it: bundles run while the loop sends them."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.data.state import StateStore
from luminosity.engine.fnapi.connection import Callbacks
from luminosity.engine.spill.quota import WriterQuota
from luminosity.engine.workers.channel import BlockWriter
from luminosity.engine.workers.failure import Failure, original
from luminosity.engine.workers.in_process import InProcessWorker
from luminosity.engine.workers.launcher import OnExit, Process
from luminosity.engine.workers.request import WorkerRequest
from luminosity.errors import RunCancelled

_LOGGER = logging.getLogger("luminosity")


class DebugConnection:
    """Runs what it is given before it returns, and then calls back."""

    def __init__(self, callbacks: Callbacks) -> None:
        self.callbacks = callbacks
        self._worker: InProcessWorker | None = None
        self._on_exit: OnExit | None = None
        self._bundle: beam_fn_api_pb2.InstructionRequest | None = None
        self._causes: dict[str, BaseException] = {}

    @property
    def pid(self) -> int:
        return os.getpid()

    def open(self, worker: InProcessWorker, on_exit: OnExit) -> None:
        self._worker, self._on_exit = worker, on_exit
        self.callbacks.on_connected()

    def instruct(self, request: beam_fn_api_pb2.InstructionRequest) -> None:
        if request.HasField("process_bundle"):
            self._bundle = request  # runs once its elements are there
        else:
            self._run(request)

    def send(self, stream_id: str, messages: Iterable[beam_fn_api_pb2.Elements]) -> None:
        assert self._bundle is not None
        elements = beam_fn_api_pb2.Elements()
        for message in messages:
            elements.MergeFrom(message)
        self._run(self._bundle, elements)

    def _run(
        self, request: beam_fn_api_pb2.InstructionRequest, elements: beam_fn_api_pb2.Elements | None = None
    ) -> None:
        assert self._worker is not None
        try:
            response = self._worker.run(request, elements)
        except (KeyboardInterrupt, RunCancelled):
            raise
        except BaseException as error:  # user code that calls sys.exit has failed, as it has in a worker of its own
            self._causes[request.instruction_id] = original(error)
            response = beam_fn_api_pb2.InstructionResponse(
                instruction_id=request.instruction_id, error=Failure.of(error).to_json()
            )
        self.callbacks.on_response(response)

    def cause(self, instruction_id: str) -> BaseException | None:
        return self._causes.pop(instruction_id, None)

    def finish(self) -> None:
        self._end(0)

    def close(self) -> None:
        self._causes.clear()

    def kill(self) -> None:
        """The loop's way to end a worker's process: here, the worker alone."""
        self._end(1)

    def _end(self, code: int) -> None:
        """Tear down, also where a process would be killed: this one may live on, and keep what user code holds."""
        worker, on_exit = self._worker, self._on_exit
        self._worker = self._on_exit = None
        if worker is None or on_exit is None:
            return
        try:
            worker.shut_down()
        except Exception:
            _LOGGER.warning("teardown failed", exc_info=True)
        on_exit(code)


class DebugWorkers:
    """Stands in for the server and the launcher of worker processes."""

    def __init__(self, state: StateStore, descriptors: dict[str, beam_fn_api_pb2.ProcessBundleDescriptor]) -> None:
        self._state = state
        self._descriptors = descriptors
        self._connections: dict[str, DebugConnection] = {}

    def connect(self, worker_id: str, callbacks: Callbacks) -> DebugConnection:
        connection = self._connections[worker_id] = DebugConnection(callbacks)
        return connection

    def disconnect(self, worker_id: str) -> None:
        self._connections.pop(worker_id).close()

    def start(self, request: WorkerRequest, on_exit: OnExit) -> Process:
        connection = self._connections[request.worker_id]
        quota = WriterQuota(request.quota, request.writer)
        writer = BlockWriter(request.memory_folder, request.spill_folder, quota, request.worker_id)
        on_elements = connection.callbacks.on_elements
        worker = InProcessWorker(self._descriptors, self._state.handle, writer.message, on_elements)
        connection.open(worker, on_exit)
        return connection

    def stop(self) -> None:
        """Nothing goes on between two calls."""
