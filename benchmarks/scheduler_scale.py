"""Run the real loop against simulated workers, and print how many bundles a second it carries.

The loop, its stages, buffers, sizes of bundles and commits are those of every run. Only the workers are simulated: one
object in this process acts for all of them over the interfaces of the loop (``WorkerServer``, ``WorkerConnection`` and
``Launcher``), receives each bundle, and answers after the time that its elements take, without doing work.

Two questions, for 10, 100 and 500 workers:

- How many bundles a second does the loop carry at most? Every bundle has one element, which takes no time.
- What does a usual run cost? Elements take 20 ms, bundles grow up to a second as they always do; how busy are the
  workers, and which share of a core does the loop take?

``--sockets`` lets processes act for the workers over gRPC instead, as real workers do: then the server's threads, which
share the interpreter with the loop, are measured, too. ``--profile`` prints where the loop spends its time.
"""

from __future__ import annotations

import argparse
import asyncio
import cProfile
import heapq
import itertools
import logging
import multiprocessing
import os
import pstats
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field, replace
from multiprocessing.connection import Connection
from typing import Any

import apache_beam as beam
from apache_beam.coders import coder_impl
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability.api import beam_fn_api_pb2, beam_fn_api_pb2_grpc
from apache_beam.transforms.window import GlobalWindows

from luminosity.engine.data import wire
from luminosity.engine.fnapi.connection import Callbacks
from luminosity.engine.folders import RunFolders
from luminosity.engine.loop import sizing
from luminosity.engine.loop.bundle import Bundle
from luminosity.engine.loop.metrics import RunMetrics
from luminosity.engine.loop.parts import RunParts
from luminosity.engine.loop.scheduler import Scheduler
from luminosity.engine.loop.workers import Worker
from luminosity.engine.plan.codecs import Codecs
from luminosity.engine.plan.graph import Graph
from luminosity.engine.prepare import prepare, worker_environment
from luminosity.engine.setup import set_up
from luminosity.engine.workers.failure import Failure
from luminosity.engine.workers.launcher import OnExit
from luminosity.engine.workers.request import WorkerRequest

_SECONDS = 8.0  # of each case
_ELEMENT_S = 0.02  # of work, in the usual case
_WORKERS = (10, 100, 500)
_MOST_ELEMENTS = 1_500_000  # more than all workers do in the time of a case
_PROCESSES = 2  # that act for the workers, with --sockets
_BLOCK_ELEMENTS = 1000  # of the source's output
_Elements = beam_fn_api_pb2.Elements


@dataclass
class Answers:
    """What a worker has to know to answer: the outputs of each stage, and the blocks that the source sends."""

    writes: dict[str, list[str]]  # by stage: the transforms that write
    source: str  # the stage that makes all elements
    blocks: list[bytes]
    element_seconds: float

    def output(self, stage: str, instruction: str) -> _Elements:
        message = _Elements()
        for write in self.writes[stage]:
            for block in self.blocks if stage == self.source else ():
                message.data.add(instruction_id=instruction, transform_id=write, data=block)
            message.data.add(instruction_id=instruction, transform_id=write, is_last=True)
        return message


@dataclass
class Slot:
    """A bundle in a simulated worker."""

    instruction: str
    stage: str
    elements: int = 0
    began_at: float = 0.0
    ends_at: float = 0.0
    is_done: bool = False


