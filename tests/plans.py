"""Pipelines for tests of plans, and their explanations. Nothing runs."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from pathlib import Path
from typing import Any
from unittest import mock

import apache_beam as beam
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.userstate import BagStateSpec

from luminosity.engine.cluster.driver import ray_calls as cluster_nodes
from luminosity.engine.cluster.driver import ray_connection
from luminosity.engine.explain.dryrun import dry_runs
from luminosity.engine.explain.explain import explain
from luminosity.engine.explain.explanation import Break, ExplainedStage, Explanation
from luminosity.engine.resources import machine
from luminosity.engine.resources.machine import Node

_STATE = beam.DoFn.StateParam(BagStateSpec("s", beam.coders.VarIntCoder()))


class Stateful(beam.DoFn):
    def process(self, element: tuple[int, int], state: Any = _STATE) -> Any:
        yield element


def explained(
    build: Callable[[beam.Pipeline], Any], *flags: str, is_full: bool = False, nodes: Sequence[Node] = ()
) -> Explanation:
    """Explain the plan for a machine with 4 cores, 16 GiB of RAM and the accelerators that ``flags`` declare.

    With ``nodes``, explain it for a cluster that has them. No Ray is there.
    """
    if nodes:
        flags = (*flags, "--ray_address=local")
    connection = mock.patch.object(ray_connection, "connect", mock.Mock())
    cluster = mock.patch.multiple(cluster_nodes, nodes=lambda: nodes, known_types=tuple[str])
    this_machine = mock.patch.multiple(
        machine, usable_cores=lambda: 4, machine_ram_bytes=lambda: 16 << 30, detect_accelerators=lambda: ()
    )
    with this_machine, connection, cluster, dry_runs() as runs:
        pipeline = beam.Pipeline(options=PipelineOptions(list(flags)))
        build(pipeline)
        pipeline.run()
    (run,) = runs
    return explain(run.prepared, run.pipeline, is_full=is_full)


def stage_with(plan: Explanation, step: str) -> ExplainedStage:
    (stage,) = [stage for stage in plan.stages if step in [s.name for s in stage.steps]]
    return stage


def break_between(plan: Explanation, before: str, after: str) -> Break:
    (found,) = [b for b in plan.breaks if before in b.from_steps and after in b.to_steps]
    return found


def pairs(pipeline: beam.Pipeline, label: str = "Create") -> beam.PCollection:
    """Return key-value pairs made from one element, so that Create needs no Reshuffle."""
    return pipeline | label >> beam.Create([(1, 1)]).with_output_types(tuple[int, int])


def same(element: Any) -> Any:
    return element


def branching(folder: Path) -> Callable[[beam.Pipeline], None]:
    """Return a pipeline with a source, two branches (one with an accelerator and a side input), a join and a sink."""
    (folder / "in.txt").write_text("a\nb\n")

    def build(p: beam.Pipeline) -> None:
        lines = p | "Read" >> beam.io.ReadFromText(str(folder / "in.txt"))
        weights = p | "Weights" >> beam.Create([1]) | "Load" >> beam.Map(same)
        embed = beam.Map(lambda x, _: str(x), beam.pvalue.AsList(weights))
        embedded = lines | "Parse" >> beam.Map(len) | "Embed" >> embed.with_resource_hints(accelerator="count:1")
        keyed = lines | "Key" >> beam.Map(lambda line: (line, 1)) | "Group" >> beam.GroupByKey()
        summed = keyed | "Sum" >> beam.MapTuple(lambda key, ones: f"{key} {sum(ones)}")
        joined = (embedded, summed) | "Join" >> beam.Flatten()
        _ = joined | "Format" >> beam.Map(str) | "Write" >> beam.io.WriteToText(str(folder / "out"))

    return build
