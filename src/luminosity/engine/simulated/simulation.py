"""Simulated time: events in their order, and tasks that take turns on one thread.

What production does on threads of its own, such as the writer of checkpoints, runs here as a task, with a stack of its
own. A task runs until it waits, and the loop goes on when nothing else can. So a run is the same each time.
"""

from __future__ import annotations

import random
from collections.abc import Callable
from types import TracebackType
from typing import Any

import greenlet

from luminosity.engine.data.world import World
from luminosity.engine.simulated.trace import Trace
from luminosity.engine.simulated.virtual_time import TICK_S, VirtualMailbox, VirtualTime

__all__ = ["Ended", "Simulation", "TaskLocal"]


class Ended(BaseException):
    """Ends a task from outside. Steps and libraries do not catch it."""


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


class Simulation(VirtualTime):
    """The time, the tasks and the chance of one simulated run. The thread that made it calls everything.

    ``chance`` is the only source of chance. ``on_message`` is called before the loop waits for its next message, when
    the state of all its parts must be consistent. It gets whether there was a message since the last call.
    """

    def __init__(self, seed: int, on_message: Callable[[bool], None] = lambda _: None, tick: float = TICK_S) -> None:
        super().__init__(tick)
        self.chance = random.Random(seed)
        self.trace = Trace()
        self.stall_part = self.stall_s = 0.0  # of the looks at the clock, and how long the driver stands still then
        self.running: _Task | None = None
        self.on_message = on_message
        self._tasks: dict[_Task, None] = {}
        self.world = World(
            clock=self.clock,
            start_thread=lambda run, name: self.start(run),
            token=lambda size: f"{self.chance.getrandbits(8 * size):0{2 * size}x}",
            mailbox=lambda: VirtualMailbox(self),
            condition=lambda: _Condition(self),
        )

    def look(self) -> float:
        """Return the time. A look takes a moment, and the driver may stand still during it."""
        self.now += self.tick
        if self.stall_part and self.chance.random() < self.stall_part:
            self.now += self.stall_s
        return self.now

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
        super().close()

    def _begin(self, task: _Task) -> None:
        if not task.has_ended and not task.waits:
            task.resume()

    def _wake_at(self, task: _Task, number: int) -> None:
        if not task.has_ended and task.waits == number:
            task.resume()
