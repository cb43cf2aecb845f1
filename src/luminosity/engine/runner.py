"""``LuminosityRunner``, the entry point of the engine, and the result that ``pipeline.run()`` returns."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Callable, Iterator
from dataclasses import replace
from functools import partial
from typing import Any, ClassVar

from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability.api import beam_runner_api_pb2, metrics_pb2
from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiMetrics
from apache_beam.runners.runner import PipelineResult, PipelineRunner, PipelineState
from apache_beam.transforms import environments

from luminosity._shared.notebook import shorten_error
from luminosity.beam_fixes.quick_building import build_quickly
from luminosity.engine.durable.copies.opening import note_restored_run
from luminosity.engine.durable.resume import Checkpoint, Resumption
from luminosity.engine.durable.store import CheckpointFolder
from luminosity.engine.options import EngineConfig, job_name
from luminosity.engine.plan.graph import Graph
from luminosity.engine.plan.support import expanded
from luminosity.engine.prepare import Prepared, effects_of, prepare, worker_environment
from luminosity.engine.process import Terminated, check_address_space, limits_named
from luminosity.engine.reporting.author_transforms import author_transforms
from luminosity.engine.reporting.run_names import script_name
from luminosity.engine.resources.claims import Claim
from luminosity.engine.run import FinishedRun, Run
from luminosity.engine.workers import worker_files
from luminosity.engine.workers.launcher import warm_up
from luminosity.errors import RunFailed
from luminosity.events import Subscriber
from luminosity.extras import check_notebook

__all__ = ["LuminosityRunner"]

build_quickly()


class LuminosityRunner(PipelineRunner):
    """Runs a Beam pipeline on this machine, with workers fitted to each step's resource hints.

    >>> import apache_beam as beam
    >>> with beam.Pipeline(runner=LuminosityRunner()) as pipeline:
    ...     numbers = pipeline | beam.Create([1, 2, 3]) | beam.Map(lambda n: n * n)
    """

    # False while pipelines are planned but not run: then no process may start.
    warms_up: ClassVar[bool] = True

    @property
    def runs_on_this_machine(self) -> bool:
        """Whether workers see the files that this process sees; False if pipelines are only planned.

        Transforms may then check their files while the pipeline is built.
        """
        return self.warms_up

    def __init__(self, *, is_drain: bool = False, on_event: Subscriber | None = None) -> None:
        """Make a runner.

        ``is_drain`` truncates restrictions that have no end, as when a streaming pipeline is drained.

        ``on_event`` gets every event of every run, in order, on a thread of the run. It has got all events when
        ``wait_until_finish`` returns. While it is slow, it misses snapshots. If it raises, it gets no more events. The
        run goes on in both cases.

        Raises :class:`MissingExtra` in a notebook in which Beam can't build pipelines.

        >>> import apache_beam as beam
        >>> from luminosity import RunEnded
        >>> def tell(event):
        ...     if isinstance(event, RunEnded):
        ...         print(event.state, max(stage.elements for stage in event.last.stages))
        >>> with beam.Pipeline(runner=LuminosityRunner(on_event=tell)) as pipeline:
        ...     numbers = pipeline | beam.Create([1, 2, 3]) | beam.Map(lambda n: n * n)
        done 3
        """
        super().__init__()
        check_notebook()
        self.is_drain = is_drain
        self._on_event = on_event
        self._waits = False
        self._options_seen: PipelineOptions | None = None  # of the pipeline that is being built
        worker_files.send_by_value()
        # The fork server takes a second to import Beam: it does so while the pipeline is built.
        if self.warms_up:
            warm_up("auto")

    def is_interactive(self) -> None:
        """Make ``run`` wait for the end of each run. Beam's ``InteractiveRunner`` calls it for the runner it wraps.

        ``ib.collect`` and ``ib.show`` read the files of a run as soon as ``run`` returns, and take files that are not
        there yet for an empty PCollection.
        """
        self._waits = True

    def default_environment(self, options: PipelineOptions) -> environments.Environment:
        """Return the environment of steps without resource hints. Beam calls it."""
        return worker_environment(options)

    def apply(self, transform: Any, input: Any, options: PipelineOptions) -> Any:
        """Expand a transform while the pipeline is built, unless it can never run here. Beam calls it."""
        if self.warms_up and options is not self._options_seen:
            self._options_seen = options
            note_restored_run(options)
        return expanded(transform, input, lambda: super(LuminosityRunner, self).apply(transform, input, options))

    def run_portable_pipeline(
        self, pipeline: beam_runner_api_pb2.Pipeline, options: PipelineOptions
    ) -> LuminosityResult:
        """Check, plan and start a pipeline; return before it has ended, unless it is interactive. Beam calls it.

        Raises :class:`OptionError`, :class:`UnsupportedPipeline` or :class:`ResourcesExceeded` before anything starts.
        """
        resumption = Resumption()
        claim = Claim(job_name(options) or script_name())
        connection = None
        try:
            prepared = prepare(pipeline, options, is_drain=self.is_drain, fit=resumption.fit, claim=claim)
            connection = prepared.connection
            if not prepared.config.debug:
                check_address_space()
            with limits_named():
                checkpoint = resumption.checkpoint
                if checkpoint is not None and checkpoint.is_finished:
                    claim.release()
                    run = FinishedRun(prepared.graph, checkpoint)
                    if connection is not None:
                        connection.close()
                else:
                    plan_drain = None
                    if checkpoint is not None:
                        plan_drain = partial(_plan_drain, pipeline, options, claim, checkpoint)
                    effects = effects_of(pipeline, prepared.graph.model_versions())
                    transforms = author_transforms(pipeline)
                    run = Run(prepared, claim, effects, self._on_event, checkpoint, plan_drain, transforms)
        except BaseException:
            resumption.close()
            claim.release()
            if connection is not None:
                connection.close()
            raise
        with limits_named():
            result = LuminosityResult(run)
            run.start()
        if self._waits:
            result.wait_until_finish()
        return result


def _plan_drain(
    pipeline: beam_runner_api_pb2.Pipeline,
    options: PipelineOptions,
    claim: Claim,
    first: Checkpoint,
    folder: CheckpointFolder,
) -> tuple[Prepared, Checkpoint]:
    """Plan a pipeline so that its sources end, and so that it continues from the checkpoint of its ``first`` plan."""
    checkpoint = Checkpoint(folder, folder.meta(), first.copy, is_drain=True)

    def fit(config: EngineConfig, plan: Callable[[frozenset[str]], Graph]) -> Graph:
        # The first plan has done what these options ask for. With the same roots, the stages are the same as well.
        config = replace(config, renamed_steps={}, drop_state=(), restart=False)
        return checkpoint.fit(lambda roots: plan(roots | first.comparison.roots), config)

    return prepare(pipeline, options, is_drain=True, fit=fit, claim=claim), checkpoint


_CANCEL_TIMEOUT_S = 30.0  # workers end within seconds; user code may take longer to notice


class LuminosityResult(PipelineResult):
    """A run of a pipeline that may not have ended yet."""

    def __init__(self, run: Run | FinishedRun) -> None:
        super().__init__(PipelineState.RUNNING)
        self._run = run
        run.on_failure = self._report_at_exit

    @property
    def state(self) -> str:
        """The state of the run, one of Beam's ``PipelineState``."""
        return self._run.state

    def wait_until_finish(  # pyright: ignore[reportIncompatibleMethodOverride]  # Beam's base says None, its docs this
        self, duration: float | None = None
    ) -> str | None:
        """Wait for the end, or for at most ``duration`` milliseconds.

        Returns the final state, or None if the time is up first. Raises the error of a failed run. Ctrl-C while
        waiting cancels the run and is raised when the run has ended. So does SIGTERM, as ``SystemExit`` with code 143,
        unless the script has a handler for it. A run with ``--checkpoint_dir`` is stopped, as by :meth:`cancel`; a
        second Ctrl-C ends it at once.
        """
        try:
            has_ended = self._wait(duration)
        except BaseException as error:
            self._end()  # again: a second Ctrl-C may have interrupted the handling of the first one
            shorten_error(error, f"the run was interrupted; its state is {self._run.state}")
            raise
        if not has_ended:
            return None
        atexit.unregister(self._report)  # the caller gets the error
        if self._run.failure is not None and self._run.state == PipelineState.FAILED:
            failure = self._run.failure
            # The frames of the run's own thread say nothing about what failed there on purpose.
            raise failure.with_traceback(None) if isinstance(failure, RunFailed) else failure
        return self._run.state

    def cancel(self) -> str:
        """Cancel the run and wait until it has ended. Returns the state.

        With ``--checkpoint_dir``, the run starts no more bundles, waits up to ``--stop_timeout`` for those that run,
        and saves a last checkpoint, from which the next start continues. The state is ``STOPPED`` then.
        """
        self._cancel(at_once=False)
        return self._run.state

    def drain(self) -> None:
        """Let the sources read nothing new, and let everything that they have read go through the pipeline.

        Windows close and timers fire, then the state is ``DRAINED``. Does not wait: call :meth:`wait_until_finish`.
        Raises :class:`OptionError` if the run has no ``--checkpoint_dir``.
        """
        self._run.drain()

    def _cancel(self, *, at_once: bool) -> None:
        self._run.cancel(at_once=at_once)
        self._run.wait(_CANCEL_TIMEOUT_S + (0.0 if at_once else self._run.stop_timeout))

    def __repr__(self) -> str:
        return f"<{type(self).__name__}: {self.state}>"

    def _repr_html_(self) -> str | None:
        """Return the stages and the summary of the run, for a notebook."""
        return self._run.kept.as_html() if self._run.kept is not None else None

    def _wait(self, duration: float | None) -> bool:
        try:
            return self._run.wait(None if duration is None else duration / 1000)
        except BaseException:  # not only KeyboardInterrupt: a second Ctrl-C may break the waiting itself
            self._end()
            raise

    def _end(self) -> None:
        """Cancel the run, even if Ctrl-C or SIGTERM come several times meanwhile: the second one ends it at once."""
        at_once = False
        while True:
            try:
                self._cancel(at_once=at_once)
                return
            except (KeyboardInterrupt, Terminated):
                at_once = True
            except RuntimeError:
                continue

    def _report_at_exit(self) -> None:
        """Let a script that does not wait for its failed pipeline exit with an error."""
        atexit.register(self._report)

    def _report(self) -> None:
        print(f"The pipeline failed: {self._run.failure}", file=sys.stderr, flush=True)
        atexit.unregister(self._report)
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]  # there is no other way to set the exit code
        sys.stdout.flush()
        os._exit(1)

    def metrics(self) -> FnApiMetrics:
        """Return the user's metrics of committed bundles."""
        return FnApiMetrics(self._run.metrics.by_stage(), user_metrics_only=True)

    def monitoring_metrics(self) -> FnApiMetrics:
        """Return all metrics, including Beam's own."""
        return FnApiMetrics(self._run.metrics.by_stage(), user_metrics_only=False)

    def monitoring_infos(self) -> Iterator[metrics_pb2.MonitoringInfo]:
        """Yield all metrics as the workers reported them, stage by stage."""
        for infos in self._run.metrics.by_stage().values():
            yield from infos
