"""Workers of a counted run: a bundle takes the time that it is said to take, and its elements are a number."""

from __future__ import annotations

from collections.abc import Callable, Iterable
from dataclasses import dataclass, field
from typing import Protocol

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity._shared.text import LOST_WITH_NODE
from luminosity.engine.data import wire
from luminosity.engine.fnapi.connection import Callbacks
from luminosity.engine.simulated.virtual_time import VirtualTime
from luminosity.engine.workers.launcher import LocalProcess, OnExit
from luminosity.engine.workers.request import WorkerRequest
from luminosity.engine.workers.sdk.bundle_report import BundleReport

__all__ = ["Costs", "CountedCrew", "CountedWorker", "Flow"]

_Elements = beam_fn_api_pb2.Elements
_Request = beam_fn_api_pb2.InstructionRequest
_Response = beam_fn_api_pb2.InstructionResponse


class Costs(Protocol):
    """Says how long what workers do takes, in seconds."""

    def start(self, pool: str) -> tuple[float, float]:
        """Return how long a worker that is wanted now takes to start, and how long to load its models then."""
        ...

    def bundle(self, stage: str, elements: int) -> float:
        """Return how long so many elements of a bundle take in a worker that has the machine for itself."""
        ...

    def begin(self, stage: str) -> float:
        """Note that a bundle begins. Returns how many times as long it takes because others run."""
        ...

    def ended(self, stage: str) -> None:
        """Note that a bundle has ended, or was lost."""
        ...

    def kept(self, stage: str, elements: int, seconds: float, elapsed: float) -> float:
        """Return how many of the ``elapsed`` seconds of a lost bundle need not be done again."""
        ...


@dataclass
class Flow:
    """What a stage sends to another one over the whole run."""

    transform_id: str
    elements: int
    element_bytes: int
    sent: int = 0

    def due(self, done: int, of: int) -> int:
        """Return how many elements to send once so many of the stage's own are done. Counts them as sent."""
        due = done * self.elements // of - self.sent
        self.sent += due
        return due


@dataclass
class _Stage:
    elements: int
    flows: list[Flow] = field(default_factory=list[Flow])
    done: int = 0
    kept: float = 0.0  # seconds of lost bundles that the next ones need not do
    # Elements that splits and lost bundles gave back, the first one last, with the seconds that each of them takes:
    # what is slow in one bundle is as slow in the next one.
    returned: list[tuple[int, float]] = field(default_factory=list[tuple[int, float]])

    def take_returned(self, elements: int) -> tuple[int, float]:
        """Take up to so many elements that were given back. Returns how many, and their seconds."""
        taken, seconds = 0, 0.0
        while self.returned and taken < elements:
            count, each = self.returned.pop()
            if count > elements - taken:
                self.returned.append((count - (elements - taken), each))
                count = elements - taken
            taken += count
            seconds += count * each
        return taken, seconds


@dataclass
class _Busy:
    """The bundles of a pool: seconds of those that have ended, and how many run, with the sum of their starts."""

    ended: float = 0.0
    running: int = 0
    began: float = 0.0


@dataclass(eq=False)
class _Bundle:
    id: str
    stage: str
    counts: dict[str, int] = field(default_factory=dict[str, int])  # elements by read
    began_at: float = 0.0
    each: float = 0.0  # seconds of an element
    slowed: float = 1.0  # how many times as long it takes because others run
    elements: int = 0  # without those that splits took
    is_over: bool = False

    @property
    def ends_at(self) -> float:
        return self.began_at + self.each * self.elements


