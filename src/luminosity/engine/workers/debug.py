"""The worker of a run with ``--debug``: like a worker process, but runs each bundle while the loop sends it."""

from __future__ import annotations

import logging
import os
from collections.abc import Iterable

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.data.state import StateStore
from luminosity.engine.fnapi.connection import Callbacks
from luminosity.engine.spill.quota import WriterQuota
from luminosity.engine.termination import Terminated
from luminosity.engine.workers.failure import Failure, original
from luminosity.engine.workers.in_process import InProcessWorker
from luminosity.engine.workers.launcher import LocalProcess, OnExit, Process
from luminosity.engine.workers.request import WorkerRequest
from luminosity.engine.workers.sdk.bundle_meter import BundleMeter
from luminosity.engine.workers.sdk.channel import BlockWriter
from luminosity.errors import RunCancelled

__all__ = ["DebugWorkers"]


_LOGGER = logging.getLogger(__name__)


class DebugConnection(LocalProcess):
    """A connection to the in-process worker: runs each instruction on the caller's thread, then calls back."""

    def __init__(self, callbacks: Callbacks) -> None:
        self.callbacks = callbacks
        self._worker: InProcessWorker | None = None
        self._on_exit: OnExit | None = None
        self._bundle: beam_fn_api_pb2.InstructionRequest | None = None
        self._causes: dict[str, BaseException] = {}
        self._meter = BundleMeter()

    @property
    def pid(self) -> int:
        """The id of this process."""
        return os.getpid()

    def open(self, worker: InProcessWorker, on_exit: OnExit) -> None:
        """Use ``worker`` from now on, and call ``on_exit`` when it ends."""
        self._worker, self._on_exit = worker, on_exit
        self.callbacks.on_connected()

    def instruct(self, request: beam_fn_api_pb2.InstructionRequest) -> None:
        """Run an instruction; a bundle runs when its elements have been sent."""
        if request.HasField("process_bundle"):
            self._bundle = request
        else:
            self._run(request)

    def send(self, stream_id: str, messages: Iterable[beam_fn_api_pb2.Elements]) -> None:
        """Run the bundle with these elements. Blocks until it has ended."""
        assert self._bundle is not None
        elements = beam_fn_api_pb2.Elements()
        for message in messages:
            elements.MergeFrom(message)
        self._run(self._bundle, elements)

    def _run(
        self, request: beam_fn_api_pb2.InstructionRequest, elements: beam_fn_api_pb2.Elements | None = None
    ) -> None:
        worker = self._worker
        assert worker is not None

        def run() -> beam_fn_api_pb2.InstructionResponse:
            return worker.run(request, elements)

        try:
            response = self._meter.measure(run) if request.HasField("process_bundle") else run()
        except (KeyboardInterrupt, RunCancelled, Terminated):
            raise
        except BaseException as error:  # also SystemExit: user code that calls sys.exit has failed
            self._causes[request.instruction_id] = original(error)
            response = beam_fn_api_pb2.InstructionResponse(
                instruction_id=request.instruction_id, error=Failure.of(error).to_json()
            )
        self.callbacks.on_response(response)

    def cause(self, instruction_id: str) -> BaseException | None:
        """Return the exception that failed an instruction, once."""
        return self._causes.pop(instruction_id, None)

    def finish(self) -> None:
        """End the worker after its last bundle."""
        self._end(0)

    def close(self) -> None:
        """Forget the exceptions."""
        self._causes.clear()

    def kill(self) -> None:
        """End the worker, but not this process."""
        self._end(1)

    def _end(self, code: int) -> None:
        """Call the user's teardown, even if a process would be killed: this one lives on with what user code holds."""
        worker, on_exit = self._worker, self._on_exit
        self._worker = self._on_exit = None
        if worker is None or on_exit is None:
            return
        try:
            worker.shut_down()
        except Exception:
            _LOGGER.warning("a step's teardown failed", exc_info=True)
        on_exit(code)


class DebugWorkers:
    """Replaces the Fn API server and the launcher of worker processes."""

    def __init__(self, state: StateStore, descriptors: dict[str, beam_fn_api_pb2.ProcessBundleDescriptor]) -> None:
        self._state = state
        self._descriptors = descriptors
        self._connections: dict[str, DebugConnection] = {}

    def connect(self, worker_id: str, callbacks: Callbacks) -> DebugConnection:
        """Return a new connection, which calls back while it runs instructions."""
        connection = self._connections[worker_id] = DebugConnection(callbacks)
        return connection

    def disconnect(self, worker_id: str) -> None:
        """Close and forget a connection."""
        self._connections.pop(worker_id).close()

    def start(self, request: WorkerRequest, on_exit: OnExit) -> Process:
        """Start the in-process worker for a connection made before."""
        connection = self._connections[request.worker_id]
        quota = WriterQuota(request.quota, request.writer)
        writer = BlockWriter(request.memory_folder, request.spill_folder, quota, request.worker_id)
        on_elements = connection.callbacks.on_elements
        worker = InProcessWorker(self._descriptors, self._state.handle, writer.message, on_elements)
        connection.open(worker, on_exit)
        return connection

    def stop(self) -> None:
        """Do nothing: nothing runs between two calls."""
