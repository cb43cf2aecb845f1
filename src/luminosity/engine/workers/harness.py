"""The harness of a worker process: Beam's SDK harness with the engine's data channel, failure reports and batches."""

from __future__ import annotations

import hashlib
import importlib
import json
import logging
import os
import random
import signal
import sys
import threading
from collections.abc import Callable, Iterator
from typing import Any

from apache_beam import DoFn
from apache_beam.internal import util as arguments
from apache_beam.options import pipeline_options
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_fn_api_pb2
from apache_beam.runners import common
from apache_beam.runners.worker import (
    bundle_processor,
    data_plane,
    sdk_worker,
    sdk_worker_main,
    statecache,
    statesampler,
    worker_id_interceptor,
)
from apache_beam.transforms import core, util
from apache_beam.transforms.window import GlobalWindow, GlobalWindows
from apache_beam.utils.counters import CounterFactory
from apache_beam.utils.timestamp import Timestamp
from apache_beam.utils.windowed_value import WindowedValue

from luminosity._shared import descendants
from luminosity._shared.hangs import write_stacks_on_signal
from luminosity._shared.model_sizes import RUN_FOLDER_VARIABLE
from luminosity._shared.text import parse_size
from luminosity.engine.data import wire
from luminosity.engine.fnapi.connection import add_logger_name
from luminosity.engine.spill.quota import WriterQuota
from luminosity.engine.workers import printed, worker_files
from luminosity.engine.workers.failure import Failure
from luminosity.engine.workers.request import WorkerRequest
from luminosity.engine.workers.sdk import beam_models, group_output
from luminosity.engine.workers.sdk.bundle_report import BundleMeter, report_of
from luminosity.engine.workers.sdk.cells import AddingState, ValueState, copy_of_callable
from luminosity.engine.workers.sdk.channel import BlockChannel, BlockWriter, RepeatedTimer
from luminosity.engine.workers.sdk.large_elements import BlockInput, BlockOutput
from luminosity.engine.workers.sdk.passing import measure_with_letters, pass_failing_elements_by
from luminosity.engine.workers.sdk.quick_steps import make_runner
from luminosity.engine.workers.sdk.stream_cache import StreamCache
from luminosity.engine.workers.sdk.user_state import BatchingStateHandler, CachingHandler, estimate_size

__all__ = [
    "RUNNER_CAPABILITIES",
    "PromptStateSampler",
    "ReportingHarness",
    "call_steps_quickly",
    "emit_full_batches_at_once",
    "end_with",
    "run",
]

_SAMPLING_PERIOD_MS = 5  # a bundle waits up to this long for the sampler's end
RUNNER_CAPABILITIES = common_urns.runner_protocols.MULTIMAP_KEYS_VALUES_SIDE_INPUT.urn

_GlobalBatching: Any = util._GlobalWindowsBatchingDoFn  # pyright: ignore[reportPrivateUsage]
_WindowedBatching: Any = util._WindowAwareBatchingDoFn  # pyright: ignore[reportPrivateUsage]


class ReportingHarness(sdk_worker.SdkHarness):
    """Beam's harness, but its errors contain the step, the user's line and the element besides the traceback.

    Its responses also say what CPU time and memory a bundle took.
    """

    _meter = BundleMeter()
    on_failed: Callable[[str], None] = staticmethod(lambda _: None)  # gets the id of a bundle that has failed
    copied: tuple[str, str] | None = None  # the working directory, and the driver's folder of which it is a copy

    def _execute(
        self,
        task: Callable[[], beam_fn_api_pb2.InstructionResponse],
        request: beam_fn_api_pb2.InstructionRequest,
    ) -> None:
        with statesampler.instruction_id(request.instruction_id):
            try:
                response = (
                    measure_with_letters(self._meter.measure, request.instruction_id, task)
                    if request.HasField("process_bundle")
                    else task()
                )
            except BaseException as error:
                # Whatever was raised, the runner must get a response to the instruction.
                if request.HasField("process_bundle"):
                    self.on_failed(request.instruction_id)
                response = beam_fn_api_pb2.InstructionResponse(
                    instruction_id=request.instruction_id, error=self._named(Failure.of(error).to_json())
                )
            self._responses.put(response)

    def _request_process_bundle_progress(self, request: beam_fn_api_pb2.InstructionRequest) -> None:
        """Answer what a bundle does now, in place of Beam's counters, which the runner does not ask for.

        On a thread of its own: Beam's thread for such requests may wait for a split, and a split for user code.
        """

        def answer() -> beam_fn_api_pb2.InstructionResponse:
            report = report_of(self._bundle_processor_cache, request.process_bundle_progress.instruction_id)
            response = beam_fn_api_pb2.InstructionResponse(instruction_id=request.instruction_id)
            response.process_bundle_progress.monitoring_data[wire.REPORT] = self._named(report.to_json()).encode()
            return response

        threading.Thread(target=self._execute, args=(answer, request), name="luminosity-report", daemon=True).start()

    def _named(self, failure: str) -> str:
        """Return a failure that names the user's own files, not those of a copy."""
        if self.copied is None:
            return failure
        copy, source = (json.dumps(os.path.join(folder, ""))[1:-1] for folder in self.copied)
        return failure.replace(copy, source)


