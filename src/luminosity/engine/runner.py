"""``LuminosityRunner``, the entry point."""

from __future__ import annotations

from typing import Any

from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.runners.runner import PipelineRunner
from apache_beam.transforms import environments
from apache_beam.transforms.resources import resource_hints_from_options

from luminosity.engine import support
from luminosity.engine.events import Subscriber
from luminosity.engine.hints import Needs
from luminosity.engine.machine import Machine
from luminosity.engine.options import EngineConfig
from luminosity.engine.plan.planner import plan
from luminosity.engine.pools import assign, assign_to_this_process
from luminosity.engine.result import LuminosityResult
from luminosity.engine.run import Run
from luminosity.engine.workers.launcher import warm_up


class LuminosityRunner(PipelineRunner):
    """Runs a Beam pipeline on this machine, with workers fitted to each step's resource hints.

    >>> import apache_beam as beam
    >>> with beam.Pipeline(runner=LuminosityRunner()) as pipeline:
    ...     numbers = pipeline | beam.Create([1, 2, 3]) | beam.Map(lambda n: n * n)
    """

    def __init__(self, *, is_drain: bool = False, on_event: Subscriber | None = None) -> None:
        """
        ``is_drain`` cuts restrictions short that could go on for ever, as when a streaming pipeline is drained.

        ``on_event`` gets every event of every run, on a thread of the run's own and in their order, before
        ``wait_until_finish`` returns. While it is slow it misses snapshots; if it raises it gets no more events. The
        run goes on either way.

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
        self._is_drain = is_drain
        self._on_event = on_event
        # Importing Beam in the process that forks workers takes a second: let it do so while the pipeline is built.
        warm_up("auto")

    def default_environment(self, options: PipelineOptions) -> environments.Environment:
        environment: Any = environments.EmbeddedPythonEnvironment  # its decorator hides its type
        return environment(
            capabilities=environments.python_sdk_capabilities(),
            artifacts=(),
            resource_hints=resource_hints_from_options(options.view_as(PortableOptions)),
        )

    def run_portable_pipeline(
        self, pipeline: beam_runner_api_pb2.Pipeline, options: PipelineOptions
    ) -> LuminosityResult:
        config = EngineConfig.of(options)
        support.check(pipeline)
        support.warn(pipeline)
        machine = Machine.detect(config.accelerators)
        graph = plan(pipeline, is_drain=self._is_drain)
        if config.debug:
            assignments = assign_to_this_process(graph.stages, machine)
        else:
            needs = {key: Needs.of(e) for key, e in graph.components.environments.items()}
            assignments = assign([(s, needs[s.environment_id]) for s in graph.stages], machine, config)
        run = Run(graph, assignments, config, self._on_event)
        result = LuminosityResult(run)
        run.start()
        return result
