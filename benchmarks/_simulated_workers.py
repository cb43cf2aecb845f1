"""Simulated workers for the real loop: they receive bundles, and answer after the time that their elements take."""

from __future__ import annotations

import asyncio
import heapq
import itertools
import multiprocessing
import os
import threading
import time
from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from multiprocessing.connection import Connection
from typing import Any

from apache_beam.portability.api import beam_fn_api_pb2, beam_fn_api_pb2_grpc

from luminosity.engine.data import wire
from luminosity.engine.fnapi.connection import Callbacks
from luminosity.engine.workers.launcher import LocalProcess, OnExit
from luminosity.engine.workers.request import WorkerRequest

_PROCESSES = 2  # that act for the workers over gRPC
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


class DirectConnection(LocalProcess):
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

    def ended_seconds(self) -> float:
        """Return how long the bundles took that have ended."""
        return sum(connection.worker.busy_seconds for connection in self.all)

    def busy_seconds(self) -> float:
        """Return how long workers were busy until now: with bundles that have ended, and with those that run."""
        with self.lock:
            now = time.monotonic()
            running = [slot for connection in self.all for slot in connection.worker.bundles.values() if slot.ends_at]
            return self.ended_seconds() + sum(min(now, slot.ends_at) - slot.began_at for slot in running)

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


class SocketProcess(LocalProcess):
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

    def ended_seconds(self) -> float:
        return 0.0

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