class PromptStateSampler(statesampler.StateSampler):
    """Beam's sampler, but a bundle waits at most 5 ms for its end, not up to a fifth of the bundle's time."""

    def __init__(self, prefix: str, counter_factory: CounterFactory) -> None:
        super().__init__(prefix, counter_factory, sampling_period_ms=_SAMPLING_PERIOD_MS)


def end_with(lifeline: int) -> None:
    """End this process when the other end of the pipe ``lifeline`` closes, which means that the runner has ended."""

    def watch() -> None:
        while os.read(lifeline, 4096):
            pass
        descendants.end_group(os.getpid())
        os._exit(1)

    threading.Thread(target=watch, name="lifeline", daemon=True).start()


def run(request: WorkerRequest, channel: type[BlockChannel] | None = None) -> None:
    """Serve the runner at ``request.url`` until it has no more work.

    Blocks go through ``channel``, or through files of this machine.
    """
    if threading.current_thread() is threading.main_thread():
        # Ctrl-C reaches the whole process group; the runner decides what to do with its workers.
        signal.signal(signal.SIGINT, signal.SIG_IGN)
        os.nice(request.niceness)
    write_stacks_on_signal()
    printed.print_to(request.prints)
    printed.prepare_streams()
    os.environ.clear()
    os.environ.update(request.environment)
    os.environ[RUN_FOLDER_VARIABLE] = request.memory_folder
    sys.argv[:] = request.arguments
    sys.path[:] = request.import_path
    os.chdir(request.working_directory)
    _reseed()
    _know_arrays_of_numpy_2()
    _change_beam(request, channel)
    descriptor = f'url: "{request.url}"'
    created: Any = sdk_worker_main.create_harness(
        {
            "WORKER_ID": request.worker_id,
            "CONTROL_API_SERVICE_DESCRIPTOR": descriptor,
            "LOGGING_API_SERVICE_DESCRIPTOR": descriptor,
            "PIPELINE_OPTIONS": json.dumps(request.pipeline_options),
            "RUNNER_CAPABILITIES": RUNNER_CAPABILITIES,
        }
    )
    log_handler, harness, _ = created
    if log_handler:
        log_handler.addFilter(add_logger_name)
    if request.load_ahead:
        worker_files.start_loading(request.load_ahead)  # not earlier: Beam's pickler must know its options
    try:
        harness.run()
    finally:
        if log_handler:
            logging.getLogger().removeHandler(log_handler)
            log_handler.close()


def _change_beam(request: WorkerRequest, channel: type[BlockChannel] | None) -> None:
    """Put our parts in place of those of Beam's worker, and define the classes of the user's script."""
    # Beam sets it on import, before this worker had an id.
    setattr(worker_id_interceptor.WorkerIdInterceptor, "_worker_id", request.worker_id)  # noqa: B010
    budget = request.pipeline_options.get("model_memory_budget")
    beam_models.keep_small_models_here(None if budget is None else parse_size(str(budget)))
    beam_models.count_bytes_of_samples()
    worker_files.load(request.main_classes)
    worker_files.load_in_spawned(request.main_classes)
    os.environ[beam_models.FOLDER_VARIABLE] = folder = _shared_folder(request)
    beam_models.keep_files_in(folder)
    if channel is None:
        quota = WriterQuota(request.quota, request.writer)
        BatchingStateHandler.group_folder = request.spill_folder
        BlockChannel.writer = BlockWriter(request.memory_folder, request.spill_folder, quota, request.worker_id)
    data_plane.GrpcClientDataChannel = channel or BlockChannel
    sdk_worker.GrpcStateHandler = BatchingStateHandler
    sdk_worker.GlobalCachingStateHandler = CachingHandler
    statecache.get_deep_size = estimate_size
    if request.is_stream:
        sdk_worker.StateCache = StreamCache
    sdk_worker_main.SdkHarness = ReportingHarness
    statesampler.StateSampler = PromptStateSampler
    emit_full_batches_at_once()
    call_steps_quickly()
    if request.pipeline_options.get("dead_letters"):
        pass_failing_elements_by()
    # Beam's worker logs details for its developers at INFO.
    logging.getLogger("apache_beam.runners.worker").setLevel(logging.WARNING)
    # They warn that there is no staging folder (nothing is staged here), and about options whose class is defined by
    # user code that is not loaded yet.
    for name in (sdk_worker_main.__name__, pipeline_options.__name__):
        logging.getLogger(name).setLevel(logging.ERROR)
    # It logs every exception of user code; the runner gets them and reports the last one.
    logging.getLogger("apache_beam.runners.common").setLevel(logging.CRITICAL)


