"""Beam's worker, for many simulated workers of one process: bundle processors, and what they read and write through.

To make a bundle processor takes as long as ten small bundles, so simulated workers of a plan share them, also from
one run to the next. Each bundle runs as a task, and pauses between elements and wherever its steps do.
"""

from __future__ import annotations

import contextlib
from collections.abc import Callable, Collection, Generator, Iterator
from typing import Any, Protocol
from unittest import mock

from apache_beam.coders.coder_impl import create_InputStream
from apache_beam.options.value_provider import RuntimeValueProvider
from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.runners import common
from apache_beam.runners.worker import bundle_processor, data_plane, sdk_worker, statecache, statesampler
from apache_beam.transforms import userstate
from apache_beam.utils.timestamp import Timestamp

from luminosity.engine.data import wire
from luminosity.engine.simulated.lean_beam import FUTURES, NO_SHORT_IDS, Processor, Sampler, dofn_specs
from luminosity.engine.simulated.simulation import TaskLocal
from luminosity.engine.workers.harness import RUNNER_CAPABILITIES
from luminosity.engine.workers.in_process import data_message, input_of, timers_message
from luminosity.engine.workers.sdk.cells import AddingState, ValueState
from luminosity.engine.workers.sdk.channel import BlockStream, BlockWriter, RepeatedTimer, TimerStream
from luminosity.engine.workers.sdk.group_output import GroupOutput, register
from luminosity.engine.workers.sdk.large_elements import BlockOutput
from luminosity.engine.workers.sdk.quick_steps import make_runner
from luminosity.engine.workers.sdk.user_state import BatchingStateHandler, CachingHandler, estimate_size

__all__ = ["BeamBundles", "BundleInput", "DirectState", "as_in_workers", "new_state"]

_NO_CACHED_ARGUMENTS = "disable_global_windowed_args_caching"  # an experiment of Beam's
_Elements = beam_fn_api_pb2.Elements
_here = TaskLocal()  # ``bundle``: the :class:`BundleInput` that this task runs


class BundleInput(Protocol):
    """A bundle that a simulated worker runs, for the parts of Beam's worker."""

    instruction_id: str
    elements: _Elements
    most_in_block: int  # elements of an output block
    state: CachingHandler
    writer: BlockWriter

    def send(self, elements: _Elements) -> None:
        """Send output."""
        ...

    def pack(self, count: int, *parts: Any, for_long: bool = False) -> bytes:
        """Return the message for an output block."""
        ...

    def next_element(self) -> None:
        """Let the time pass that an element takes."""
        ...


class _Input(bundle_processor.DataInputOperation):
    """Beam's source, which lets time pass before each element: splits and deaths may come there."""

    def process_encoded(self, encoded_windowed_values: bytes) -> None:
        (consumer, *_) = self.consumer
        if isinstance(consumer, GroupOutput):
            _here.bundle.next_element()
            consumer.group_block(encoded_windowed_values)
            return
        stream = create_InputStream(encoded_windowed_values)
        while stream.size() > 0:
            with self.splitting_lock:
                if self.index == self.stop - 1:
                    return
                self.index += 1
            element = self.windowed_coder_impl.decode_from_stream(stream, True)
            _here.bundle.next_element()
            self.output(element)


class _Blocks(BlockStream):
    """Output that ends a block after a number of elements. In production, it also does so after some real time."""

    def __init__(self, send: Callable[..., None], close: Callable[[], None], most: int) -> None:
        super().__init__(send, close)
        self._most = most

    def maybe_flush(self) -> None:
        self._count += 1
        if self._count >= self._most:
            self.flush()


