"""Turns what happens in the loop into events."""

from __future__ import annotations

import os
import secrets
import sys
import time
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Literal

from luminosity._notebook import notebook_name
from luminosity._text import first_line
from luminosity.engine.loop.bundle import Bundle
from luminosity.engine.loop.workers import Worker
from luminosity.engine.monitor.subscribers import EventStream
from luminosity.engine.monitor.worker_sampling import WorkerSampler
from luminosity.engine.observe.inference_progress import LoadedModels
from luminosity.engine.observe.snapshots import Snapshots
from luminosity.engine.observe.user_metrics import MOST_METRICS
from luminosity.engine.workers.failure import Failure
from luminosity.events import (
    BundleRetried,
    MachineInfo,
    ModelVersion,
    RunEnded,
    RunStarted,
    WorkerEnded,
    WorkerLost,
    WorkerStarted,
)

__all__ = ["Reporter", "new_run_id", "script_name"]

_SNAPSHOT_EVERY_S = 0.2  # views feel live, and a snapshot costs about a millisecond
_LINE_CHARACTERS = 300  # enough for the message of most exceptions
_FRACTIONS = 4096  # of a second: three hexadecimal digits


def new_run_id(now: datetime) -> str:
    """Return an id for a run that starts now. Ids sort by time, also those of runs that start in the same second.

    The first three digits of the last part are the fraction of the second, the others are random.
    """
    return f"{now:%Y%m%dT%H%M%S}-{now.microsecond * _FRACTIONS // 1_000_000:03x}{secrets.randbelow(_FRACTIONS):03x}"


class Reporter:
    """Emits a run's events: the loop's listener.

    The loop calls it on its own thread. Between snapshots a call costs next to nothing. Emitting never waits for
    subscribers; only :meth:`ended` does.
    """

    def __init__(
        self,
        snapshots: Snapshots,
        stream: EventStream,
        workers: WorkerSampler,
        queue_limit: int,
        memory_limit: int,
        checkpoint_dir: str = "",
        models: tuple[ModelVersion, ...] = (),
        machine: MachineInfo = MachineInfo(),  # noqa: B008 - it is frozen
        pools_mode: str = "",
    ) -> None:
        self._snapshots = snapshots
        self._stream = stream
        self._workers = workers
        self._loaded = LoadedModels(models, snapshots.inference())
        self._began_at = self._next_at = time.monotonic()
        now = datetime.now(timezone.utc)
        self.run_id = new_run_id(now)
        stream.emit(
            RunStarted(
                self.run_id,
                0.0,
                name=script_name(),
                started_at=round(now.timestamp(), 3),
                stages=snapshots.stages(),
                pools=snapshots.pools(),
                queue_limit=queue_limit,
                memory_limit=memory_limit,
                checkpoint_dir=checkpoint_dir,
                models=models,
                machine=machine,
                version=version("luminosity"),
                pools_mode=pools_mode,
            )
        )

    def continue_with(self, snapshots: Snapshots) -> None:
        """Look at other parts from now on: those of a new plan of the same pipeline."""
        self._snapshots = snapshots

    def tick(self) -> None:
        """Emit a snapshot if it is time for one and there is a subscriber."""
        now = time.monotonic()
        if now >= self._next_at and self._stream.is_heard:
            self._next_at = now + _SNAPSHOT_EVERY_S
            self._stream.emit(self._snapshots.take(self.run_id, now - self._began_at))
            self._report_loads()

    def worker_started(self, worker: Worker) -> None:
        """Emit that a worker has connected."""
        share = worker.pool.plan.share(worker.index)
        pid = worker.process.pid if worker.process is not None else 0
        if self._stream.is_heard:
            self._workers.watch(worker.id, share.pool, pid)
        self._stream.emit(WorkerStarted(self.run_id, self._seconds(), worker.id, share.pool, pid, share.devices))

    def worker_ends(self, worker: Worker) -> None:
        """Look once more at what a worker has used, before its process ends."""
        if self._stream.is_heard:
            self._workers.look(worker.id)

    def worker_ended(self, worker: Worker) -> None:
        """Emit that a worker's process ended as it should. Does nothing if the worker had never started."""
        if (last := self._workers.ended(worker.id)) is not None:
            self._stream.emit(
                WorkerEnded(
                    self.run_id,
                    self._seconds(),
                    worker.id,
                    worker.pool.plan.name,
                    lifetime_seconds=_lifetime(worker),
                    cpu_seconds=last.cpu_seconds,
                    peak_resident=last.peak_resident,
                )
            )

    def worker_lost(self, worker: Worker, reason: str) -> None:
        """Emit that a worker's process ended unexpectedly."""
        last = self._workers.ended(worker.id)
        self._stream.emit(
            WorkerLost(
                self.run_id,
                self._seconds(),
                worker.id,
                worker.pool.plan.name,
                reason,
                len(worker.bundles),
                lifetime_seconds=_lifetime(worker),
                cpu_seconds=last.cpu_seconds if last is not None else 0.0,
                peak_resident=last.peak_resident if last is not None else 0,
            )
        )

    def bundle_retried(self, bundle: Bundle, failure: Failure) -> None:
        """Emit that user code raised and that its bundle will be retried."""
        step = failure.step or bundle.stage.plan.label
        line = first_line(failure.exception, _LINE_CHARACTERS)
        self._stream.emit(BundleRetried(self.run_id, self._seconds(), step, line, bundle.failures, bundle.count))

    def ended(self, state: Literal["done", "failed", "cancelled", "stopped", "drained"], failure: str) -> None:
        """Emit the end of the run. Blocks until all subscribers have received it, or a timeout has passed."""
        seconds = self._seconds()
        last = self._snapshots.take(self.run_id, seconds, is_last=True)
        self._report_loads()
        metrics = self._snapshots.user_metrics()
        self._stream.emit(
            RunEnded(
                self.run_id,
                seconds,
                state,
                last,
                first_line(failure, _LINE_CHARACTERS),
                metrics=tuple(metrics[:MOST_METRICS]),
                metrics_left_out=max(0, len(metrics) - MOST_METRICS),
            )
        )
        self._stream.close()

    def _report_loads(self) -> None:
        for event in self._loaded.news(self.run_id, self._seconds(), self._snapshots.inference()):
            self._stream.emit(event)

    def _seconds(self) -> float:
        return round(time.monotonic() - self._began_at, 3)


def _lifetime(worker: Worker) -> float:
    return round(time.monotonic() - worker.created_at, 3)


def script_name() -> str:
    """Return the name of the script, or of the notebook, that runs a pipeline."""
    if notebook := notebook_name():
        return notebook
    name = os.path.basename(sys.argv[0]) if sys.argv else ""
    return name if name not in ("", "-c") else "python"
