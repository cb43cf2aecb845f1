"""Beam's worker in this process: user code runs on the caller's thread, where debuggers work.

With ``--debug``, it replaces the worker processes, and runs each bundle while the loop sends it.
"""

from __future__ import annotations

import bdb
import contextlib
import logging
import os
from collections.abc import Callable, Collection, Generator, Iterable, Iterator
from typing import Any

from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.runners.portability.fn_api_runner.worker_handlers import SingletonStateHandlerFactory
from apache_beam.runners.worker import bundle_processor, data_plane, sdk_worker, statesampler
from apache_beam.runners.worker.statecache import StateCache

from luminosity.engine.data import wire
from luminosity.engine.data.state import StateStore
from luminosity.engine.fnapi.connection import Callbacks
from luminosity.engine.process import Terminated
from luminosity.engine.spill.quota import WriterQuota
from luminosity.engine.workers.failure import Failure, original
from luminosity.engine.workers.harness import RUNNER_CAPABILITIES, PromptStateSampler
from luminosity.engine.workers.launcher import LocalProcess, OnExit, Process
from luminosity.engine.workers.request import WorkerRequest
from luminosity.engine.workers.sdk.bundle_report import BundleMeter
from luminosity.engine.workers.sdk.channel import BlockStream, BlockWriter
from luminosity.engine.workers.sdk.passing import measure_with_letters
from luminosity.errors import RunCancelled

__all__ = ["DebugWorkers", "InProcessWorker", "data_message", "input_of", "timers_message"]

_LOGGER = logging.getLogger(__name__)

_Elements = beam_fn_api_pb2.Elements
_STOCK_SAMPLER = statesampler.StateSampler


def input_of(elements: _Elements, instruction_id: str) -> Iterator[_Elements.Data | _Elements.Timers]:
    """Yield the blocks and timers of a bundle's input as Beam's worker takes them."""
    for block in elements.data:
        if block.data:
            data = wire.read(block.data)
            yield _Elements.Data(instruction_id=instruction_id, transform_id=block.transform_id, data=data)
    for timers in elements.timers:
        if timers.timers:
            yield timers


class DirectChannel(data_plane.DataChannel):
    """Passes the input of one bundle at a time to Beam's worker, and its output to ``on_elements``."""

    def __init__(self, pack: Callable[[int, bytes], bytes], on_elements: Callable[[_Elements], None]) -> None:
        self._pack = pack
        self._on_elements = on_elements
        self.input = _Elements()

    def input_elements(
        self,
        instruction_id: str,
        expected_inputs: Collection[str | tuple[str, str]],
        abort_callback: Callable[[], bool] | None = None,
    ) -> Iterator[Any]:
        """Yield the blocks and timers of the bundle's input."""
        yield from input_of(self.input, instruction_id)

    def output_stream(self, instruction_id: str, transform_id: str) -> BlockStream:
        """Return the stream for the output of one transform."""

        def send(data: bytes, is_last: bool) -> None:
            self._on_elements(data_message(instruction_id, transform_id, data, is_last=is_last))

        return BlockStream(lambda count, data: send(self._pack(count, data), False), lambda: send(b"", True))

    def output_timer_stream(
        self, instruction_id: str, transform_id: str, timer_family_id: str
    ) -> data_plane.ClosableOutputStream:
        """Return the stream for the timers of one family."""

        def send(timers: bytes, is_last: bool) -> None:
            self._on_elements(timers_message(instruction_id, transform_id, timer_family_id, timers, is_last=is_last))

        return data_plane.ClosableOutputStream.create(lambda data: send(data, True), lambda data: send(data, False), 0)

    def close(self) -> None:
        """Do nothing: there is no connection."""


def data_message(instruction_id: str, transform_id: str, data: bytes, *, is_last: bool) -> _Elements:
    """Return the message for a block of a bundle's output, or for its end."""
    message = _Elements()
    message.data.add(instruction_id=instruction_id, transform_id=transform_id, data=data, is_last=is_last)
    return message


def timers_message(
    instruction_id: str, transform_id: str, timer_family_id: str, timers: bytes, *, is_last: bool
) -> _Elements:
    """Return the message for timers that a bundle has set, or for their end."""
    message = _Elements()
    message.timers.add(
        instruction_id=instruction_id,
        transform_id=transform_id,
        timer_family_id=timer_family_id,
        timers=timers,
        is_last=is_last,
    )
    return message


