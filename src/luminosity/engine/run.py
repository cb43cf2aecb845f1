"""One run of a pipeline: set up, run the loop, clean up. With ``--debug`` on the caller's thread."""

from __future__ import annotations

import logging
import threading
from collections.abc import Callable
from dataclasses import replace
from pathlib import Path
from typing import Literal

from apache_beam.runners.runner import PipelineState

from luminosity._shared.kafka_metrics import KafkaMetrics
from luminosity._shared.shown_prompts import print_prompts, text_of_prompts
from luminosity.engine.assemble import assemble
from luminosity.engine.durable.names import Names
from luminosity.engine.durable.restoring import restore_metrics
from luminosity.engine.durable.resume import Checkpoint
from luminosity.engine.durable.store import CheckpointFolder
from luminosity.engine.folders import RunFolders, remove_local
from luminosity.engine.loop.metrics import LETTERS, NAMESPACE, RunMetrics
from luminosity.engine.loop.parts import RunParts
from luminosity.engine.loop.scheduler import Scheduler
from luminosity.engine.plan.graph import Graph
from luminosity.engine.prepare import Prepared
from luminosity.engine.process import Ending, Terminated, cancel_on_sigterm
from luminosity.engine.reporting.lag_watch import LagWatch
from luminosity.engine.reporting.reporter import Reporter
from luminosity.engine.reporting.run_names import script_name
from luminosity.engine.reporting.snapshots import Snapshots
from luminosity.engine.resources.claims import Claim
from luminosity.engine.resources.hints import resources_asked
from luminosity.engine.workers.printed import WorkerPrints
from luminosity.errors import OptionError, RunCancelled, RunFailed, SpillFailed
from luminosity.events import MachineInfo, Subscriber, TransformInfo
from luminosity.runs.journal import Action, RequestWatcher
from luminosity.runs.manifest.places import Effects
from luminosity.runs.manifest_writer import manifest_writer
from luminosity.runs.recorder import recorder
from luminosity.runs.sampling import Sampler
from luminosity.runs.senders import TRACEPARENT_OPTION, sender
from luminosity.runs.subscribers import EventStream
from luminosity.runs.views.choice import is_live, kept_events, view_for

__all__ = ["FinishedRun", "Run", "cancel_all"]

_LOGGER = logging.getLogger(__name__)

_ENDINGS: dict[str, Literal["done", "failed", "cancelled", "stopped", "drained"]] = {
    PipelineState.DONE: "done",
    PipelineState.STOPPED: "stopped",
    PipelineState.DRAINED: "drained",
    PipelineState.FAILED: "failed",
    PipelineState.CANCELLED: "cancelled",
}

# The runs that have not ended, to cancel them when the process ends. Not a WeakSet, which can't be copied in one step:
# a run may end meanwhile.
_active: set[Run] = set()


def cancel_all(seconds: float) -> None:
    """Cancel all runs of this process, and wait up to ``seconds`` for each, and longer for one that stops."""
    for run in list(_active):
        run.cancel()
        run.wait(seconds + run.stop_timeout)


def _request_cancellation() -> str:
    """Ask all runs of this process to end; say so, or nothing if there are none. A signal handler may call it."""
    runs = list(_active)
    for run in runs:
        run.cancel()
    if not runs:
        return ""
    return "the run stops and keeps its checkpoint" if any(run.is_durable for run in runs) else "the run is cancelled"