@dataclass
class Simulated:
    """One worker: its bundles, and how it is answered for. The thread that acts for all workers uses it."""

    answers: Answers
    bundles: dict[str, Slot] = field(default_factory=dict[str, Slot])
    busy_seconds: float = 0.0

    def begin(self, request: beam_fn_api_pb2.InstructionRequest) -> None:
        stage = request.process_bundle.process_bundle_descriptor_id
        self.bundles[request.instruction_id] = Slot(request.instruction_id, stage)

    def take(self, elements: _Elements, now: float) -> list[Slot]:
        """Add input; return the bundles whose input is complete, with the time at which they end."""
        complete: list[Slot] = []
        for data in elements.data:
            slot = self.bundles.get(data.instruction_id)
            if slot is None:
                continue
            if data.data:
                slot.elements += wire.unpack(data.data)[0]
            if data.is_last:
                seconds = 0.0 if slot.stage == self.answers.source else slot.elements * self.answers.element_seconds
                slot.began_at, slot.ends_at = now, now + seconds
                complete.append(slot)
        return complete

    def end(self, slot: Slot) -> None:
        """Note that a bundle has ended."""
        slot.is_done = True
        self.busy_seconds += slot.ends_at - slot.began_at
        del self.bundles[slot.instruction]

    def split(
        self, request: beam_fn_api_pb2.InstructionRequest, now: float
    ) -> tuple[beam_fn_api_pb2.InstructionResponse, Slot | None]:
        """Give back the elements that a bundle has not begun, as a worker does; return the bundle that ends earlier."""
        response = beam_fn_api_pb2.InstructionResponse(instruction_id=request.instruction_id)
        response.process_bundle_split.SetInParent()
        slot = self.bundles.get(request.process_bundle_split.instruction_id)
        if slot is None or slot.is_done or not slot.ends_at or slot.stage == self.answers.source:
            return response, None
        begun = 1 + int((now - slot.began_at) / max(self.answers.element_seconds, 1e-9))
        if begun >= slot.elements:
            return response, None
        for read in request.process_bundle_split.desired_splits:
            response.process_bundle_split.channel_splits.add(
                transform_id=read, last_primary_element=begun - 1, first_residual_element=begun
            )
        slot.elements = begun
        slot.ends_at = slot.began_at + begun * self.answers.element_seconds
        return response, slot


# Workers in this process.


class DirectConnection:
    """The loop's connection to a simulated worker in this process."""

    def __init__(self, crew: DirectCrew, callbacks: Callbacks, worker: Simulated) -> None:
        self.callbacks = callbacks
        self.worker = worker
        self.on_exit: OnExit | None = None
        self._crew = crew

    def instruct(self, request: beam_fn_api_pb2.InstructionRequest) -> None:
        if request.WhichOneof("request") == "process_bundle":
            self.worker.begin(request)
        else:
            with self._crew.lock:
                response, cut = self.worker.split(request, time.monotonic())
            self.callbacks.on_response(response)
            if cut is not None:
                self._crew.answer_at(cut.ends_at, self, cut)

    def send(self, stream_id: str, messages: Iterable[_Elements]) -> None:
        now = time.monotonic()
        for message in messages:
            for slot in self.worker.take(message, now):
                self._crew.answer_at(slot.ends_at, self, slot)

    def cause(self, instruction_id: str) -> BaseException | None:
        return None

    def finish(self) -> None:
        self.kill()

    def close(self) -> None:
        pass

    @property
    def pid(self) -> int:
        return os.getpid()

    def kill(self) -> None:
        if self.on_exit is not None:
            self.on_exit, on_exit = None, self.on_exit
            on_exit(0)


class DirectCrew:
    """Acts for all workers on one thread, which sleeps until the next bundle ends."""

    def __init__(self, answers: Answers) -> None:
        self.connections: dict[str, DirectConnection] = {}
        self.all: list[DirectConnection] = []
        self._answers = answers
        self._heap: list[tuple[float, int, DirectConnection, Slot]] = []
        self._numbers = itertools.count()
        self.lock = threading.Lock()
        self._changed = threading.Condition(self.lock)
        self._has_ended = False
        self._thread = threading.Thread(target=self._work, name="crew", daemon=True)
        self._thread.start()

    def connect(self, worker_id: str, callbacks: Callbacks) -> DirectConnection:
        connection = self.connections[worker_id] = DirectConnection(self, callbacks, Simulated(self._answers))
        self.all.append(connection)
        return connection

    def disconnect(self, worker_id: str) -> None:
        self.connections.pop(worker_id).close()

    def start(self, request: WorkerRequest, on_exit: OnExit) -> DirectConnection:
        connection = self.connections[request.worker_id]
        connection.on_exit = on_exit
        connection.callbacks.on_connected()
        return connection

    def answer_at(self, at: float, connection: DirectConnection, slot: Slot) -> None:
        with self._changed:
            heapq.heappush(self._heap, (at, next(self._numbers), connection, slot))
            if self._heap[0][3] is slot:
                self._changed.notify()

    def stop(self) -> None:
        with self._changed:
            self._has_ended = True
            self._changed.notify()
        self._thread.join(10.0)

    def busy_seconds(self) -> float:
        return sum(connection.worker.busy_seconds for connection in self.all)

    def _work(self) -> None:
        while True:
            with self._changed:
                while not self._has_ended and (not self._heap or self._heap[0][0] > time.monotonic()):
                    self._changed.wait(self._heap[0][0] - time.monotonic() if self._heap else 1.0)
                if self._has_ended:
                    return
                now = time.monotonic()
                due: list[tuple[DirectConnection, Slot]] = []
                while self._heap and self._heap[0][0] <= now:
                    _, _, connection, slot = heapq.heappop(self._heap)
                    if not slot.is_done:  # a split may have ended it earlier
                        connection.worker.end(slot)
                        due.append((connection, slot))
            for connection, slot in due:
                output = self._answers.output(slot.stage, slot.instruction)
                if output.data:
                    connection.callbacks.on_elements(output)
                connection.callbacks.on_response(done(slot))


