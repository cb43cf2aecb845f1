"""One run of a pipeline: set up, loop, clean up, on a thread of its own, or the caller's to debug it."""

from __future__ import annotations

import threading
import time
from collections.abc import Callable
from typing import Literal

from apache_beam.runners.runner import PipelineState

from luminosity.engine.folders import RunFolders, remove_local
from luminosity.engine.loop.metrics import RunMetrics
from luminosity.engine.loop.scheduler import Scheduler
from luminosity.engine.monitor.recorder import recorder
from luminosity.engine.monitor.sampling import Sampler
from luminosity.engine.monitor.subscribers import EventStream
from luminosity.engine.monitor.views import live
from luminosity.engine.observe.reporter import Reporter
from luminosity.engine.observe.snapshots import Snapshots
from luminosity.engine.options import EngineConfig
from luminosity.engine.plan.graph import Graph
from luminosity.engine.resources.pools import Assignment
from luminosity.engine.setup import set_up
from luminosity.engine.workers.printed import WorkerPrints
from luminosity.errors import RunCancelled, RunFailed
from luminosity.events import MemoryUse, Subscriber

__all__ = ["Ending", "Run", "cancel_all"]

_LOOK_S = 1.0

_ENDINGS: dict[str, Literal["done", "failed", "cancelled"]] = {
    PipelineState.DONE: "done",
    PipelineState.FAILED: "failed",
    PipelineState.CANCELLED: "cancelled",
}


# Those that go on, for whoever ends the process. Copied at once, which a WeakSet is not: a run may end meanwhile.
_active: set[Run] = set()


class Ending:
    """As ``threading.Event``, which Ctrl-C breaks: when it comes while one that waits has the event's lock, the lock is
    never given back, and neither waiting nor telling ever ends. Here, who has the lock has seen the end already.

    >>> ending = Ending()
    >>> ending.wait(0)
    False
    >>> ending.tell()
    >>> ending.wait(None)
    True
    """

    def __init__(self) -> None:
        self._is_told = False
        self._lock = threading.Lock()
        self._lock.acquire()

    def tell(self) -> None:
        """Once."""
        self._is_told = True
        self._lock.release()

    def wait(self, seconds: float | None) -> bool:
        """Whether the end was told within so many seconds."""
        until = None if seconds is None else time.monotonic() + seconds
        while not self._is_told:
            left = _LOOK_S if until is None else min(_LOOK_S, until - time.monotonic())
            if left <= 0:
                return False
            if self._lock.acquire(timeout=left):
                self._lock.release()  # for the next one; should Ctrl-C come just before, that one looks again soon
        return True


def cancel_all(seconds: float) -> None:
    """End all runs of this process, and wait up to ``seconds`` for each."""
    for run in list(_active):
        run.cancel()
        run.wait(seconds)


class Run:
    """``state``, ``metrics`` and ``wait`` may be used from any thread."""

    def __init__(
        self,
        graph: Graph,
        assignments: dict[str, Assignment],
        config: EngineConfig,
        on_event: Subscriber | None = None,
    ) -> None:
        self.metrics = RunMetrics()
        self.state: str = PipelineState.RUNNING
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] | None = None
        self._ending = Ending()
        self._is_debug = config.debug
        self._folders = RunFolders(config.spill_dir)
        self._of_steps = graph.temporary_folders()
        progress = "off" if config.debug else config.progress
        # A live view needs the terminal for itself: what workers print goes through this process.
        self._prints = WorkerPrints(self._folders.sockets) if live.is_live(progress) else None
        try:
            prints = self._prints.sockets if self._prints is not None else {}
            parts = set_up(graph, assignments, config, self._folders, self.metrics, prints)
        except BaseException:
            self._remove_folders()
            raise
        self._server = parts.server
        listeners = (live.view_for(progress), recorder(config.run_dir), on_event)
        stream = EventStream([listener for listener in listeners if listener is not None])
        self._sampler = Sampler([d for pool in parts.pools for group in pool.plan.device_groups for d in group])
        if stream.is_heard:
            self._sampler.start()
        ledger = parts.blocks.ledger

        def memory() -> MemoryUse:
            return MemoryUse(ledger.used, ledger.peak, ledger.limit, ledger.spilled)

        self._reporter = Reporter(Snapshots(parts, memory, self._sampler), stream, parts.queue_limit, ledger.limit)
        self._scheduler = Scheduler(parts, self._reporter)

    def start(self) -> None:
        """Begin; with ``--debug`` also end, since user code runs on the thread that calls."""
        _active.add(self)
        if not self._is_debug:
            # Not a daemon: a script that ends without waiting for its pipeline still gets its results.
            threading.Thread(target=self._run, name="luminosity-run").start()
            return
        self._run()
        if self.state == PipelineState.CANCELLED and self.failure is not None:
            raise self.failure  # Ctrl-C ends the script, too

    def wait(self, seconds: float | None) -> bool:
        """Whether the run has ended within ``seconds``."""
        return self._ending.wait(seconds)

    def cancel(self) -> None:
        self._scheduler.cancel()

    def _run(self) -> None:
        try:
            self._scheduler.run()
            self.state = PipelineState.DONE
        except (RunCancelled, KeyboardInterrupt) as error:
            self.state, self.failure = PipelineState.CANCELLED, error
        except BaseException as error:
            # Whatever it is, whoever waits for the run must hear of it.
            self.state, self.failure = PipelineState.FAILED, error
        finally:
            try:
                self._server.stop()
                self._remove_folders()
                if self.state != PipelineState.DONE:
                    remove_local(self._of_steps)
                self._sampler.stop()
                self._reporter.ended(_ENDINGS[self.state], _headline(self.failure))
                if self.state == PipelineState.FAILED and self.on_failure is not None:
                    self.on_failure()
            finally:
                _active.discard(self)
                self._ending.tell()  # whoever waits must not wait for ever

    def _remove_folders(self) -> None:
        if self._prints is not None:
            self._prints.stop()
        self._folders.remove()


def _headline(failure: BaseException | None) -> str:
    if failure is None:
        return ""
    return failure.headline if isinstance(failure, RunFailed) else f"{type(failure).__name__}: {failure}"
