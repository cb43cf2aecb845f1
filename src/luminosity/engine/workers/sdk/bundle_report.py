"""What a bundle does now, what CPU time and memory it took, and how a bundle that takes long is told.

A worker tells the runner the step, the element and the stack of a bundle that takes long. Nothing is measured for it:
Beam's state sampler counts how often a bundle goes from step to step, which it does with each element, and knows for
how long it has not.
"""

from __future__ import annotations

import json
import os
import resource
import sys
import threading
import time
from collections.abc import Callable
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity._shared.hangs import Wait, frames_of, stack_text, wait_of
from luminosity._shared.text import Private, duration
from luminosity.core import resident_bytes
from luminosity.engine.data import wire
from luminosity.engine.workers.failure import describe_location, element_of, from_users_code_on, location_of

if TYPE_CHECKING:
    from apache_beam.runners.worker.sdk_worker import BundleProcessorCache

__all__ = ["BundleMeter", "BundleReport", "Doing", "Phase", "Stall", "headline", "report_of"]

Phase = Literal["ended", "setup", "start", "process", "finish"]
_PHASES: dict[str, Phase] = {"start": "start", "finish": "finish"}
_NANOSECONDS = 1e9
_QUICK_S = 0.2  # a bundle that has moved since then needs no stack, which takes a millisecond
_KIB = 1 if sys.platform == "darwin" else 1024  # the unit of the peak that the system reports
_STATES = {"stopped": "is stopped, by a signal or a debugger", "does not answer": "does not answer"}


@dataclass(frozen=True)
class BundleReport:
    """What a bundle does at one moment. ``ended``: it has ended, or has not begun."""

    phase: Phase
    step: str = ""
    moves: int = 0  # from step to step, so far
    seconds: float = 0.0  # since the last move, or since the setup began
    indexes: dict[str, int] = field(default_factory=dict[str, int])  # by read id: the place of the element in progress
    element: str = ""  # what the step has got, shortened
    location: str = ""  # file and line of the user's code
    stack: str = ""
    wait: Wait | None = None  # what the bundle's thread waits for

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, data: str | bytes) -> BundleReport:
        """Read what :meth:`to_json` returned."""
        fields = json.loads(data)
        wait = fields.pop("wait")
        return cls(**fields, wait=Wait(**wait) if wait else None)


def report_of(processors: BundleProcessorCache, instruction_id: str) -> BundleReport:
    """Return what a bundle of this process does. Call it on any thread but the bundle's."""
    setting_up = processors.processors_being_created.get(instruction_id)
    if setting_up is not None:
        _, thread, since = setting_up
        return _told("setup", "", 0, time.time() - since, {}, thread.ident or 0)
    active = processors.active_bundle_processors.get(instruction_id)
    if active is None:
        return BundleReport("ended")
    processor = active[1]
    info = processor.state_sampler.get_info()
    name = info.state_name
    indexes = {
        transform_id: operation.index
        for transform_id, operation in processor.ops.items()
        if isinstance(getattr(operation, "index", None), int)
    }
    return _told(
        _PHASES.get(name.name.partition("-")[0], "process"),
        name.step_name or "",
        info.transition_count,
        info.time_since_transition / _NANOSECONDS,
        indexes,
        info.tracked_thread.ident or 0 if info.tracked_thread is not None else 0,
    )


def _told(phase: Phase, step: str, moves: int, seconds: float, indexes: dict[str, int], thread: int) -> BundleReport:
    if seconds < _QUICK_S:
        return BundleReport(phase, step, moves, seconds, indexes)
    frames, wait = frames_of(thread), wait_of(thread)
    location = location_of(frames)
    # A bundle that waits for a model is in our own code: the model's stack says more.
    shown = [] if wait is not None and wait.stack and not location else from_users_code_on(frames)
    return BundleReport(
        phase,
        step,
        moves,
        seconds,
        indexes,
        element=element_of(frames) if phase == "process" else "",
        location=location or (wait.location if wait is not None else ""),
        stack=stack_text(shown),
        wait=wait,
    )


