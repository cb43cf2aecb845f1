"""``LuminosityRunner``, the entry point."""

from __future__ import annotations

from typing import Any

from apache_beam.options.pipeline_options import PipelineOptions, PortableOptions
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.runners.runner import PipelineRunner
from apache_beam.transforms import environments
from apache_beam.transforms.resources import resource_hints_from_options

from luminosity.engine import support
from luminosity.engine.hints import Needs
from luminosity.engine.machine import Machine
from luminosity.engine.options import EngineConfig
from luminosity.engine.plan.planner import plan
from luminosity.engine.pools import assign
from luminosity.engine.result import LuminosityResult
from luminosity.engine.run import Run
from luminosity.engine.workers import mainclasses
from luminosity.engine.workers.launcher import warm_up


class LuminosityRunner(PipelineRunner):
    """Runs a Beam pipeline on this machine, with workers fitted to each step's resource hints.

    >>> import apache_beam as beam
    >>> with beam.Pipeline(runner=LuminosityRunner()) as pipeline:
    ...     numbers = pipeline | beam.Create([1, 2, 3]) | beam.Map(lambda n: n * n)
    """

    def __init__(self, *, is_drain: bool = False) -> None:
        """``is_drain`` cuts restrictions short that could go on for ever, as when a streaming pipeline is drained."""
        super().__init__()
        self._is_drain = is_drain
        mainclasses.send_by_value()
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
        needs = {key: Needs.of(e) for key, e in graph.components.environments.items()}
        assignments = assign([(s, needs[s.environment_id]) for s in graph.stages], machine, config)
        return LuminosityResult(Run(graph, assignments, config))
