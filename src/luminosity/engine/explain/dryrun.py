"""Dry runs: plan the pipelines of a script without running them."""

from __future__ import annotations

import contextlib
import functools
from collections.abc import Callable, Generator, Iterator
from dataclasses import dataclass
from typing import Any

from apache_beam import Pipeline
from apache_beam.options.pipeline_options import PipelineOptions, StandardOptions
from apache_beam.pipeline import AppliedPTransform, PipelineVisitor
from apache_beam.portability.api import beam_runner_api_pb2, metrics_pb2
from apache_beam.runners.portability.fn_api_runner.fn_runner import FnApiMetrics
from apache_beam.runners.runner import PipelineResult, PipelineRunner, PipelineState
from apache_beam.transforms import environments

from luminosity.engine.plan.support import expanded
from luminosity.engine.prepare import Prepared, prepare, worker_environment
from luminosity.engine.runner import LuminosityRunner

__all__ = ["DryResult", "DryRun", "DryRunner", "dry_runs", "replaced_runners"]


@dataclass(frozen=True)
class DryRun:
    """A pipeline that a script asked to run, and its plan."""

    pipeline: beam_runner_api_pb2.Pipeline
    prepared: Prepared
    other_runner: str  # the runner that the script named; empty for LuminosityRunner


class DryResult(PipelineResult):
    """The result of a dry run: done at once, without metrics."""

    def __init__(self) -> None:
        super().__init__(PipelineState.DONE)

    def wait_until_finish(  # pyright: ignore[reportIncompatibleMethodOverride]  # Beam's base says None, its docs this
        self, duration: float | None = None
    ) -> str:
        """Return ``DONE`` at once."""
        return self.state

    def cancel(self) -> str:
        """Return ``DONE``: there is nothing to cancel."""
        return self.state

    def metrics(self) -> FnApiMetrics:
        """Return no metrics."""
        return FnApiMetrics({})

    def monitoring_metrics(self) -> FnApiMetrics:
        """Return no metrics."""
        return FnApiMetrics({}, user_metrics_only=False)

    def monitoring_infos(self) -> Iterator[metrics_pb2.MonitoringInfo]:
        """Return no monitoring infos."""
        return iter(())


class _WrappedFunctions(PipelineVisitor):
    """Finds the functions that ``@beam.ptransform_fn`` wraps: they tell whether a step is Beam's or the user's."""

    def __init__(self) -> None:
        self.found: dict[str, str] = {}

    def enter_composite_transform(self, transform_node: AppliedPTransform) -> None:
        function = getattr(transform_node.transform, "_fn", None)
        if type(transform_node.transform).__name__ == "_PTransformFnPTransform" and function is not None:
            name = getattr(function, "__qualname__", type(function).__qualname__)
            self.found[transform_node.full_label] = f"{function.__module__}.{name}"


class DryRunner(PipelineRunner):
    """Replaces the runner of one pipeline: plans it and appends the plan to ``runs``."""

    def __init__(self, runs: list[DryRun], meant_for: str | PipelineRunner) -> None:
        super().__init__()
        self._runs = runs
        self._is_drain = isinstance(meant_for, LuminosityRunner) and meant_for.is_drain
        name = meant_for if isinstance(meant_for, str) else type(meant_for).__name__
        self._functions: dict[str, str] = {}
        self._other_runner = "" if name.rpartition(".")[2] == LuminosityRunner.__name__ else name

    def default_environment(self, options: PipelineOptions) -> environments.Environment:
        """Return the environment of steps without resource hints."""
        return worker_environment(options)

    def apply(self, transform: Any, input: Any, options: PipelineOptions) -> Any:
        """Expand a transform, unless it can never run on LuminosityRunner."""
        return expanded(transform, input, lambda: super(DryRunner, self).apply(transform, input, options))

    def run_pipeline(self, pipeline: Pipeline, options: PipelineOptions) -> PipelineResult:
        """Note which functions the pipeline's transforms wrap, then plan it."""
        functions = _WrappedFunctions()
        pipeline.visit(functions)
        self._functions = functions.found
        return super().run_pipeline(pipeline, options)

    def run_portable_pipeline(self, pipeline: beam_runner_api_pb2.Pipeline, options: PipelineOptions) -> DryResult:
        """Plan the pipeline. Raises the same errors as a run would before it starts."""
        for transform in pipeline.components.transforms.values():
            if function := self._functions.get(transform.unique_name):
                transform.annotations["python_type"] = function.encode()
        prepared = prepare(pipeline, options, is_drain=self._is_drain, is_dry=True)
        if prepared.connection is not None:
            prepared.connection.close()
        self._runs.append(DryRun(pipeline, prepared, self._other_runner))
        return DryResult()


@contextlib.contextmanager
def dry_runs() -> Generator[list[DryRun]]:
    """Within the context, plan every pipeline that is run, whatever its runner, instead of running it.

    Yields the list to which the plans are appended.
    """
    runs: list[DryRun] = []
    with replaced_runners(lambda meant_for: DryRunner(runs, meant_for)):
        yield runs


@contextlib.contextmanager
def replaced_runners(replace: Callable[[str | PipelineRunner], PipelineRunner]) -> Generator[None]:
    """Within the context, give new pipelines the runner that ``replace`` returns for the one they are meant for."""
    initialize = Pipeline.__init__
    made: list[PipelineRunner] = []

    @functools.wraps(initialize)
    def initialize_dry(
        self: Pipeline, runner: Any = None, options: Any = None, argv: Any = None, *rest: Any, **named: Any
    ) -> None:
        # Beam rebuilds a pipeline from its proto before it runs; then its runner is replaced already.
        if runner is None or (isinstance(runner, (str, PipelineRunner)) and runner not in made):
            runner = replace(runner or _named_runner(options, argv))
            made.append(runner)
        initialize(self, runner, options, argv, *rest, **named)

    Pipeline.__init__ = initialize_dry
    LuminosityRunner.warms_up = False  # creating a LuminosityRunner must start no process
    try:
        yield
    finally:
        Pipeline.__init__ = initialize
        LuminosityRunner.warms_up = True


def _named_runner(options: Any, argv: Any) -> str | PipelineRunner:
    """Return the runner that a pipeline's options name, or the default runner."""
    if options is None and isinstance(argv, list):
        options = PipelineOptions(argv)
    named = options.view_as(StandardOptions).runner if isinstance(options, PipelineOptions) else None
    return named or StandardOptions.DEFAULT_RUNNER