def _shared_folder(request: WorkerRequest) -> str:
    """Return the folder with the addresses of shared objects: one for each Python environment of a run."""
    folder = os.path.dirname(request.main_classes)
    if request.python:
        folder = os.path.join(folder, hashlib.sha256(request.python.encode()).hexdigest()[:16])
        os.makedirs(folder, mode=0o700, exist_ok=True)
    return folder


def _know_arrays_of_numpy_2() -> None:
    """Let numpy 1 unpickle arrays of numpy 2, whose modules have other names: steps may have different versions."""
    numpy = sys.modules.get("numpy")
    if numpy is not None and numpy.__version__.startswith("1."):
        sys.modules.setdefault("numpy._core.numeric", importlib.import_module("numpy.core.numeric"))


def _reseed() -> None:
    """Seed the random generators: forked workers would otherwise all draw the same numbers."""
    random.seed()
    numpy = sys.modules.get("numpy")
    if numpy is not None:
        numpy.random.seed()


def emit_full_batches_at_once() -> None:
    """Change the two DoFns of ``BatchElements`` in this process.

    Beam's own keep a full batch until the next element arrives. That element then belongs to the bundle: if the bundle
    is split while the batch is computed, the element is left over and makes a batch of one. The batches themselves are
    the same.
    """
    _GlobalBatching.process = _with_full_batch(_GlobalBatching.process)
    _WindowedBatching.process = _with_full_batch_of_window(_WindowedBatching.process)


def _with_full_batch(original: Any) -> Any:
    def emit(self: Any, element: Any) -> Iterator[Any]:
        yield from original(self, element)
        if self._running_batch_size >= self._target_batch_size:
            with self._batch_size_estimator.record_time(self._running_batch_size):
                yield GlobalWindows.windowed_value_at_end_of_window(self._batch)
            self._batch = []
            self._running_batch_size = 0
            self._target_batch_size = self._batch_size_estimator.next_batch_size()

    def process(self: Any, element: Any) -> Iterator[Any] | None:
        size = self._running_batch_size + self._element_size_fn(element)
        if size >= self._target_batch_size:
            return emit(self, element)
        self._batch.append(element)  # most elements fill no batch: they need no generator
        self._running_batch_size = size
        return None

    return process


def _with_full_batch_of_window(original: Any) -> Any:
    def emit(self: Any, element: Any, window: Any) -> Iterator[Any]:
        yield from original(self, element, window)
        batch = self._batches.get(window)
        if batch is not None and batch.size >= self._target_batch_size:
            with self._batch_size_estimator.record_time(batch.size):
                yield WindowedValue(batch.elements, window.max_timestamp(), (window,))
            del self._batches[window]
            self._target_batch_size = self._batch_size_estimator.next_batch_size()

    def process(self: Any, element: Any, window: Any = DoFn.WindowParam) -> Iterator[Any] | None:
        batch = self._batches.get(window)
        size = self._element_size_fn(element)
        if batch is None or batch.size + size >= self._target_batch_size:
            return emit(self, element, window)
        batch.elements.append(element)
        batch.size += size
        return None

    return process


_insert_values: Callable[[Any, Any, Any], tuple[list[Any], dict[str, Any]]] = arguments.insert_values_in_args
_make_timestamp: Callable[..., None] = Timestamp.__init__
_MICROS_PER_S = 1_000_000


def call_steps_quickly() -> None:
    """Replace what Beam's worker calls for each element by functions with the same results, in this process."""
    arguments.insert_values_in_args = _values_in_args
    bundle_processor.OutputTimer = RepeatedTimer
    bundle_processor.DataInputOperation = BlockInput
    bundle_processor.DataOutputOperation = BlockOutput
    group_output.register()
    bundle_processor.CombiningValueRuntimeState = AddingState
    bundle_processor.ReadModifyWriteRuntimeState = ValueState
    setattr(common, "DoFnRunner", make_runner)  # noqa: B010
    setattr(core.CallableWrapperCombineFn, "__deepcopy__", copy_of_callable)  # noqa: B010
    Timestamp.__init__ = _init_timestamp
    GlobalWindow.__hash__ = object.__hash__  # there is one object of the class


def _values_in_args(args: Any, kwargs: Any, values: Any) -> tuple[list[Any], dict[str, Any]]:
    """Put side inputs among a step's arguments. Most steps have none, but Beam looks for their places."""
    return _insert_values(args, kwargs, values) if values or kwargs else (list(args), {})


def _init_timestamp(self: Any, seconds: Any = 0, subseconds: Any = 0, *args: Any, **kwargs: Any) -> None:
    """Make a timestamp. Those of elements are whole microseconds: their types need no further look."""
    if args or kwargs or type(seconds) is not int or type(subseconds) is not int:
        _make_timestamp(self, seconds, subseconds, *args, **kwargs)
        return
    self._precision = Timestamp.MICROS_PRECISION
    self._seconds, self._subseconds = divmod(seconds * _MICROS_PER_S + subseconds, _MICROS_PER_S)