def done(slot: Slot) -> beam_fn_api_pb2.InstructionResponse:
    response = beam_fn_api_pb2.InstructionResponse(instruction_id=slot.instruction)
    response.process_bundle.SetInParent()
    return response


# Workers in other processes, over gRPC.


class SocketProcess:
    """A worker as the loop's launcher sees it."""

    def __init__(self, pid: int, on_exit: OnExit) -> None:
        self.pid = pid
        self._on_exit: OnExit | None = on_exit

    def kill(self) -> None:
        if self._on_exit is not None:
            self._on_exit, on_exit = None, self._on_exit
            on_exit(0)


class SocketCrew:
    """A launcher whose workers are coroutines in a few processes. They connect to the run's own gRPC server."""

    def __init__(self, url: str, answers: Answers) -> None:
        context = multiprocessing.get_context("spawn")
        pipes = [context.Pipe() for _ in range(_PROCESSES)]
        self._pipes = [ours for ours, _ in pipes]
        self._processes = [context.Process(target=act, args=(theirs, url, answers), daemon=True) for _, theirs in pipes]
        for process in self._processes:
            process.start()
        for pipe in self._pipes:
            pipe.recv()  # its imports are done
        self._next = itertools.cycle(range(_PROCESSES))
        self._exits: dict[str, SocketProcess] = {}
        self._threads = [threading.Thread(target=self._watch, args=(n,), daemon=True) for n in range(_PROCESSES)]
        for thread in self._threads:
            thread.start()

    def start(self, request: WorkerRequest, on_exit: OnExit) -> SocketProcess:
        number = next(self._next)
        process = self._exits[request.worker_id] = SocketProcess(self._processes[number].pid or 0, on_exit)
        self._pipes[number].send(request.worker_id)
        return process

    def stop(self) -> None:
        for pipe in self._pipes:
            pipe.send(None)
        for process, thread in zip(self._processes, self._threads, strict=True):
            process.join(10.0)
            thread.join(10.0)
            if process.is_alive():
                process.kill()

    def busy_seconds(self) -> float:
        return 0.0  # the processes don't tell while they run

    def _watch(self, number: int) -> None:
        while True:
            try:
                message = self._pipes[number].recv()
            except EOFError:
                return
            if message is None:
                return
            self._exits[message].kill()  # the worker has ended


def act(pipe: Connection, url: str, answers: Answers) -> None:
    """Act for the workers whose ids come through the pipe."""
    pipe.send("ready")
    asyncio.run(_act(pipe, url, answers))


async def _act(pipe: Connection, url: str, answers: Answers) -> None:
    import grpc

    tasks: list[asyncio.Task[None]] = []
    loop = asyncio.get_running_loop()
    options = [("grpc.use_local_subchannel_pool", 1), ("grpc.max_receive_message_length", -1)]
    while (worker_id := await loop.run_in_executor(None, pipe.recv)) is not None:
        channel = grpc.aio.insecure_channel(url, options=options)
        tasks.append(
            loop.create_task(_worker(worker_id, Simulated(answers), channel, lambda name=worker_id: pipe.send(name)))
        )
    for task in tasks:
        task.cancel()
    await asyncio.gather(*tasks, return_exceptions=True)
    pipe.send(None)