class CountedWorker(LocalProcess):
    """One worker: its process, and the loop's connection to it. It runs one bundle at a time."""

    pid = 0  # no process of the system

    def __init__(self, crew: CountedCrew, callbacks: Callbacks) -> None:
        self._crew = crew
        self._callbacks = callbacks
        self._on_exit: OnExit | None = None
        self._bundle: _Bundle | None = None
        self._ended_at = 0.0  # the last bundle
        self.pool = ""
        self.started_at = 0.0  # from when on it is paid for
        self.is_up = False
        self.is_gone = False

    @property
    def is_idle(self) -> bool:
        """Whether it is up and runs nothing."""
        return self.is_up and self._bundle is None

    # The process, for the loop

    def waits_for(self) -> str:
        """Return what it waits for: its start may take as long as it likes."""
        return "" if self.is_up else "its start"

    def kill(self) -> None:
        """End the process at once."""
        self.die(LOST_WITH_NODE)

    def start(self, on_exit: OnExit, pool: str) -> None:
        """Begin to start."""
        time = self._crew.time
        self.pool, self._on_exit = pool, on_exit
        starting, loading = self._crew.costs.start(pool)
        self.started_at = time.now + starting
        time.at(starting + loading, self._come_up)

    def _come_up(self) -> None:
        if not self.is_gone:
            self.is_up = True
            self._callbacks.on_connected()
            self._crew.on_up(self)

    def die(self, code: int) -> None:
        """End the process, and with it the bundle that it runs."""
        if self.is_gone:
            return
        self.is_gone, self.is_up = True, False
        bundle, now = self._bundle, self._crew.time.now
        if bundle is not None:
            self._bundle, bundle.is_over = None, True
            at = min(now, bundle.ends_at)
            self._crew.end(bundle, self.pool, at)
            self._crew.lost(bundle, at - bundle.began_at)
        self._crew.gone(self)
        if (on_exit := self._on_exit) is not None:
            on_exit(code)

    def quicken(self, times: float) -> float:
        """Let the rest of the bundle take so many times less. Returns by how many seconds its start seems later."""
        bundle, now = self._bundle, self._crew.time.now
        if bundle is None or not bundle.elements:
            return 0.0
        before = bundle.began_at
        bundle.each /= times
        bundle.began_at = now - (now - before) / times
        self._end_later(bundle)
        return bundle.began_at - before

    # The connection, for the loop

    def instruct(self, request: _Request) -> None:
        """Take an instruction."""
        kind = request.WhichOneof("request")
        if kind == "process_bundle":
            self._bundle = _Bundle(request.instruction_id, request.process_bundle.process_bundle_descriptor_id)
            return
        response = _Response(instruction_id=request.instruction_id)
        if kind == "process_bundle_split":
            self._split(request.process_bundle_split, response)
        elif kind == "process_bundle_progress":
            report = BundleReport("process").to_json().encode()
            response.process_bundle_progress.monitoring_data[wire.REPORT] = report
        self._callbacks.on_response(response)

    def send(self, stream_id: str, messages: Iterable[_Elements]) -> None:
        """Take the whole input of the bundle, and begin."""
        bundle, crew = self._bundle, self._crew
        assert bundle is not None
        for message in messages:
            for part in message.data:
                if part.data:
                    count, _ = wire.unpack(part.data)
                    bundle.counts[part.transform_id] = bundle.counts.get(part.transform_id, 0) + count
        bundle.elements = sum(bundle.counts.values())
        bundle.began_at = max(self._ended_at, crew.time.now - crew.catch_up_s)
        bundle.each = crew.begin(bundle, self.pool) / max(1, bundle.elements)
        self._end_later(bundle)

    def cause(self, instruction_id: str) -> BaseException | None:
        """Return None, as for a worker in another process."""
        return None

    def finish(self) -> None:
        """End the process: there is no more work."""
        self.die(0)

    def close(self) -> None:
        """Do nothing: nothing is under way."""

    # What the worker does

    def _end_later(self, bundle: _Bundle) -> None:
        ends_at = bundle.ends_at
        self._crew.time.at_time(ends_at, lambda: self._end(bundle, ends_at))

    def _end(self, bundle: _Bundle, at: float) -> None:
        if bundle.is_over or at != bundle.ends_at:
            return  # it was lost, or a split has let it end earlier
        bundle.is_over, self._bundle, self._ended_at = True, None, at
        self._crew.end(bundle, self.pool, at)
        self._callbacks.on_elements(self._crew.output(bundle))
        response = _Response(instruction_id=bundle.id)
        response.process_bundle.SetInParent()
        self._callbacks.on_response(response)

    def _split(self, request: beam_fn_api_pb2.ProcessBundleSplitRequest, response: _Response) -> None:
        """Give back what the bundle has not begun."""
        split = response.process_bundle_split
        split.SetInParent()
        bundle = self._bundle
        if bundle is None or bundle.id != request.instruction_id:
            return
        begun = 1 + int((self._crew.time.now - bundle.began_at) / max(bundle.each, 1e-12))
        if begun >= bundle.elements:
            return
        self._crew.give_back(bundle, bundle.elements - begun)
        bundle.elements = begun
        for read_id, count in bundle.counts.items():
            first = min(count, begun)
            begun -= first
            bundle.counts[read_id] = first
            split.channel_splits.add(transform_id=read_id, last_primary_element=first - 1, first_residual_element=first)
        self._end_later(bundle)