class _Channel(data_plane.DataChannel):
    """Gives a bundle its input, and its worker the output."""

    def input_elements(
        self,
        instruction_id: str,
        expected_inputs: Collection[str | tuple[str, str]],
        abort_callback: Callable[[], bool] | None = None,
    ) -> Iterator[Any]:
        bundle: BundleInput = _here.bundle
        for each in input_of(bundle.elements, instruction_id):
            if isinstance(each, _Elements.Timers):
                bundle.next_element()
            yield each

    def output_stream(self, instruction_id: str, transform_id: str) -> BlockStream:
        bundle: BundleInput = _here.bundle

        def send(data: bytes, is_last: bool) -> None:
            bundle.send(data_message(instruction_id, transform_id, data, is_last=is_last))

        def send_block(count: int, *parts: Any, wrap: Callable[[bytes], bytes] | None = None) -> None:
            message = bundle.pack(count, *parts, for_long=wrap is not None)
            send(message if wrap is None else wrap(message), False)

        stream = _Blocks(send_block, lambda: send(b"", True), bundle.most_in_block)
        stream.splits = instruction_id.endswith(wire.SPLIT_SUFFIX)
        stream.writer = bundle.writer
        return stream

    def output_timer_stream(self, instruction_id: str, transform_id: str, timer_family_id: str) -> TimerStream:
        bundle: BundleInput = _here.bundle

        def send(timers: bytes, is_last: bool) -> None:
            bundle.send(timers_message(instruction_id, transform_id, timer_family_id, timers, is_last=is_last))

        return TimerStream(lambda data: send(data, False), lambda: send(b"", True))

    def close(self) -> None:
        pass


class _StateOfBundle:
    """The state handler of the worker that runs the bundle of this task."""

    def __getattr__(self, name: str) -> Any:
        return getattr(_here.bundle.state, name)


class _States:
    def create_state_handler(self, api_service_descriptor: Any) -> Any:
        return _StateOfBundle()

    def close(self) -> None:
        pass


class DirectState(BatchingStateHandler):
    """The engine's handler of state in workers, which asks the run by direct calls."""

    def __init__(
        self,
        handle: Callable[[beam_fn_api_pb2.StateRequest], beam_fn_api_pb2.StateResponse],
        clock: Callable[[], float],
    ) -> None:
        self._handle = handle
        super().__init__(None, clock)
        self._context: Any = TaskLocal()

    def start(self) -> None:
        """Do nothing: there is no connection."""

    def done(self) -> None:
        """Do nothing: every request is answered at once."""

    def _request(self, request: beam_fn_api_pb2.StateRequest) -> Any:
        request.instruction_id = self._context.process_instruction_id
        future: Any = sdk_worker._Future()  # pyright: ignore[reportPrivateUsage]  # Beam's handlers return it
        return future.set(self._handle(request))


class _InOrder:
    """A descriptor whose maps have an order. Those of protocol buffers have another one in each process."""

    def __init__(self, descriptor: beam_fn_api_pb2.ProcessBundleDescriptor) -> None:
        self._descriptor = descriptor
        self.transforms = dict(sorted(descriptor.transforms.items()))
        self.pcollections = dict(sorted(descriptor.pcollections.items()))

    def __getattr__(self, name: str) -> Any:
        return getattr(self._descriptor, name)


class _Processors(sdk_worker.BundleProcessorCache):
    """Beam's cache, without the thread that ends processors, and with processors that work in the same order."""

    def _schedule_periodic_shutdown(self) -> None:
        pass

    def get(self, instruction_id: str, bundle_descriptor_id: str) -> bundle_processor.BundleProcessor:
        cached = self.cached_bundle_processors[bundle_descriptor_id]
        descriptor: Any = _InOrder(self.fns[bundle_descriptor_id])
        states: Any = self.state_handler_factory.create_state_handler(descriptor.state_api_service_descriptor)
        if cached:
            processor = cached.pop()
        else:
            processor = Processor(self.runner_capabilities, descriptor, states, self.data_channel_factory)
            processor.timers_info = dict(sorted(processor.timers_info.items()))
        self.active_bundle_processors[instruction_id] = bundle_descriptor_id, processor
        return processor


