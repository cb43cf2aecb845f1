"""Turns what happens in the loop into events."""

from __future__ import annotations

import os
import pwd
import secrets
import time
import traceback
from collections.abc import Callable, Sequence
from datetime import datetime, timezone
from importlib.metadata import version
from typing import Literal

from luminosity._shared.notebook import name_cells
from luminosity._shared.text import first_line
from luminosity.engine.loop.bundle import Bundle
from luminosity.engine.loop.workers import Worker
from luminosity.engine.options import EngineConfig
from luminosity.engine.reporting.log_messages import LogCapture, Logged, bounded_traceback
from luminosity.engine.reporting.run_names import RunName
from luminosity.engine.reporting.snapshots import Snapshots, stall_view
from luminosity.engine.reporting.step_metrics import MOST_METRICS, LoadedModels
from luminosity.engine.workers.failure import Failure, describe_location
from luminosity.engine.workers.sdk.bundle_report import Stall, headline
from luminosity.errors import RunFailed, StepFailed
from luminosity.events import (
    BundleRetried,
    BundleStalled,
    CheckpointDone,
    LogMessage,
    MachineInfo,
    MetricView,
    ModelVersion,
    NodeChanged,
    NodeView,
    RunEnded,
    RunStarted,
    Snapshot,
    TransformInfo,
    WorkerEnded,
    WorkerLost,
    WorkerStarted,
)
from luminosity.runs.log_lines import Level as LineLevel
from luminosity.runs.log_lines import LogLine, LogWriter, log_writer
from luminosity.runs.manifest.masking import mask_text
from luminosity.runs.manifest.surroundings import command
from luminosity.runs.subscribers import EventStream
from luminosity.runs.worker_sampling import WorkerSampler

__all__ = ["Reporter", "new_run_id", "node_changes"]

