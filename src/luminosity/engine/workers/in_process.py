"""Beam's worker in this process: user code runs on the caller's thread, where debuggers work."""

from __future__ import annotations

import bdb
import contextlib
import logging
from collections.abc import Callable, Collection, Generator, Iterator
from typing import Any

from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.runners.portability.fn_api_runner.worker_handlers import SingletonStateHandlerFactory
from apache_beam.runners.worker import bundle_processor, data_plane, sdk_worker, statesampler
from apache_beam.runners.worker.statecache import StateCache

from luminosity.engine.data import wire
from luminosity.engine.termination import Terminated
from luminosity.engine.workers.failure import original
from luminosity.engine.workers.harness import RUNNER_CAPABILITIES, PromptStateSampler
from luminosity.engine.workers.sdk.channel import BlockStream
from luminosity.errors import RunCancelled

__all__ = ["InProcessWorker"]


_Elements = beam_fn_api_pb2.Elements
_STOCK_SAMPLER = statesampler.StateSampler


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
        for block in self.input.data:
            if block.data:
                data = wire.read(block.data)
                yield _Elements.Data(instruction_id=instruction_id, transform_id=block.transform_id, data=data)
        for timers in self.input.timers:
            if timers.timers:
                yield timers

    def output_stream(self, instruction_id: str, transform_id: str) -> BlockStream:
        """Return the stream for the output of one transform."""

        def send(data: bytes, is_last: bool) -> None:
            message = _Elements()
            message.data.add(instruction_id=instruction_id, transform_id=transform_id, data=data, is_last=is_last)
            self._on_elements(message)

        return BlockStream(lambda count, data: send(self._pack(count, data), False), lambda: send(b"", True))

    def output_timer_stream(
        self, instruction_id: str, transform_id: str, timer_family_id: str
    ) -> data_plane.ClosableOutputStream:
        """Return the stream for the timers of one family."""

        def send(timers: bytes, is_last: bool) -> None:
            message = _Elements()
            message.timers.add(
                instruction_id=instruction_id,
                transform_id=transform_id,
                timer_family_id=timer_family_id,
                timers=timers,
                is_last=is_last,
            )
            self._on_elements(message)

        return data_plane.ClosableOutputStream.create(lambda data: send(data, True), lambda data: send(data, False), 0)

    def close(self) -> None:
        """Do nothing: there is no connection."""


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