class DirectState(sdk_worker.StateHandler):
    """Gives Beam's worker state and side inputs by direct calls."""

    def __init__(self, handle: Callable[[beam_fn_api_pb2.StateRequest], beam_fn_api_pb2.StateResponse]) -> None:
        self._handle = handle
        self._instruction_id = ""

    @contextlib.contextmanager
    def process_instruction_id(self, bundle_id: str) -> Generator[None]:
        """Use ``bundle_id`` in the requests within the context."""
        self._instruction_id = bundle_id
        yield

    def get_raw(
        self, state_key: beam_fn_api_pb2.StateKey, continuation_token: bytes | None = None
    ) -> tuple[bytes, bytes | None]:
        """Return one page of a state cell, and the token of the next page."""
        get = beam_fn_api_pb2.StateGetRequest(continuation_token=continuation_token or b"")
        response = self._request(beam_fn_api_pb2.StateRequest(state_key=state_key, get=get))
        return response.get.data, response.get.continuation_token or None

    def append_raw(self, state_key: beam_fn_api_pb2.StateKey, data: bytes) -> Any:
        """Append to a state cell."""
        append = beam_fn_api_pb2.StateAppendRequest(data=data)
        return self._change(beam_fn_api_pb2.StateRequest(state_key=state_key, append=append))

    def clear(self, state_key: beam_fn_api_pb2.StateKey) -> Any:
        """Clear a state cell."""
        clear = beam_fn_api_pb2.StateClearRequest()
        return self._change(beam_fn_api_pb2.StateRequest(state_key=state_key, clear=clear))

    def done(self) -> None:
        """Do nothing: every request is answered at once."""

    def _request(self, request: beam_fn_api_pb2.StateRequest) -> beam_fn_api_pb2.StateResponse:
        request.instruction_id = self._instruction_id
        response = self._handle(request)
        if response.error:
            raise RuntimeError(response.error)
        return response

    def _change(self, request: beam_fn_api_pb2.StateRequest) -> Any:
        response = self._request(request)
        return sdk_worker._Future().set(response)  # pyright: ignore[reportPrivateUsage]  # Beam's handlers return it


class _NoCache(StateCache):
    """A disabled cache: Beam's own would log its size among the user's messages."""

    def __init__(self) -> None:
        pass

    def is_cache_enabled(self) -> bool:
        return False


class _Processors(sdk_worker.BundleProcessorCache):
    """Beam's cache of bundle processors, without the thread that tears down those not used for a minute.

    A user at a breakpoint takes longer than that, and user code should run on the caller's thread only.
    """

    def _schedule_periodic_shutdown(self) -> None:
        pass

    def get(self, instruction_id: str, bundle_descriptor_id: str) -> bundle_processor.BundleProcessor:
        # Beam looks up its sampler when it makes a processor. Its own sampler would wait for a fifth of the time that
        # the user spends at a breakpoint. It is restored at once, because other runners may run in this process.
        statesampler.StateSampler = PromptStateSampler
        try:
            return super().get(instruction_id, bundle_descriptor_id)
        finally:
            statesampler.StateSampler = _STOCK_SAMPLER


class InProcessWorker:
    """Runs instructions one at a time, each on the caller's thread."""

    def __init__(
        self,
        descriptors: dict[str, beam_fn_api_pb2.ProcessBundleDescriptor],
        handle_state: Callable[[beam_fn_api_pb2.StateRequest], beam_fn_api_pb2.StateResponse],
        pack: Callable[[int, bytes], bytes],
        on_elements: Callable[[_Elements], None],
    ) -> None:
        """``pack`` makes an output message from a number of elements and their bytes."""
        self._channel = DirectChannel(pack, on_elements)
        self._processors = _Processors(
            frozenset([RUNNER_CAPABILITIES]),
            SingletonStateHandlerFactory(sdk_worker.GlobalCachingStateHandler(_NoCache(), DirectState(handle_state))),
            data_plane.InMemoryDataChannelFactory(self._channel),
            descriptors,
        )
        self._worker = sdk_worker.SdkWorker(self._processors)

    def run(
        self, request: beam_fn_api_pb2.InstructionRequest, elements: _Elements | None = None
    ) -> beam_fn_api_pb2.InstructionResponse:
        """Run an instruction and return its response.

        Raises what user code raises, as Beam re-raises it: see :func:`.failure.original`. Raises Ctrl-C as
        ``KeyboardInterrupt``, and :class:`RunCancelled` if the user quits the debugger.
        """
        self._channel.input = elements or _Elements()
        try:
            with _without_beams_report(), statesampler.instruction_id(request.instruction_id):
                return self._worker.do_instruction(request)
        except BaseException as error:
            first = original(error)
            if isinstance(first, KeyboardInterrupt | Terminated):
                raise first from None
            if isinstance(first, bdb.BdbQuit):
                raise RunCancelled("the user quit the debugger") from None
            raise
        finally:
            self._channel.input = _Elements()

    def shut_down(self) -> None:
        """Call the user's ``teardown``."""
        self._processors.shutdown()


@contextlib.contextmanager
def _without_beams_report() -> Generator[None]:
    """Within the context, keep Beam from logging exceptions of user code: the caller gets and reports them."""
    logger = logging.getLogger("apache_beam.runners.common")

    def is_other(record: logging.LogRecord) -> bool:
        return record.exc_info is None

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)


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
            response = (
                measure_with_letters(self._meter.measure, request.instruction_id, run)
                if request.HasField("process_bundle")
                else run()
            )
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