class Run:
    """A run of a planned pipeline.

    ``state``, ``failure``, ``metrics``, ``wait``, ``cancel`` and ``drain`` are thread-safe.
    """

    def __init__(
        self,
        prepared: Prepared,
        claim: Claim,
        effects: Effects,
        on_event: Subscriber | None,
        checkpoint: Checkpoint | None,
        plan_drain: Callable[[CheckpointFolder], tuple[Prepared, Checkpoint]] | None,
        authored: tuple[TransformInfo, ...] = (),
    ) -> None:
        """Make a run, which takes over the lock of its ``checkpoint``. Continues from it if it has one.

        ``plan_drain`` plans the same pipeline once more, so that its sources end. ``effects`` are for the manifest,
        ``authored`` are its transforms as the author applied them, for views.
        The run releases its ``claim`` and closes its connection when it has ended.
        """
        graph, config = prepared.graph, prepared.config
        telemetry = sender(config.telemetry, config.run_dir)  # first: what it lacks is told before anything starts
        self._traceparent = "" if telemetry is None else telemetry.traceparent
        self._claim = claim
        self._connection = prepared.connection
        self.metrics = RunMetrics()
        self.state: str = PipelineState.RUNNING
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] | None = None
        self._ending = Ending()
        self._is_debug = config.debug
        self._skip_record = config.skip_record
        self._dead_letters = config.dead_letters
        self._plan_drain = plan_drain
        self._request: Literal["", "drain", "stop", "cancel"] = ""  # what has been asked for last
        self.is_durable = checkpoint is not None
        self.stop_timeout = config.stop_timeout if self.is_durable else 0.0  # how long :meth:`cancel` lets bundles run
        self._of_steps = graph.temporary_folders()
        self._progress = "off" if config.debug else config.progress
        self._shown_prompts: list[str] = []
        parts = self._open(prepared, checkpoint)
        self.kept = kept_events()
        listeners = (
            view_for(self._progress),
            recorder(config.run_dir, self._take_request),
            manifest_writer(config.run_dir, config.manifest, effects),
            self.kept,
            telemetry,
            on_event,
        )
        stream = EventStream([listener for listener in listeners if listener is not None])
        self._sampler = Sampler(
            [d for pool in parts.pools for group in pool.plan.device_groups for d in group],
            config.checkpoint_dir or "",
        )
        if stream.is_heard:
            self._sampler.start()
        transforms = (transform for stage in graph.stages for transform in stage.transforms)
        self._lags = LagWatch(transforms) if stream.is_heard else None
        self._reporter = Reporter(
            self._snapshots(parts, graph),
            stream,
            self._sampler.workers,
            config,
            graph.model_versions(),
            prepared.machine.info() if stream.is_heard else MachineInfo(),
            authored,
        )
        self._scheduler = Scheduler(parts, self._reporter)
        self._requests = (
            RequestWatcher(Path(checkpoint.folder.path), self._take_request) if checkpoint is not None else None
        )

    def _open(self, prepared: Prepared, checkpoint: Checkpoint | None) -> RunParts:
        """Make folders and parts for a plan. Takes over the checkpoint."""
        prepared = _with_trace(prepared, self._traceparent)
        self._checkpoint = checkpoint
        self._folders = RunFolders(prepared.config.spill_dir, checkpoint.new_files if checkpoint is not None else None)
        # A live view needs the terminal for itself, so the workers' output goes through this process.
        self._prints = WorkerPrints(self._folders.sockets) if is_live(self._progress) else None
        try:
            prints = self._prints.sockets if self._prints is not None else {}
            if checkpoint is not None:
                checkpoint.begin(prepared.graph, prepared.config, script_name())
            parts = assemble(prepared, self._folders, self.metrics, prints, checkpoint)
        except BaseException:
            self._remove_folders()
            raise
        self._server = parts.server
        return parts

    def _snapshots(self, parts: RunParts, graph: Graph) -> Snapshots:
        asked = {key: resources_asked(each) for key, each in graph.components.environments.items()}
        return Snapshots(parts, self._sampler, asked, self._lags)

    def start(self) -> None:
        """Start the run on a thread of its own. With ``--debug``, run everything before returning."""
        _active.add(self)
        cancel_on_sigterm(_request_cancellation)
        self._reporter.capture_logs(lambda url: url == self._folders.url)
        if not self._is_debug:
            # Not a daemon thread: a script that ends without waiting for its pipeline still gets its results.
            threading.Thread(target=self._run, name="luminosity-run").start()
            return
        self._run()
        if self.state == PipelineState.CANCELLED and self.failure is not None:
            raise self.failure  # Ctrl-C and SIGTERM must end the script, too

    def wait(self, seconds: float | None) -> bool:
        """Wait up to ``seconds``, or without a limit for None; return whether the run has ended."""
        return self._ending.wait(seconds)

    def cancel(self, *, at_once: bool = False) -> None:
        """Ask the run to end. Does not wait.

        With a checkpoint, the run stops when its running bundles have ended, or after ``stop_timeout`` seconds, and
        saves a last checkpoint. ``at_once`` ends it without both.
        """
        self._request = "stop" if self.is_durable and not at_once else "cancel"
        self._forward_request()

    def drain(self) -> None:
        """Ask the run to read nothing new and to finish what it has read. Does not wait.

        Raises :class:`OptionError` if the run has no checkpoint.
        """
        if self._plan_drain is None or self._checkpoint is None:
            raise OptionError(
                "found a run without --checkpoint_dir; a drain continues a run from its checkpoint",
                fix="start the run with --checkpoint_dir, or cancel it",
            )
        if not self._request:
            self._request = "drain"
            self._forward_request()

    def _forward_request(self) -> None:
        if self._request == "cancel":
            self._scheduler.cancel()
        elif self._request:
            self._scheduler.stop()

    def _take_request(self, action: Action) -> None:
        """Do what another process asks for."""
        if action == "drain" and self._checkpoint is not None:
            self.drain()
        else:
            self.cancel()

    def _run_all(self) -> str:
        """Run the pipeline and, if a drain is requested, what is left of it then. Returns the final state."""
        if self._scheduler.run() == "finished":
            return PipelineState.DONE
        if self._request != "drain":
            return PipelineState.STOPPED
        assert self._plan_drain is not None
        assert self._checkpoint is not None
        self._server.stop()
        self._remove_folders()
        prepared, checkpoint = self._plan_drain(self._checkpoint.pause())
        if prepared.connection is not None:
            prepared.connection.close()  # that of the first plan is still open
        prepared = replace(prepared, connection=self._connection)
        self.metrics = RunMetrics()  # the checkpoint has the values
        parts = self._open(prepared, checkpoint)
        self._reporter.continue_with(self._snapshots(parts, prepared.graph))
        self._scheduler = Scheduler(parts, self._reporter)
        if self._request != "drain":
            self._forward_request()  # it was changed meanwhile
        return PipelineState.DRAINED if self._scheduler.run(is_drain=True) == "finished" else PipelineState.STOPPED

    def _run(self) -> None:
        try:
            self.state = self._run_all()
        except (RunCancelled, KeyboardInterrupt, Terminated) as error:
            self.state, self.failure = PipelineState.CANCELLED, error
        except BaseException as error:
            # Whatever it is, the thread that waits for the run gets it.
            self.state, self.failure = PipelineState.FAILED, self._with_remedy(error)
        finally:
            try:
                self._server.stop()
                self._remove_folders()
                if self._requests is not None:
                    self._requests.close()
                if self._checkpoint is not None:
                    self._checkpoint.close(has_failed=self.state == PipelineState.FAILED)
                if self._checkpoint is None or self.state in (PipelineState.DONE, PipelineState.DRAINED):
                    remove_local(self._of_steps)  # also after success: a stream's steps don't know which is the last
                self._sampler.stop()
                self._reporter.ended(_ENDINGS[self.state], _headline(self.failure), self.failure)
                if self._lags is not None:
                    self._lags.close()
                self._tell_what_is_missing()
                if self._checkpoint is not None and self.state in (PipelineState.STOPPED, PipelineState.CANCELLED):
                    _LOGGER.warning(
                        "the run is %s; start it again with --checkpoint_dir=%s to continue",
                        _ENDINGS[self.state],
                        self._checkpoint.folder.path,
                    )
                if self._shown_prompts:
                    print_prompts(self._shown_prompts)
                if self.state == PipelineState.FAILED and self.on_failure is not None:
                    self.on_failure()
            finally:
                self._claim.release()
                if self._connection is not None:
                    self._connection.close()
                _active.discard(self)
                self._ending.set()  # in any case: a thread may wait without a limit

    def _tell_what_is_missing(self) -> None:
        """Warn of records to leave out that no source has read, and of elements that were passed by."""
        for place in self._skip_record:
            if not self.metrics.count_of(KafkaMetrics.READ, KafkaMetrics.SKIPPED + place):
                _LOGGER.warning("--skip_record=%s: no source has read this record", place)

        if self._dead_letters and (count := self.metrics.count_of(NAMESPACE, LETTERS)):
            _LOGGER.warning(
                "%d %s passed by, because a step failed at %s on every attempt: see the dead letters in %s",
                count,
                *(("element was", "it") if count == 1 else ("elements were", "them")),
                self._dead_letters,
            )

    def _with_remedy(self, error: BaseException) -> BaseException:
        """Return the error, with a remedy for a run with a checkpoint, which has no ``--spill_dir``."""
        if not isinstance(error, SpillFailed) or not self.is_durable:
            return error
        return SpillFailed(error.message, fix="make room, then start again with the same --checkpoint_dir")

    def _remove_folders(self) -> None:
        if self._prints is not None:
            self._prints.stop()
        self._shown_prompts += text_of_prompts(self._folders.memory)
        self._folders.remove()