class CountedCrew:
    """Replaces the Fn API server and the launcher of worker processes."""

    def __init__(self, time: VirtualTime, costs: Costs, catch_up_s: float = 0.0) -> None:
        """``catch_up_s`` is for how long a worker may have waited for its next bundle as if it had not waited.

        With many workers, the loop lets messages gather for some milliseconds. Where a simulated second stands for many
        real ones, these milliseconds would, too.
        """
        self.time = time
        self.costs = costs
        self.catch_up_s = catch_up_s
        self.workers: dict[CountedWorker, None] = {}  # that have begun to start and are not gone
        self.on_up: Callable[[CountedWorker], None] = lambda worker: None
        self._busy: dict[str, _Busy] = {}  # by pool
        self._paid: dict[str, float] = {}  # by pool: seconds of workers that are gone
        self._stages: dict[str, _Stage] = {}
        self._pools: list[tuple[int, str]] = []  # the number of the first writer of each pool, and its name
        self._connections: dict[str, CountedWorker] = {}

    def add_pool(self, name: str, first_writer: int) -> None:
        """Expect workers of a pool, whose numbers follow those of the pools before."""
        self._pools.append((first_writer, name))
        self._paid[name] = 0.0
        self._busy[name] = _Busy()

    def add_stage(self, name: str, elements: int, flows: list[Flow]) -> None:
        """Expect bundles of a stage, which has so many elements and sends ``flows``."""
        self._stages[name] = _Stage(elements, flows)

    def paid_seconds(self, pool: str) -> float:
        """Return the seconds of a pool's workers until now, each from its start on."""
        now = self.time.now
        here = sum(max(0.0, now - worker.started_at) for worker in self.workers if worker.pool == pool)
        return self._paid[pool] + here

    def busy_seconds(self, pool: str) -> float:
        """Return the seconds of bundles in a pool's workers until now."""
        busy = self._busy[pool]
        return busy.ended + busy.running * self.time.now - busy.began

    def quicken(self, pool: str, times: float) -> None:
        """Let the workers of a pool be so many times as fast from now on, with the bundles that they run."""
        busy = self._busy[pool]
        for worker in self.workers:
            if worker.pool == pool:
                later = worker.quicken(times)
                busy.began += later
                busy.ended += later  # it has run for as long as it has

    # For the loop

    def connect(self, worker_id: str, callbacks: Callbacks) -> CountedWorker:
        """Expect a worker with this id."""
        worker = self._connections[worker_id] = CountedWorker(self, callbacks)
        return worker

    def disconnect(self, worker_id: str) -> None:
        """Forget a worker that has exited."""
        self._connections.pop(worker_id, None)

    def start(self, request: WorkerRequest, on_exit: OnExit) -> CountedWorker:
        """Start the worker of a connection that was made before."""
        worker = self._connections[request.worker_id]
        self.workers[worker] = None
        worker.start(on_exit, next(name for first, name in reversed(self._pools) if first <= request.writer))
        return worker

    def stop(self) -> None:
        """Do nothing: the loop has ended its workers."""

    # For the workers

    def begin(self, bundle: _Bundle, pool: str) -> float:
        """Return how long a bundle takes that begins now."""
        stage, busy = self._stages[bundle.stage], self._busy[pool]
        busy.running += 1
        busy.began += bundle.began_at
        returned, seconds = stage.take_returned(bundle.elements)
        if bundle.elements > returned:
            seconds += self.costs.bundle(bundle.stage, bundle.elements - returned)
        bundle.slowed = self.costs.begin(bundle.stage)
        seconds *= bundle.slowed
        kept = min(stage.kept, seconds)
        stage.kept -= kept
        return seconds - kept

    def output(self, bundle: _Bundle) -> _Elements:
        """Return what a bundle sends that ends now."""
        stage, elements = self._stages[bundle.stage], _Elements()
        stage.done += bundle.elements
        for flow in stage.flows:
            if count := flow.due(stage.done, stage.elements):
                data = wire.pack_object(count, wire.ObjectSpan("", 0, count * flow.element_bytes))
                elements.data.add(instruction_id=bundle.id, transform_id=flow.transform_id, data=data)
            elements.data.add(instruction_id=bundle.id, transform_id=flow.transform_id, is_last=True)
        return elements

    def end(self, bundle: _Bundle, pool: str, at: float) -> None:
        """Note that a bundle has ended, or was lost."""
        busy = self._busy[pool]
        busy.running -= 1
        busy.began -= bundle.began_at
        busy.ended += at - bundle.began_at
        self.costs.ended(bundle.stage)

    def lost(self, bundle: _Bundle, elapsed: float) -> None:
        """Note that a bundle was lost, ``elapsed`` seconds after its begin."""
        kept = self.costs.kept(bundle.stage, bundle.elements, bundle.each * bundle.elements, elapsed)
        self._stages[bundle.stage].kept += kept
        self.give_back(bundle, bundle.elements)

    def give_back(self, bundle: _Bundle, elements: int) -> None:
        """Note that elements of a bundle return to the front of the queue."""
        self._stages[bundle.stage].returned.append((elements, bundle.each / bundle.slowed))

    def gone(self, worker: CountedWorker) -> None:
        """Note that a worker is gone."""
        del self.workers[worker]
        self._paid[worker.pool] += max(0.0, self.time.now - worker.started_at)
