"""What ``pipeline.run()`` returns."""

from __future__ import annotations

import atexit
import os
import sys
from collections.abc import Iterator

from apache_beam.portability.api import metrics_pb2
from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiMetrics
from apache_beam.runners.runner import PipelineResult, PipelineState

from luminosity.engine.run import Run

_CANCEL_TIMEOUT_S = 30.0


class LuminosityResult(PipelineResult):
    """A run of a pipeline, which may still go on."""

    def __init__(self, run: Run) -> None:
        super().__init__(PipelineState.RUNNING)
        self._run = run
        run.on_failure = self._tell_at_exit

    @property
    def state(self) -> str:
        return self._run.state

    def wait_until_finish(  # pyright: ignore[reportIncompatibleMethodOverride]  # Beam's base says None, its docs this
        self, duration: float | None = None
    ) -> str | None:
        """Wait for the end, or for ``duration`` milliseconds.

        Returns the final state, or None when the time was up first. Raises what ended the run if it failed. Ctrl-C
        while waiting ends the run and is raised once nothing of it is left.
        """
        try:
            has_ended = self._wait(duration)
        except BaseException:
            self._end()  # once more: a second Ctrl-C may have come just before the first had its effect
            raise
        if not has_ended:
            return None
        atexit.unregister(self._tell)  # who waits is told here
        if self._run.failure is not None and self._run.state == PipelineState.FAILED:
            raise self._run.failure
        return self._run.state

    def cancel(self) -> str:
        """End the run and wait until nothing of it is left."""
        self._run.cancel()
        self._run.wait(_CANCEL_TIMEOUT_S)
        return self._run.state

    def _wait(self, duration: float | None) -> bool:
        try:
            return self._run.wait(None if duration is None else duration / 1000)
        except BaseException:  # not Ctrl-C alone: the second of two in a row may break the waiting itself
            self._end()
            raise

    def _end(self) -> None:
        """Cancel, however often Ctrl-C is pressed meanwhile."""
        while True:
            try:
                self.cancel()
                return
            except (KeyboardInterrupt, RuntimeError):
                continue

    def _tell_at_exit(self) -> None:
        """A script that ends without waiting must not end as if its pipeline had succeeded."""
        atexit.register(self._tell)

    def _tell(self) -> None:
        print(f"The pipeline failed: {self._run.failure}", file=sys.stderr, flush=True)
        atexit.unregister(self._tell)
        atexit._run_exitfuncs()  # pyright: ignore[reportPrivateUsage]  # the exit code can be set in no other way
        sys.stdout.flush()
        os._exit(1)

    def metrics(self) -> FnApiMetrics:
        """The user's metrics."""
        return FnApiMetrics(self._run.metrics.by_stage(), user_metrics_only=True)

    def monitoring_metrics(self) -> FnApiMetrics:
        """All metrics, Beam's own included."""
        return FnApiMetrics(self._run.metrics.by_stage(), user_metrics_only=False)

    def monitoring_infos(self) -> Iterator[metrics_pb2.MonitoringInfo]:
        for infos in self._run.metrics.by_stage().values():
            yield from infos