class BeamBundles:
    """Runs bundles of one plan. ``descriptors`` are filled before the first bundle."""

    def __init__(self, descriptors: dict[str, beam_fn_api_pb2.ProcessBundleDescriptor]) -> None:
        channels: Any = data_plane.InMemoryDataChannelFactory(_Channel())
        states: Any = _States()
        self._processors = _Processors(frozenset([RUNNER_CAPABILITIES]), states, channels, descriptors)
        self._worker = sdk_worker.SdkWorker(self._processors)

    def run(
        self, request: beam_fn_api_pb2.InstructionRequest, bundle: BundleInput
    ) -> beam_fn_api_pb2.InstructionResponse:
        """Run a bundle in this task, which belongs to it. Raises what its steps raise."""
        _here.bundle = bundle
        try:
            with statesampler.instruction_id(request.instruction_id):
                return self._worker.do_instruction(request)
        finally:
            # If the worker has died, nothing is known about the processor.
            active = self._processors.active_bundle_processors.get(request.instruction_id)
            if active is not None and not _waits_for_finalization(active[1]):
                del self._processors.active_bundle_processors[request.instruction_id]
            _here.bundle = None

    def answer(self, request: beam_fn_api_pb2.InstructionRequest) -> beam_fn_api_pb2.InstructionResponse:
        """Answer an instruction that is not a bundle, while no task runs."""
        return self._worker.do_instruction(request)

    def index(self, instruction_id: str) -> dict[str, int]:
        """Return the place of the element in progress, by read id, of a bundle that runs."""
        active = self._processors.active_bundle_processors.get(instruction_id)
        if active is None:
            return {}
        return {key: op.index for key, op in active[1].ops.items() if isinstance(op, _Input)}

    def forget(self, instruction_id: str) -> None:
        """Forget a bundle that waits for its finalization."""
        self._processors.active_bundle_processors.pop(instruction_id, None)


def _waits_for_finalization(processor: bundle_processor.BundleProcessor) -> bool:
    return processor.current_instruction_id is None and bool(processor.requires_finalization())


def new_state(state: DirectState, cache_bytes: int) -> CachingHandler:
    """Return the handler of a worker, with a cache of its own."""
    handler = CachingHandler(statecache.StateCache(cache_bytes), state)
    setattr(handler, "_context", TaskLocal())  # noqa: B010  # its bundles are tasks, not threads
    return handler


@contextlib.contextmanager
def as_in_workers(now: Callable[[], float]) -> Generator[None]:
    """Within the context, let Beam's worker in this process be made of the parts that worker processes have.

    ``now`` is its wall time: Beam asks for it to tell how long a source has still to wait.
    """
    replaced: tuple[tuple[Any, str, Any], ...] = (
        (bundle_processor, "DataInputOperation", _Input),
        (bundle_processor, "DataOutputOperation", BlockOutput),
        (bundle_processor, "OutputTimer", RepeatedTimer),
        (bundle_processor, "CombiningValueRuntimeState", AddingState),
        (bundle_processor, "ReadModifyWriteRuntimeState", ValueState),
        (common, "DoFnRunner", make_runner),
        (bundle_processor, "concurrent", FUTURES),
        (sdk_worker, "SHORT_ID_CACHE", NO_SHORT_IDS),
        (userstate, "get_dofn_specs", dofn_specs),
        (statesampler, "StateSampler", Sampler),
        (statesampler, "_STATE_SAMPLERS", TaskLocal()),
        (statesampler, "_INSTRUCTION_IDS", TaskLocal()),
        (statecache, "get_deep_size", estimate_size),
        (Timestamp, "now", lambda: Timestamp(micros=int(now() * 1e6))),
        # Processors outlive a run: they must not keep its side inputs.
        (RuntimeValueProvider, "experiments", {_NO_CACHED_ARGUMENTS}),
    )
    register()
    with contextlib.ExitStack() as stack:
        for module, name, ours in replaced:
            stack.enter_context(mock.patch.object(module, name, ours))
        yield
