"""Simulated time: events in their order, and tasks that take turns on one thread.

What production does on threads of its own, such as the writer of checkpoints, runs here as a task, with a stack of its
own. A task runs until it waits, and the loop goes on when nothing else can. So a run is the same each time.
"""

from __future__ import annotations

import heapq
import itertools
import queue
import random
from collections import deque
from collections.abc import Callable
from types import TracebackType
from typing import Any

import greenlet

from luminosity.engine.data.world import World
from luminosity.engine.simulated.trace import Trace

__all__ = ["Ended", "Simulation", "Stuck", "TaskLocal"]

_TICK_S = 1e-6  # a look at the clock takes this long: no loop that waits for a deadline lasts forever


class Ended(BaseException):
    """Ends a task from outside. Steps and libraries do not catch it."""


class Stuck(Exception):
    """Everything waits, and nothing will ever happen."""


class TaskLocal:
    """Stands for a ``threading.local``: each task has attributes of its own."""

    def __getattr__(self, name: str) -> Any:
        try:
            return _attributes(self)[name]
        except KeyError:
            raise AttributeError(name) from None

    def __setattr__(self, name: str, value: Any) -> None:
        _attributes(self)[name] = value

    def __delattr__(self, name: str) -> None:
        del _attributes(self)[name]


def _attributes(local: TaskLocal) -> dict[str, Any]:
    of_task: Any = greenlet.getcurrent().__dict__
    return of_task.setdefault(id(local), {})


class _Task:
    """A function with a stack of its own, which runs only while :meth:`resume` waits for it."""

    def __init__(self, simulation: Simulation, run: Callable[[], None]) -> None:
        self._simulation = simulation
        self._greenlet = greenlet.greenlet(lambda: self._work(run))
        self.has_ended = False
        self.is_due: Callable[[], bool] = lambda: True  # whether what it waits for is there
        self.waits = 0  # so that a wake-up for an earlier wait is known as such
        self._is_ending = False

    def resume(self) -> None:
        """Let the task run until it waits again or ends. Raises what it raises."""
        before, self._simulation.running = self._simulation.running, self
        self._greenlet.parent = greenlet.getcurrent()
        try:
            self._greenlet.switch()
        finally:
            self._simulation.running = before

    def suspend(self) -> None:
        """Let others run, until :meth:`resume`. The task itself calls it."""
        self.waits += 1
        parent = self._greenlet.parent
        assert parent is not None
        parent.switch()
        if self._is_ending:
            raise Ended

    def end(self) -> None:
        """End the task where it waits."""
        self._is_ending = True
        while not self.has_ended:
            self.resume()

    def join(self, timeout: float | None = None) -> None:
        """Wait until the task has ended, or until the timeout, in simulated time."""
        self._simulation.wait(lambda: self.has_ended, timeout)

    def _work(self, run: Callable[[], None]) -> None:
        try:
            if not self._is_ending:
                run()
        except BaseException as error:
            if not self._is_ending:  # else libraries may have wrapped what ends it
                raise
            del error
        finally:
            self.has_ended = True
            self._simulation.forget(self)


class _Condition:
    """Stands for a ``threading.Condition``: nothing else runs while its lock would be held."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation

    def __enter__(self) -> bool:
        return True

    def __exit__(
        self, kind: type[BaseException] | None, error: BaseException | None, traceback: TracebackType | None, /
    ) -> None:
        pass

    def wait_for(self, predicate: Callable[[], bool], timeout: float | None = None) -> bool:
        return self._simulation.wait(predicate, timeout)

    def notify_all(self) -> None:
        self._simulation.wake()


class _Mailbox:
    """A queue whose reader waits in simulated time."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self._items: deque[Any] = deque()
        self._has_given = False  # a message, since ``on_message`` was called

    def put(self, item: Any) -> None:
        self._items.append(item)
        self._simulation.wake()

    def get(self, block: bool = True, timeout: float | None = None) -> Any:
        self._simulation.on_message(self._has_given)
        self._has_given = False
        if block:
            self._simulation.wait(lambda: bool(self._items), timeout)
        if not self._items:
            raise queue.Empty
        self._has_given = True
        return self._items.popleft()

    def get_nowait(self) -> Any:
        return self.get(block=False)

    def empty(self) -> bool:
        return not self._items


