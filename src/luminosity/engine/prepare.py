"""What happens to a pipeline before anything starts: check, plan, assign."""

from __future__ import annotations

from dataclasses import dataclass

from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability.api import beam_runner_api_pb2

from luminosity.engine import support
from luminosity.engine.hints import Needs
from luminosity.engine.machine import Machine
from luminosity.engine.options import EngineConfig
from luminosity.engine.plan.graph import Graph
from luminosity.engine.plan.planner import plan
from luminosity.engine.pools import Assignment, assign


@dataclass(frozen=True)
class Prepared:
    """A pipeline that is ready to run."""

    graph: Graph
    assignments: dict[str, Assignment]
    config: EngineConfig
    machine: Machine


def prepare(pipeline: beam_runner_api_pb2.Pipeline, options: PipelineOptions, *, is_drain: bool = False) -> Prepared:
    """Refuse ``pipeline``, or say how it would run; starts nothing."""
    config = EngineConfig.of(options)
    support.check(pipeline)
    support.warn(pipeline)
    machine = Machine.detect(config.accelerators)
    graph = plan(pipeline, is_drain=is_drain)
    needs = {key: Needs.of(e) for key, e in graph.components.environments.items()}
    assignments = assign([(s, needs[s.environment_id]) for s in graph.stages], machine, config)
    return Prepared(graph, assignments, config, machine)
