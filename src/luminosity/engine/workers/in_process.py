"""Beam's worker without a process of its own: user code runs here, on the caller's thread, where debuggers find it."""

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
from luminosity.engine.workers.channel import BlockStream
from luminosity.engine.workers.failure import original
from luminosity.engine.workers.harness import RUNNER_CAPABILITIES, PromptStateSampler
from luminosity.errors import RunCancelled

_Elements = beam_fn_api_pb2.Elements
_STOCK_SAMPLER = statesampler.StateSampler


class DirectChannel(data_plane.DataChannel):
    """Hands the elements of one bundle at a time to Beam's worker, and what comes out to ``on_elements``."""

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
        for block in self.input.data:
            if block.data:
                data = wire.read(block.data)
                yield _Elements.Data(instruction_id=instruction_id, transform_id=block.transform_id, data=data)
        for timers in self.input.timers:
            if timers.timers:
                yield timers

    def output_stream(self, instruction_id: str, transform_id: str) -> BlockStream:
        def send(data: bytes, is_last: bool) -> None:
            message = _Elements()
            message.data.add(instruction_id=instruction_id, transform_id=transform_id, data=data, is_last=is_last)
            self._on_elements(message)

        return BlockStream(lambda count, data: send(self._pack(count, data), False), lambda: send(b"", True))

    def output_timer_stream(
        self, instruction_id: str, transform_id: str, timer_family_id: str
    ) -> data_plane.ClosableOutputStream:
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
        pass


class DirectState(sdk_worker.StateHandler):
    """State and side inputs, asked for by a call."""

    def __init__(self, handle: Callable[[beam_fn_api_pb2.StateRequest], beam_fn_api_pb2.StateResponse]) -> None:
        self._handle = handle
        self._instruction_id = ""

    @contextlib.contextmanager
    def process_instruction_id(self, bundle_id: str) -> Generator[None]:
        self._instruction_id = bundle_id
        yield

    def get_raw(
        self, state_key: beam_fn_api_pb2.StateKey, continuation_token: bytes | None = None
    ) -> tuple[bytes, bytes | None]:
        get = beam_fn_api_pb2.StateGetRequest(continuation_token=continuation_token or b"")
        response = self._ask(beam_fn_api_pb2.StateRequest(state_key=state_key, get=get))
        return response.get.data, response.get.continuation_token or None

    def append_raw(self, state_key: beam_fn_api_pb2.StateKey, data: bytes) -> Any:
        append = beam_fn_api_pb2.StateAppendRequest(data=data)
        return self._tell(beam_fn_api_pb2.StateRequest(state_key=state_key, append=append))

    def clear(self, state_key: beam_fn_api_pb2.StateKey) -> Any:
        return self._tell(beam_fn_api_pb2.StateRequest(state_key=state_key, clear=beam_fn_api_pb2.StateClearRequest()))

    def done(self) -> None:
        pass

    def _ask(self, request: beam_fn_api_pb2.StateRequest) -> beam_fn_api_pb2.StateResponse:
        request.instruction_id = self._instruction_id
        response = self._handle(request)
        if response.error:
            raise RuntimeError(response.error)
        return response

    def _tell(self, request: beam_fn_api_pb2.StateRequest) -> Any:
        response = self._ask(request)
        return sdk_worker._Future().set(response)  # pyright: ignore[reportPrivateUsage]  # what Beam's handlers return


class _NoCache(StateCache):
    """Beam's own would tell the user's log of its size."""

    def __init__(self) -> None:
        pass

    def is_cache_enabled(self) -> bool:
        return False


class _Processors(sdk_worker.BundleProcessorCache):
    """Beam's cache of what runs a stage, without a thread that tears down what was not used for a minute.

    A person at a breakpoint takes longer than that, and user code should run on their thread alone.
    """

    def _schedule_periodic_shutdown(self) -> None:
        pass

    def get(self, instruction_id: str, bundle_descriptor_id: str) -> bundle_processor.BundleProcessor:
        # Beam looks its sampler up when it makes a processor. It would wait for the stock one for a fifth of the time
        # that was spent at a breakpoint. Put back at once: other runners may be at work in this process.
        statesampler.StateSampler = PromptStateSampler
        try:
            return super().get(instruction_id, bundle_descriptor_id)
        finally:
            statesampler.StateSampler = _STOCK_SAMPLER


class InProcessWorker:
    """Runs instructions one at a time, each on the thread that calls."""

    def __init__(
        self,
        descriptors: dict[str, beam_fn_api_pb2.ProcessBundleDescriptor],
        handle_state: Callable[[beam_fn_api_pb2.StateRequest], beam_fn_api_pb2.StateResponse],
        pack: Callable[[int, bytes], bytes],
        on_elements: Callable[[_Elements], None],
    ) -> None:
        """``pack`` makes an output message of a number of elements and their bytes, see :mod:`.wire`."""
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
        """Raises what user code raises, in Beam's words: see :func:`.failure.original`.

        Ctrl-C is raised as itself, and leaving the debugger as :class:`RunCancelled`.
        """
        self._channel.input = elements or _Elements()
        try:
            with _without_beams_report(), statesampler.instruction_id(request.instruction_id):
                return self._worker.do_instruction(request)
        except BaseException as error:
            first = original(error)
            if isinstance(first, KeyboardInterrupt):
                raise first from None
            if isinstance(first, bdb.BdbQuit):
                raise RunCancelled("the debugger was left") from None
            raise
        finally:
            self._channel.input = _Elements()

    def shut_down(self) -> None:
        """Call the user's ``teardown``."""
        self._processors.shutdown()


@contextlib.contextmanager
def _without_beams_report() -> Generator[None]:
    """Beam logs every exception of user code; whoever called gets it, and tells it once."""
    logger = logging.getLogger("apache_beam.runners.common")

    def is_other(record: logging.LogRecord) -> bool:
        return record.exc_info is None

    logger.addFilter(is_other)
    try:
        yield
    finally:
        logger.removeFilter(is_other)