class BundleMeter:
    """Shares the CPU time of this process out among the bundles that run in it. Any thread may use it.

    A bundle gets the time of its own thread, and an equal part of the time of all other threads, such as those of
    models and of the connection, for as long as it runs. So the bundles that run at the same time never get more than
    the process took. The time between bundles belongs to none of them. A reading takes a few microseconds.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._running: dict[_Running, None] = {}
        self._counted = 0.0  # the process's CPU seconds at the last look
        self._shared = 0.0  # the part of one bundle that has run all the time: CPU seconds of other threads

    def measure(self, task: Callable[[], beam_fn_api_pb2.InstructionResponse]) -> beam_fn_api_pb2.InstructionResponse:
        """Run ``task``, which processes a bundle on this thread, and add to its response what it took."""
        running = self._begin()
        try:
            response = task()
        finally:
            cpu_seconds = self._end(running)
        peak = _peak_bytes()
        # The system knows only the peak of the whole process: it is this bundle's if the bundle has raised it.
        resident = peak if peak > running.peak_before else resident_bytes()
        response.process_bundle.monitoring_data[wire.USAGE] = wire.pack_usage(cpu_seconds, resident, os.getpid())
        return response

    def _begin(self) -> _Running:
        running = _Running()
        with self._lock:
            self._look()
            running.shared_before = self._shared
            self._running[running] = None
        return running

    def _end(self, running: _Running) -> float:
        with self._lock:
            self._look()
            del self._running[running]
            return running.seen - running.begun + self._shared - running.shared_before

    def _look(self) -> None:
        """Share out the CPU time of other threads since the last look."""
        counted = time.process_time()
        others = counted - self._counted - sum(running.look() for running in self._running)
        self._counted = counted
        if self._running:
            # The clocks are read one after the other, so that the difference may be slightly negative.
            self._shared += max(0.0, others) / len(self._running)


class _Running:
    """A bundle that runs on the thread that makes this object."""

    def __init__(self) -> None:
        # Systems without clocks of other threads share all time out equally.
        has_clocks = hasattr(time, "pthread_getcpuclockid")
        self._clock = time.pthread_getcpuclockid(threading.get_ident()) if has_clocks else None
        self.begun = self.seen = self._now()
        self.shared_before = 0.0
        self.peak_before = _peak_bytes()

    def look(self) -> float:
        """Return the CPU seconds of the bundle's thread since the last look. The bundle must be running."""
        before, self.seen = self.seen, self._now()
        return self.seen - before

    def _now(self) -> float:
        return 0.0 if self._clock is None else time.clock_gettime(self._clock)


def _peak_bytes() -> int:
    return resource.getrusage(resource.RUSAGE_SELF).ru_maxrss * _KIB


Doing = Literal["element", "start", "finish", "setup", "loading", "nothing"]
"""What a bundle does: ``loading``: it waits for a model that is loaded; ``nothing``: its worker does not answer."""


@dataclass(frozen=True)
class Stall:
    """A bundle that takes long, and what its worker says about it."""

    doing: Doing
    seconds: float  # for which no step has taken or emitted an element
    is_stalled: bool  # False: it takes long, but may well do so
    step: str
    worker: str
    pid: int = 0  # 0 on a cluster
    node: str = ""
    state: str = ""  # of the worker's process, or of the one it waits for: "stopped" or "does not answer"
    waits_for: str = ""  # such as the name of a model
    location: str = ""  # file and line of the user's code
    stack: str = ""
    element: str = ""  # shortened; data, so that it must not be recorded

    def details(self) -> tuple[str, Private, str]:
        """Return the place, the element and the stack, each as lines that follow others, or empty."""
        place = f"\n  at {describe_location(self.location)}" if self.location else ""
        element = Private(f"\n  element: {self.element}" if self.element else "")
        stack = f"\n  stack (most recent call last):\n{self.stack}" if self.stack else ""
        return place, element, stack


def headline(stall: Stall) -> str:
    """Return in one line which step does not go on, for how long, and where.

    >>> headline(Stall("element", 42.0, True, "Parse", "w3", pid=1234))
    "step 'Parse' has worked on one element for 42 s, in worker w3 (pid 1234)"
    >>> headline(Stall("nothing", 42.0, True, "Parse", "w3", pid=1234, state="stopped"))
    "step 'Parse' has done nothing for 42 s: worker w3 (pid 1234) is stopped, by a signal or a debugger"
    """
    where = f"worker {stall.worker}"
    if stall.pid:
        where += f" (pid {stall.pid})"
    if stall.node:
        where += f" on node {stall.node[:8]}"
    took, state = duration(stall.seconds), _STATES.get(stall.state, stall.state)
    if stall.doing == "nothing":
        return f"step {stall.step!r} has done nothing for {took}: {where} {state}"
    words = {
        "element": "has worked on one element",
        "start": "has been in start_bundle",
        "finish": "has been in finish_bundle",
        "setup": "sets up",
        "loading": f"waits for {stall.waits_for} to be loaded",
    }[stall.doing]
    if stall.waits_for and stall.doing != "loading":
        words = f"has waited for {stall.waits_for}"
    return f"step {stall.step!r} {words} for {took}, in {where}" + (f": it {state}" if state else "")
