"""The result that ``pipeline.run()`` returns."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator

from apache_beam.portability.api import metrics_pb2
from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiMetrics
from apache_beam.runners.runner import PipelineResult, PipelineState

from luminosity._shared.notebook import shorten_error
from luminosity.engine.run import FinishedRun, Run
from luminosity.engine.termination import Terminated
from luminosity.errors import RunFailed

__all__ = ["LuminosityResult"]


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