async def _worker(worker_id: str, worker: Simulated, channel: Any, on_end: Callable[[], None]) -> None:
    """Be one worker: a control stream, and a data stream for its slot."""
    metadata = (("worker_id", worker_id),)
    control = beam_fn_api_pb2_grpc.BeamFnControlStub(channel).Control(metadata=metadata)
    data = beam_fn_api_pb2_grpc.BeamFnDataStub(channel).Data(metadata=(*metadata, ("data_stream_id", "0")))
    early: dict[str, list[_Elements]] = {}  # input that came before its instruction
    answering: set[asyncio.Task[None]] = set()

    async def answer(slot: Slot) -> None:
        await asyncio.sleep(max(0.0, slot.ends_at - time.monotonic()))
        if slot.is_done:
            return  # a split has ended it earlier
        worker.end(slot)
        output = worker.answers.output(slot.stage, slot.instruction)
        if output.data:
            await data.write(output)
        await control.write(done(slot))

    def answer_later(slot: Slot) -> None:
        task = asyncio.get_running_loop().create_task(answer(slot))
        answering.add(task)
        task.add_done_callback(answering.discard)

    def take(elements: _Elements) -> None:
        for slot in worker.take(elements, time.monotonic()):
            answer_later(slot)

    async def read_data() -> None:
        async for elements in data:
            instruction = elements.data[0].instruction_id
            if instruction in worker.bundles:
                take(elements)
            else:
                early.setdefault(instruction, []).append(elements)

    reading = asyncio.get_running_loop().create_task(read_data())
    try:
        async for request in control:
            if request.WhichOneof("request") == "process_bundle":
                worker.begin(request)
                for elements in early.pop(request.instruction_id, ()):
                    take(elements)
            else:
                response, cut = worker.split(request, time.monotonic())
                await control.write(response)
                if cut is not None:
                    answer_later(cut)
    finally:
        reading.cancel()
        on_end()
        await channel.close()


# The run.


class Stopwatch:
    """The loop's listener: counts time on the loop's thread from the moment when all workers are there."""

    def __init__(self, workers: int, cancel: Callable[[], None], bundles: Callable[[], int], seconds: float) -> None:
        self._wanted = workers
        self._cancel = cancel
        self._bundles = bundles
        self._seconds = seconds
        self._ends_at = float("inf")
        self._began: tuple[float, float, float, int] | None = None
        self.result: tuple[float, float, float, int] | None = None
        self.busy_seconds: Callable[[], float] = lambda: 0.0
        self.busy = 0.0
        self._busy_before = 0.0

    def tick(self) -> None:
        now = time.monotonic()
        if self._began is not None and now >= self._ends_at and self.result is None:
            before = self._began
            after = now, time.thread_time(), time.process_time(), self._bundles()
            self.result = after[0] - before[0], after[1] - before[1], after[2] - before[2], after[3] - before[3]
            self.busy = self.busy_seconds() - self._busy_before
            self._cancel()

    def worker_started(self, worker: Worker) -> None:
        self._wanted -= 1
        if not self._wanted:
            self._began = time.monotonic(), time.thread_time(), time.process_time(), self._bundles()
            self._busy_before = self.busy_seconds()
            self._ends_at = self._began[0] + self._seconds

    def worker_lost(self, worker: Worker, reason: str) -> None:
        raise RuntimeError(f"a simulated worker {reason}")

    def worker_ends(self, worker: Worker) -> None:
        pass

    def worker_ended(self, worker: Worker) -> None:
        pass

    def bundle_retried(self, bundle: Bundle, failure: Failure) -> None:
        raise RuntimeError(f"a bundle failed: {failure}")


def planned(workers: int) -> Any:
    """Return the plan of a pipeline that makes elements and maps them, with one slot for each worker."""
    options = PipelineOptions([f"--cpu_workers={workers}", "--progress=off", "--run_dir=off"])
    pipeline = beam.Pipeline(options=options)
    _ = pipeline | beam.Impulse() | beam.FlatMap(lambda _: [b""]) | beam.Reshuffle() | "Work" >> beam.Map(lambda x: x)
    return prepare(pipeline.to_runner_api(default_environment=worker_environment(options)), options)