_SNAPSHOT_EVERY_S = 0.2  # views feel live, and a snapshot costs about a millisecond
_METRICS_EVERY_S = 5.0  # they change slowly, and there may be many
_METRICS_PART_OF_TIME = 0.002  # of the loop's time, at most, for metrics in snapshots
_CHECKPOINT_EVERY_S = 1.0  # between two events about checkpoints, of which a stream may write 20 a second
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
        config: EngineConfig,
        models: tuple[ModelVersion, ...],
        machine: MachineInfo,
        transforms: tuple[TransformInfo, ...] = (),
    ) -> None:
        self._snapshots = snapshots
        self._stream = stream
        self._workers = workers
        self._loaded = LoadedModels(models, snapshots.inference())
        self._logs: LogCapture | None = None
        self._lines: LogWriter | None = None
        self._run_dir = config.run_dir
        self._began_at = self._next_at = time.monotonic()
        self._metrics_at = self._began_at + _METRICS_EVERY_S
        self._nodes: dict[str, str] = {}  # of the cluster that are there: addresses by ids
        self._checkpoints = 0  # of the last event about one
        self._checkpoint_at = 0.0  # when the next one may be reported, in seconds since the run's start
        now = datetime.now(timezone.utc)
        self.run_id = new_run_id(now)
        called = RunName.of(config.job_name)
        stream.emit(
            RunStarted(
                self.run_id,
                0.0,
                name=called.name,
                started_at=round(now.timestamp(), 3),
                stages=snapshots.stages(),
                pools=snapshots.pools(),
                queue_limit=snapshots.parts.queue_limit,
                memory_limit=snapshots.parts.blocks.ledger.limit,
                checkpoint_dir=config.checkpoint_dir or "",
                models=models,
                machine=machine,
                version=version("luminosity"),
                pools_mode=config.pools,
                job=called.job,
                folder=called.folder,
                transforms=transforms,
                arguments=command(),
                user=_user(),
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
            metrics: list[MetricView] = []
            if now >= self._metrics_at:
                before = time.thread_time()
                metrics = self._snapshots.user_metrics()[:MOST_METRICS]
                took = time.thread_time() - before
                self._metrics_at = now + max(_METRICS_EVERY_S, took / _METRICS_PART_OF_TIME)
            snapshot = self._snapshots.take(self.run_id, now - self._began_at, metrics=metrics)
            self._stream.emit(snapshot)
            self._report_loads()
            self._report_nodes(snapshot.seconds)
            self._report_checkpoint(snapshot)
            if self._logs is not None:
                self._logs.flush()

    def _report_nodes(self, seconds: float) -> None:
        """Emit which nodes of a cluster have come and gone since the last snapshot."""
        for change in node_changes(self.run_id, seconds, self._nodes, self._snapshots.nodes):
            self._stream.emit(change)

    def _report_checkpoint(self, snapshot: Snapshot, *, is_last: bool = False) -> None:
        """Emit that there is a new checkpoint, unless the last event about one is too new."""
        found = snapshot.checkpoint
        if found is None or found.count == self._checkpoints:
            return
        if is_last or snapshot.seconds >= self._checkpoint_at:
            self._checkpoints, self._checkpoint_at = found.count, snapshot.seconds + _CHECKPOINT_EVERY_S
            done = CheckpointDone(self.run_id, snapshot.seconds, found.count, found.last_seconds, found.folder_bytes)
            self._stream.emit(done)

    def capture_logs(self, is_ours: Callable[[str], bool]) -> None:
        """Emit warnings and errors that are logged from now on, and keep all lines beside the record.

        ``is_ours``: see :class:`LogCapture`.
        """
        if self._stream.is_heard:
            self._lines = log_writer(self._run_dir, self.run_id)
            self._logs = LogCapture(self._emit_message, is_ours, self._keep_line if self._lines is not None else None)
            self._logs.start()

    def _keep_line(self, level: LineLevel, logged: Logged) -> None:
        if self._lines is not None:
            self._lines.write(
                LogLine(
                    self._seconds(), level, logged.message, logged.logger, logged.worker, logged.step, logged.traceback
                )
            )

    def _emit_message(self, logged: Logged) -> None:
        self._stream.emit(
            LogMessage(
                self.run_id,
                self._seconds(),
                logged.level,
                logged.message,
                logger=logged.logger,
                worker=logged.worker,
                step=logged.step,
                count=logged.count,
                traceback=logged.traceback,
                left_out=logged.left_out,
            )
        )

    def worker_started(self, worker: Worker) -> None:
        """Emit that a worker has connected."""
        share = worker.pool.plan.share(worker.index)
        pid, node = worker.process.pid if worker.process is not None else 0, worker.node
        if self._stream.is_heard:
            self._workers.watch(worker.id, share.pool, pid, node)
        devices = share.devices if not node else ()  # on a cluster, the worker finds its devices itself
        self._stream.emit(WorkerStarted(self.run_id, self._seconds(), worker.id, share.pool, pid, devices, node))

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
                node=worker.node,
            )
        )

    def bundle_stalled(self, bundle: Bundle, stall: Stall) -> None:
        """Emit that a bundle does nothing any more, without its element, which is data."""
        self._stream.emit(
            BundleStalled(
                self.run_id,
                self._seconds(),
                mask_text(headline(stall)),
                stall_view(stall),
                traceback=bounded_traceback(stall.stack),
            )
        )

    def bundle_retried(self, bundle: Bundle, failure: Failure) -> None:
        """Emit that user code raised and that its bundle will be retried."""
        step = failure.step or bundle.stage.plan.label
        self._stream.emit(
            BundleRetried(
                self.run_id,
                self._seconds(),
                step,
                mask_text(first_line(failure.exception, _LINE_CHARACTERS)),
                bundle.failures,
                bundle.count,
                traceback=bounded_traceback(name_cells(failure.traceback)),
                place=describe_location(failure.location) if failure.location else "",
            )
        )

    def ended(
        self,
        state: Literal["done", "failed", "cancelled", "stopped", "drained"],
        failure: str,
        error: BaseException | None = None,
    ) -> None:
        """Emit the end of the run. Blocks until all subscribers have received it, or a timeout has passed.

        ``failure`` says in one line what ended the run, ``error`` is what was raised.
        """
        if self._logs is not None:
            self._logs.stop()
        if state == "failed":  # it is raised, not logged
            step = error.step if isinstance(error, StepFailed) else ""
            message = mask_text(first_line(failure, _LINE_CHARACTERS))
            failed = Logged("error", message, step=step, traceback=bounded_traceback(_traceback(error)))
            self._keep_line("error", failed)
        if self._lines is not None:
            self._lines.close()
        seconds = self._seconds()
        last = self._snapshots.take(self.run_id, seconds, is_last=True)
        self._report_loads()
        self._report_checkpoint(last, is_last=True)
        metrics = self._snapshots.user_metrics()
        self._stream.emit(
            RunEnded(
                self.run_id,
                seconds,
                state,
                last,
                mask_text(first_line(failure, _LINE_CHARACTERS)),
                metrics=tuple(metrics[:MOST_METRICS]),
                metrics_left_out=max(0, len(metrics) - MOST_METRICS),
                traceback=bounded_traceback(_traceback(error)) if state == "failed" else "",
                place=error.place if isinstance(error, StepFailed) else "",
                step=error.step if isinstance(error, StepFailed) else "",
                element=mask_text(error.element) if isinstance(error, StepFailed) else "",
            )
        )
        self._stream.close()

    def _report_loads(self) -> None:
        for event in self._loaded.news(self.run_id, self._seconds(), self._snapshots.inference()):
            self._stream.emit(event)

    def _seconds(self) -> float:
        return round(time.monotonic() - self._began_at, 3)


def node_changes(run: str, seconds: float, known: dict[str, str], nodes: Sequence[NodeView]) -> list[NodeChanged]:
    """Return which nodes have come and gone since ``known``, addresses by ids, which is brought up to date."""
    there = {node.id: node.address or known.get(node.id, "") for node in nodes}
    came = [NodeChanged(run, seconds, node, there[node], "came") for node in sorted(there.keys() - known.keys())]
    went = [NodeChanged(run, seconds, node, known[node], "went") for node in sorted(known.keys() - there.keys())]
    known.clear()
    known.update(there)
    return came + went


def _traceback(error: BaseException | None) -> str:
    """Return the traceback of user code; of an error of another kind, that of this process."""
    if isinstance(error, StepFailed):
        return error.traceback
    if error is None or isinstance(error, RunFailed):
        return ""  # it says in its message what went wrong; where it was raised says nothing to the user
    return "".join(traceback.format_exception(type(error), error, error.__traceback__))


def _user() -> str:
    try:
        return pwd.getpwuid(os.getuid()).pw_name
    except KeyError:
        return str(os.getuid())  # in a container, users may have no name


def _lifetime(worker: Worker) -> float:
    return round(time.monotonic() - worker.created_at, 3)
