"""A simulated worker: it runs real bundles, and what it sends arrives at simulated times, or not, if it has died."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from typing import Any

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.data import wire
from luminosity.engine.fnapi.connection import Callbacks
from luminosity.engine.simulated.beam_worker import BeamBundles, DirectState, new_state
from luminosity.engine.simulated.disasters import Weather
from luminosity.engine.simulated.simulation import Ended, Simulation
from luminosity.engine.workers.failure import Failure, original
from luminosity.engine.workers.launcher import LocalProcess, OnExit
from luminosity.engine.workers.sdk.bundle_report import BundleReport
from luminosity.engine.workers.sdk.channel import BlockWriter

__all__ = ["SimulatedWorker", "WorkerDies"]

_Elements = beam_fn_api_pb2.Elements
_CACHE_BYTES = 1 << 20  # of state
_KILLED, _ENDED = -9, 0
_EXIT_S = 0.05  # at most, until the end of a process is noticed


class WorkerDies(BaseException):
    """Raised by a step that ends its process."""


class _InFlight:
    """A message that has not arrived."""

    is_lost = False


class _Bundle:
    """A bundle that runs in a simulated worker."""

    def __init__(self, worker: SimulatedWorker, request: beam_fn_api_pb2.InstructionRequest, elements: _Elements):
        self.instruction_id = request.instruction_id
        self.request = request
        self.elements = elements
        self.stream_id = request.process_bundle.data_stream_id
        self.state = worker.state
        self.pack = worker.writer.message
        self.writer = worker.writer
        self._worker = worker
        chance = worker.simulation.chance
        self.most_in_block = chance.randint(1, worker.weather.block)
        self._stride = chance.choice((1, 1, 3, 10))  # elements that take no time but at their end
        self._elements = 0
        self._owed = 0.0

    def send(self, elements: _Elements) -> None:
        self._worker.send_data(self.stream_id, elements)

    def next_element(self) -> None:
        weather, chance = self._worker.weather, self._worker.simulation.chance
        is_slow = weather.slow_part and chance.random() < weather.slow_part
        self._owed += weather.slow_s if is_slow else weather.element_s
        self._elements += 1
        if is_slow or self._elements % self._stride == 0:
            owed, self._owed = self._owed, 0.0
            self._worker.pass_time(owed)


class SimulatedWorker(LocalProcess):
    """One worker: its process, and the loop's connection to it."""

    writer: BlockWriter

    def __init__(
        self, name: str, simulation: Simulation, weather: Weather, callbacks: Callbacks, beam: Callable[[], BeamBundles]
    ) -> None:
        self.name = name
        self.simulation = simulation
        self.weather = weather
        self.callbacks = callbacks
        self.state: Any = None
        self.is_connected = self.is_dead = self.is_closed = self.leaves = False
        self.slowness = 1.0
        self.frozen_until = 0.0
        self.bundles: dict[str, _Bundle] = {}
        self.finished: dict[str, None] = {}  # bundles that wait for their finalization
        self._beam = beam
        self._tasks: dict[str, Any] = {}
        self._on_exit: OnExit | None = None
        self._instructions: dict[str, beam_fn_api_pb2.InstructionRequest] = {}
        self._last_at: dict[str, float] = {}  # by stream: when its last message arrives
        self._in_flight: dict[_InFlight, None] = {}  # in the order in which they were sent

    # The process, for the loop

    @property
    def pid(self) -> int:
        """No process of the system."""
        return 0

    def is_leaving(self) -> bool:
        """Return whether its machine will be gone soon."""
        return self.leaves

    def kill(self) -> None:
        """End the process at once."""
        self.die(_KILLED)

    def start(self, on_exit: OnExit, writer: BlockWriter, state: DirectState) -> None:
        """Begin to start."""
        self._on_exit, self.writer = on_exit, writer
        self.state = new_state(state, _CACHE_BYTES)
        self.simulation.at(self.simulation.chance.uniform(0.0, self.weather.start_s), self._connect)

    def _connect(self) -> None:
        if not self.is_dead:
            self.is_connected = True
            self._deliver("control", "connected", self.callbacks.on_connected)

    # The connection, for the loop

    def instruct(self, request: beam_fn_api_pb2.InstructionRequest) -> None:
        """Send an instruction, which arrives later."""
        self._arrive("to control", lambda: self._take(request))

    def send(self, stream_id: str, messages: Iterable[_Elements]) -> None:
        """Send the whole input of a bundle, which arrives later."""
        elements = _Elements()
        for message in messages:
            elements.MergeFrom(message)
        self._arrive(f"to {stream_id}", lambda: self._take_input(elements))

    def cause(self, instruction_id: str) -> BaseException | None:
        """Return None, as for a worker in another process."""
        return None

    def finish(self) -> None:
        """Let the worker end, once it has heard of it."""
        self._arrive("to control", lambda: self.die(_ENDED))

    def close(self) -> None:
        """End the connection: what is under way is dropped."""
        self.is_closed = True

    # What the worker does

    def _take(self, request: beam_fn_api_pb2.InstructionRequest) -> None:
        kind = request.WhichOneof("request")
        if kind == "process_bundle":
            self._instructions[request.instruction_id] = request
            self._begin_if_complete(request.instruction_id)
        elif kind == "process_bundle_split":
            self._split(request)
        elif kind == "process_bundle_progress":
            self._report(request)
        elif kind == "finalize_bundle":
            self._finalize(request)

    def _take_input(self, elements: _Elements) -> None:
        instruction_id = next(part.instruction_id for part in (*elements.data, *elements.timers))
        self.bundles[instruction_id] = _Bundle(self, beam_fn_api_pb2.InstructionRequest(), elements)
        self._begin_if_complete(instruction_id)

    def _begin_if_complete(self, instruction_id: str) -> None:
        request, waiting = self._instructions.get(instruction_id), self.bundles.get(instruction_id)
        if request is None or waiting is None:
            return
        del self._instructions[instruction_id]
        bundle = self.bundles[instruction_id] = _Bundle(self, request, waiting.elements)
        self._tasks[instruction_id] = self.simulation.start(lambda: self._run(bundle))

    def _run(self, bundle: _Bundle) -> None:
        """Run a bundle, as a task."""
        try:
            self.pass_time(0.0)
            response = self._beam().run(bundle.request, bundle)
        except Ended:
            raise
        except BaseException as error:
            if self.is_dead:
                raise Ended from error  # some library has wrapped it
            if isinstance(original(error), WorkerDies):
                self.simulation.at(0.0, lambda: self.die(_KILLED))
                self.simulation.pause(1e9)  # ends with the worker
            response = beam_fn_api_pb2.InstructionResponse(
                instruction_id=bundle.instruction_id, error=Failure.of(error).to_json()
            )
        if response.process_bundle.requires_finalization:
            self.finished[bundle.instruction_id] = None
        del self.bundles[bundle.instruction_id]
        self._tasks.pop(bundle.instruction_id, None)
        self._respond(response)

    def pass_time(self, seconds: float) -> None:
        """Let time pass in a bundle's task."""
        simulation = self.simulation
        simulation.pause(seconds * self.slowness)
        while self.frozen_until > simulation.now:
            simulation.pause(self.frozen_until - simulation.now)

    def _split(self, request: beam_fn_api_pb2.InstructionRequest) -> None:
        bundle_id = request.process_bundle_split.instruction_id
        if bundle_id in self._tasks:
            self._respond(self._beam().answer(request))
            return
        response = beam_fn_api_pb2.InstructionResponse(instruction_id=request.instruction_id)
        if bundle_id in self._instructions or self.simulation.chance.random() < 0.5:
            response.process_bundle_split.SetInParent()
        else:
            response.error = f"RuntimeError: Unknown process bundle id {bundle_id}."
        self._respond(response)

    def _report(self, request: beam_fn_api_pb2.InstructionRequest) -> None:
        instruction_id = request.process_bundle_progress.instruction_id
        is_running = instruction_id in self._tasks
        response = beam_fn_api_pb2.InstructionResponse(instruction_id=request.instruction_id)
        report = (
            BundleReport("process", indexes=self._beam().index(instruction_id)) if is_running else BundleReport("ended")
        )
        response.process_bundle_progress.monitoring_data[wire.REPORT] = report.to_json().encode()
        self._respond(response)

    def _finalize(self, request: beam_fn_api_pb2.InstructionRequest) -> None:
        if request.finalize_bundle.instruction_id in self.finished:
            del self.finished[request.finalize_bundle.instruction_id]
            self._respond(self._beam().answer(request))

    def die(self, code: int) -> None:
        """End the process. Some of what it has sent is lost, and its end is noticed later."""
        if self.is_dead:
            return
        self.is_dead = True
        chance = self.simulation.chance
        if code != _ENDED:
            lost_from = chance.randint(0, len(self._in_flight))
            for message in list(self._in_flight)[lost_from:]:
                message.is_lost = True
        for task in list(self._tasks.values()):
            task.end()
        for instruction_id in self.finished:
            self._beam().forget(instruction_id)
        self._tasks.clear()
        self.simulation.trace.add(f"{self.name} dies")
        if (on_exit := self._on_exit) is not None:
            self.simulation.at(chance.uniform(0.0, _EXIT_S), lambda: on_exit(code))

    # Messages

    def send_data(self, stream_id: str, elements: _Elements) -> None:
        """Send output."""
        # Not the bytes: a message may name a file, whose name has another length in another process.
        count = sum(wire.unpack(part.data)[0] for part in elements.data if part.data)
        count += sum(len(part.timers) for part in elements.timers)
        ends = sum(part.is_last for part in (*elements.data, *elements.timers))
        self._deliver(f"data {stream_id}", f"data {count} {ends}", lambda: self.callbacks.on_elements(elements))

    def _respond(self, response: beam_fn_api_pb2.InstructionResponse) -> None:
        kind = response.WhichOneof("response") or "error"
        stream = f"control {response.instruction_id}" if self.weather.may_reorder else "control"
        self._deliver(stream, f"{kind} {response.instruction_id}", lambda: self.callbacks.on_response(response))

    def _delay(self) -> float:
        weather, chance = self.weather, self.simulation.chance
        if weather.far_part and chance.random() < weather.far_part:
            return chance.uniform(0.0, weather.far_delay_s)
        return chance.uniform(0.0, weather.delay_s)

    def _arrival(self, stream: str) -> float:
        """Return when a message arrives: after all earlier ones of its stream."""
        at = max(self.simulation.now + self._delay(), self._last_at.get(stream, 0.0), self.frozen_until)
        self._last_at[stream] = at
        return at

    def _arrive(self, stream: str, take: Callable[[], None]) -> None:
        def arrive() -> None:
            if self.is_dead:
                return
            if self.frozen_until > self.simulation.now:
                self._arrive(stream, take)
                return
            take()

        self.simulation.at_time(self._arrival(stream), arrive)

    def _deliver(self, stream: str, name: str, callback: Callable[[], None]) -> None:
        message = _InFlight()
        self._in_flight[message] = None

        def deliver() -> None:
            del self._in_flight[message]
            if not message.is_lost and not self.is_closed:
                self.simulation.trace.add(f"{self.simulation.now:.6f} {self.name} {name}")
                callback()

        self.simulation.at_time(self._arrival(stream), deliver)