def answers_for(graph: Graph, elements: int, element_seconds: float) -> Answers:
    source = next(stage for stage in graph.stages if stage.writes)
    (write,) = source.writes
    impl = Codecs(graph).safe_impl(write.coder_id)
    stream: Any = coder_impl.create_OutputStream()
    impl.encode_to_stream(GlobalWindows.windowed_value(b"element"), stream, True)
    block = wire.pack_bytes(_BLOCK_ELEMENTS, stream.get() * _BLOCK_ELEMENTS)
    return Answers(
        {stage.id: [each.transform_id for each in stage.writes] for stage in graph.stages},
        source.id,
        [block] * (elements // _BLOCK_ELEMENTS),
        element_seconds,
    )


def run(
    workers: int, element_seconds: float, *, sockets: bool, seconds: float, profile: bool = False
) -> tuple[float, ...]:
    """Return bundles per second, the loop's and the process's CPU seconds per second, and how busy workers were."""
    prepared = planned(workers)
    folders = RunFolders()
    try:
        answers = answers_for(prepared.graph, _MOST_ELEMENTS, element_seconds)
        parts: RunParts = set_up(prepared.graph, prepared.assignments, prepared.config, folders, RunMetrics(), {})
        crew: Any
        if sockets:
            crew = SocketCrew(folders.url, answers)
            parts = replace(parts, launcher=crew)
        else:
            parts.server.stop()
            crew = DirectCrew(answers)
            parts = replace(parts, server=crew, launcher=crew)
        cancelled: list[Callable[[], None]] = []
        stopwatch = Stopwatch(
            workers, lambda: cancelled[0](), lambda: sum(stage.bundles_done for stage in parts.stages), seconds
        )
        stopwatch.busy_seconds = crew.busy_seconds
        scheduler = Scheduler(parts, stopwatch)
        cancelled.append(scheduler.cancel)
        profiler = cProfile.Profile() if profile else None
        try:
            if profiler is not None:
                profiler.enable()
            scheduler.run()
        except Exception as error:
            if stopwatch.result is None:
                raise
            logging.getLogger(__name__).debug("the run was cancelled: %s", error)
        finally:
            if profiler is not None:
                profiler.disable()
                pstats.Stats(profiler).sort_stats("tottime").print_stats(18)
            crew.stop()
            parts.server.stop()
    finally:
        folders.remove()
    if stopwatch.result is None:
        raise RuntimeError("the elements were done before the time was over")
    elapsed, loop_cpu, process_cpu, bundles = stopwatch.result
    return bundles / elapsed, loop_cpu / elapsed, process_cpu / elapsed, stopwatch.busy / elapsed / workers


def one_element(self: sizing.BundleSize, *arguments: Any, **named: Any) -> int:
    """Stand for ``BundleSize.next``."""
    return 1


def main() -> None:
    parser = argparse.ArgumentParser(description=(__doc__ or "").splitlines()[0])
    parser.add_argument("--workers", type=int, nargs="*", default=list(_WORKERS))
    parser.add_argument("--seconds", type=float, default=_SECONDS)
    parser.add_argument("--sockets", action="store_true")
    parser.add_argument("--profile", action="store_true")
    parser.add_argument("--case", choices=("most", "usual", "both"), default="both")
    parsed = parser.parse_args()
    logging.disable(logging.WARNING)
    heads = ("workers", "case", "bundles/s", "cores: loop", "process", "ms a bundle", "busy workers")
    print("  ".join(f"{head:>12}" for head in heads))
    for case in ("most", "usual"):
        if parsed.case not in (case, "both"):
            continue
        # The loop would make longer bundles, and fewer of them, of elements that take no time.
        sizing.BundleSize.next = one_element if case == "most" else _NEXT  # pyright: ignore[reportAttributeAccessIssue]
        for workers in parsed.workers:
            found = run(
                workers,
                _ELEMENT_S if case == "usual" else 0.0,
                sockets=parsed.sockets,
                seconds=parsed.seconds,
                profile=parsed.profile,
            )
            bundles, loop, process, busy = found
            cells = (f"{workers}", case, f"{bundles:,.0f}", f"{loop:.2f}", f"{process:.2f}")
            cells += (f"{1000 * loop / bundles:.3f}", f"{busy:.0%}" if case == "usual" and not parsed.sockets else "-")
            print("  ".join(f"{cell:>12}" for cell in cells), flush=True)


_NEXT = sizing.BundleSize.next

if __name__ == "__main__":
    main()