class FinishedRun:
    """A run that a checkpoint says has finished: there is nothing to do, and its metrics are known."""

    def __init__(self, graph: Graph, checkpoint: Checkpoint) -> None:
        """Read the metrics, and release the checkpoint."""
        self.metrics = RunMetrics()
        self.state: str = PipelineState.DONE
        self.failure: BaseException | None = None
        self.on_failure: Callable[[], None] | None = None
        self.kept = None
        self.stop_timeout = 0.0
        restore_metrics(checkpoint.folder, Names(graph), graph.stages, self.metrics)
        checkpoint.tell_finished()
        checkpoint.close()

    def start(self) -> None:
        """Do nothing."""

    def wait(self, seconds: float | None) -> bool:
        """Return True: the run has ended."""
        return True

    def cancel(self, *, at_once: bool = False) -> None:
        """Do nothing: the run has ended."""

    def drain(self) -> None:
        """Do nothing: the run has ended."""


def _with_trace(prepared: Prepared, traceparent: str) -> Prepared:
    """Return a plan whose workers know the run's span."""
    if not traceparent:
        return prepared
    options = {**prepared.config.worker_options, TRACEPARENT_OPTION: traceparent}
    return replace(prepared, config=replace(prepared.config, worker_options=options))


def _headline(failure: BaseException | None) -> str:
    if failure is None:
        return ""
    return failure.headline if isinstance(failure, RunFailed) else f"{type(failure).__name__}: {failure}"