class _Clock:
    """The clock of a simulation. Its wall time may jump, and any look at it takes a moment."""

    def __init__(self, simulation: Simulation) -> None:
        self._simulation = simulation
        self.wall = 1_700_000_000.0  # seconds since 1970 at the start
        self.set_back = 0.0  # by how many seconds it has jumped back in all: timers wait so much longer

    def jump(self, seconds: float) -> None:
        """Move the wall time."""
        self.wall += seconds
        self.set_back += max(0.0, -seconds)

    def monotonic(self) -> float:
        simulation = self._simulation
        simulation.now += simulation.tick
        if simulation.stall_part and simulation.chance.random() < simulation.stall_part:
            simulation.now += simulation.stall_s
        return simulation.now

    def time(self) -> float:
        return self.wall + self.monotonic()

    def micros(self) -> int:
        return int(self.time() * 1e6)

    def thread_time(self) -> float:
        return self.monotonic()

    def sleep(self, seconds: float, /) -> None:
        self._simulation.wait(lambda: False, seconds)


class Simulation:
    """The time, the tasks and the chance of one simulated run. The thread that made it calls everything.

    ``chance`` is the only source of chance. ``on_message`` is called before the loop waits for its next message, when
    the state of all its parts must be consistent. It gets whether there was a message since the last call.
    """

    def __init__(self, seed: int, on_message: Callable[[bool], None] = lambda _: None, tick: float = _TICK_S) -> None:
        self.chance = random.Random(seed)
        self.trace = Trace()
        self.now = 0.0
        self.tick = tick
        self.stall_part = self.stall_s = 0.0  # of the looks at the clock, and how long the driver stands still then
        self.running: _Task | None = None
        self.on_message = on_message
        self._events: list[tuple[float, int, Callable[[], None]]] = []
        self._numbers = itertools.count()
        self._tasks: dict[_Task, None] = {}
        self.clock = _Clock(self)
        self.world = World(
            clock=self.clock,
            start_thread=lambda run, name: self.start(run),
            token=lambda size: f"{self.chance.getrandbits(8 * size):0{2 * size}x}",
            mailbox=lambda: _Mailbox(self),
            condition=lambda: _Condition(self),
        )

    def at(self, seconds: float, call: Callable[[], None]) -> None:
        """Call a function after so many seconds. Functions for the same time are called in their order."""
        self.at_time(self.now + seconds, call)

    def at_time(self, time: float, call: Callable[[], None]) -> None:
        """Call a function at a time, or now if it has passed."""
        heapq.heappush(self._events, (max(self.now, time), next(self._numbers), call))

    def start(self, run: Callable[[], None]) -> _Task:
        """Return a task, which begins at once, but after the caller has waited."""
        task = _Task(self, run)
        self._tasks[task] = None
        self.at(0.0, lambda: self._begin(task))
        return task

    def pause(self, seconds: float) -> None:
        """Let time pass. A task calls it."""
        self.wait(lambda: False, seconds)

    def wait(self, is_done: Callable[[], bool], timeout: float | None) -> bool:
        """Wait until ``is_done``, or until the timeout. Returns whether it is done.

        Raises :class:`Stuck` if there is no timeout and nothing will happen any more.
        """
        if is_done():
            return True
        until = float("inf") if timeout is None else self.now + max(0.0, timeout)
        task = self.running
        if task is None:
            return self._run_events(is_done, until)
        task.is_due = is_done
        number = task.waits + 1
        if timeout is not None:
            self.at(timeout, lambda: self._wake_at(task, number))
        task.suspend()
        task.is_due = lambda: True
        return is_done()

    def wake(self) -> None:
        """Let tasks go on for which something has changed."""
        for task in self._tasks:
            if task is not self.running and task.waits and task.is_due():
                number = task.waits
                self.at(0.0, lambda task=task, number=number: self._wake_at(task, number))

    def forget(self, task: _Task) -> None:
        """Note that a task has ended."""
        self._tasks.pop(task, None)
        self.wake()

    @property
    def tasks(self) -> int:
        """The number of tasks that have not ended."""
        return len(self._tasks)

    def close(self) -> None:
        """End all tasks, and forget what would happen."""
        for task in list(self._tasks):
            task.end()
        self._events.clear()

    def _begin(self, task: _Task) -> None:
        if not task.has_ended and not task.waits:
            task.resume()

    def _wake_at(self, task: _Task, number: int) -> None:
        if not task.has_ended and task.waits == number:
            task.resume()

    def _run_events(self, is_done: Callable[[], bool], until: float) -> bool:
        events = self._events
        while not is_done():
            if not events or events[0][0] > until:
                if until == float("inf"):
                    raise Stuck("everything waits, and nothing will happen any more")
                self.now = max(self.now, until)
                return False
            at, _, call = heapq.heappop(events)
            self.now = max(self.now, at)
            call()
        return True
