"""Explain a plan: its stages with the author's step names, and the reason for each place where fusion breaks.

:func:`plan_pipeline` does it for a pipeline in Python, as ``lum plan`` does for a script.
"""

from __future__ import annotations

import base64
import heapq
import io
from collections import Counter
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace
from math import inf
from typing import Any

from apache_beam import Pipeline
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.runners.portability.fn_api_runner import translations
from apache_beam.runners.worker import bundle_processor
from rich.console import Console

from luminosity.engine.explain.dryrun import DryRun, DryRunner
from luminosity.engine.explain.explanation import Break, ExplainedStage, Explanation, Outline, Reason, ReasonKind, Step
from luminosity.engine.explain.reasons import Reasons
from luminosity.engine.explain.svg import svg
from luminosity.engine.explain.text import print_plan
from luminosity.engine.plan.graph import Buffer, BufferKind, Graph, Stage
from luminosity.engine.prepare import Prepared
from luminosity.engine.resources.hints import describe_hints
from luminosity.engine.resources.pools import Assignment

__all__ = ["PipelinePlan", "explain", "plan_pipeline"]

# The planner splits some steps into several transforms: what each of them does.
_PARTS = {
    common_urns.sdf_components.SPLIT_AND_SIZE_RESTRICTIONS.urn: "into parts",
    common_urns.sdf_components.PROCESS_SIZED_ELEMENTS_AND_RESTRICTIONS.urn: "part by part",
    common_urns.combine_components.COMBINE_PER_KEY_PRECOMBINE.urn: "per bundle",
    common_urns.combine_components.COMBINE_PER_KEY_MERGE_ACCUMULATORS.urn: "over all bundles",
}
_PORTS = (bundle_processor.DATA_INPUT_URN, bundle_processor.DATA_OUTPUT_URN)
_MOST_INNER_NAMES = 3  # as many fit on one line of a table
# Between the inner stages of one of Beam's own steps, the user can't do anything about these.
_INNER_MATTERS = frozenset([ReasonKind.SIDE_INPUT, ReasonKind.WAIT])


def explain(prepared: Prepared, pipeline: beam_runner_api_pb2.Pipeline, *, is_full: bool = False) -> Explanation:
    """Explain how ``pipeline`` would run. ``prepared`` is its plan.

    ``is_full`` names every transform that Beam made of each step.
    """
    outline = Outline(pipeline, is_full=is_full)
    graph = replace(prepared.graph, stages=_in_authors_order(prepared.graph.stages, outline))
    pools = {id(assignment.pool): assignment.pool for assignment in prepared.assignments.values()}
    return Explanation(
        machine=prepared.machine,
        pools=tuple(pools.values()),
        stages=tuple(_stages(graph, prepared.assignments, outline)),
        breaks=tuple(sorted(_breaks(graph, outline), key=lambda b: (b.reader or inf, b.is_side_input, b.writers))),
        models=graph.model_versions(),
        absorbed=tuple(_absorbed(graph, Outline(pipeline))),
    )


def _in_authors_order(stages: tuple[Stage, ...], outline: Outline) -> tuple[Stage, ...]:
    """Sort writers before readers; of the stages that may come next, take the first one in the author's program."""
    writers: dict[bytes, list[int]] = {}
    for index, stage in enumerate(stages):
        for write in stage.writes:
            writers.setdefault(write.buffer_id, []).append(index)
    waits_for = [
        {writer for source in (*stage.reads, *stage.side_inputs) for writer in writers.get(source.buffer_id, ())}
        for stage in stages
    ]
    positions = [min(outline.position(t.unique_name) for t in stage.transforms) for stage in stages]
    ready = [(positions[index], index) for index, waiting in enumerate(waits_for) if not waiting]
    heapq.heapify(ready)
    ordered: list[Stage] = []
    while ready:
        _, done = heapq.heappop(ready)
        ordered.append(stages[done])
        for index, waiting in enumerate(waits_for):
            if done in waiting:
                waiting.remove(done)
                if not waiting:
                    heapq.heappush(ready, (positions[index], index))
    return tuple(ordered)


def _stages(graph: Graph, assignments: Mapping[str, Assignment], outline: Outline) -> Iterator[ExplainedStage]:
    contents = [_contents(stage, outline) for stage in graph.stages]
    spread = Counter(step for content in contents for step in content)
    for number, (stage, content) in enumerate(zip(graph.stages, contents, strict=True), start=1):
        assignment = assignments[stage.id]
        yield ExplainedStage(
            number=number,
            label=stage.label,
            pool=assignment.pool,
            max_active_bundles=assignment.max_active_bundles,
            asks_for=describe_hints(graph.components.environments[stage.environment_id]),
            is_source=any(graph.buffers[read.buffer_id].kind is BufferKind.IMPULSE for read in stage.reads),
            steps=tuple(
                Step(step, _part(transforms) if spread[step] > 1 else "", tuple(t.unique_name for t in transforms))
                for step, transforms in content.items()
            ),
            is_stream=stage.has_endless_input,
        )


def _contents(stage: Stage, outline: Outline) -> dict[str, list[beam_runner_api_pb2.PTransform]]:
    """Group the stage's transforms by the author's steps, both in the author's order."""
    transforms = [t for t in stage.transforms if outline.is_full or not outline.is_recoding(t)]
    transforms = [t for t in transforms if t.spec.urn not in _PORTS or t.spec.payload == translations.IMPULSE_BUFFER]
    content: dict[str, list[beam_runner_api_pb2.PTransform]] = {}
    for transform in sorted(transforms, key=lambda t: outline.position(t.unique_name)):
        content.setdefault(outline.step(transform.unique_name), []).append(transform)
    return content


def _part(transforms: list[beam_runner_api_pb2.PTransform]) -> str:
    """Name the part of a step that these transforms are."""
    for transform in transforms:
        if transform.spec.urn in _PARTS:
            return _PARTS[transform.spec.urn]
    names = [t.unique_name.rpartition("/")[2] for t in transforms if t.spec.urn != bundle_processor.DATA_INPUT_URN]
    telling = [name for name in names if "(" not in name] or [name.split("(")[0] for name in names]
    telling = list(dict.fromkeys(telling))
    more = ", …" if len(telling) > _MOST_INNER_NAMES else ""
    return ", ".join(telling[:_MOST_INNER_NAMES]) + more


def _breaks(graph: Graph, outline: Outline) -> Iterator[Break]:
    numbers = {stage.id: number for number, stage in enumerate(graph.stages, start=1)}
    reasons = Reasons(graph, outline)

    def broken(buffer: Buffer, reader: Stage | None, to_steps: tuple[str, ...], why: tuple[Reason, ...]) -> Break:
        from_steps = reasons.from_steps(buffer)
        is_inner = {*from_steps} == {*to_steps} and len(to_steps) == 1 and all(r.kind in _INNER_MATTERS for r in why)
        return Break(
            buffer_id=buffer.id,
            writers=tuple(numbers[writer.id] for writer in reasons.writers(buffer)),
            reader=numbers[reader.id] if reader else None,
            from_steps=from_steps,
            to_steps=to_steps,
            reasons=why,
            is_side_input=any(reason.kind is ReasonKind.SIDE_INPUT for reason in why),
            inside=to_steps[0] if is_inner else "",
        )

    unread = {id for id, buffer in graph.buffers.items() if buffer.kind is not BufferKind.IMPULSE}
    for stage in graph.stages:
        for read in stage.reads:
            buffer = graph.buffers[read.buffer_id]
            unread.discard(buffer.id)
            if buffer.kind is not BufferKind.IMPULSE:
                yield broken(buffer, stage, reasons.to_steps(buffer, stage), reasons.of_read(buffer, stage))
        for side_input in stage.side_inputs:
            buffer = graph.buffers[side_input.buffer_id]
            unread.discard(buffer.id)
            step = outline.step(side_input.transform_id)
            yield broken(buffer, stage, (step,), reasons.of_side_input(buffer, side_input))
    for buffer_id in sorted(unread):
        buffer = graph.buffers[buffer_id]
        yield broken(buffer, None, (), reasons.of_unread(buffer))


def _absorbed(graph: Graph, outline: Outline) -> Iterator[str]:
    """Yield the author's steps that were left out because they only move elements from one buffer to the next."""
    reasons = Reasons(graph, outline)
    kept = {reasons.made_by(buffer) for buffer in graph.buffers.values()}
    kept |= {transform.unique_name for stage in graph.stages for transform in stage.transforms}
    return (name for name in outline.movers() if name not in kept)


_WIDTH = 120  # characters of a line of text


@dataclass(frozen=True, repr=False)
class PipelinePlan:
    """The plan of a pipeline: pools, stages, and the reason of every break. ``print`` it, or let a notebook draw it."""

    explanation: Explanation
    title: str = "plan"

    def svg(self) -> str:
        """Return the picture of the plan, as ``lum plan --svg`` draws it."""
        return svg({self.title: self.explanation})

    def __str__(self) -> str:
        printed = io.StringIO()
        console = Console(file=printed, width=_WIDTH, highlight=False, force_terminal=False, force_jupyter=False)
        print_plan(console, self.explanation, self.title)
        return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        # An image of its own: the style sheet of an SVG inside the page would apply to the whole notebook.
        data = base64.b64encode(self.svg().encode()).decode()
        return f'<img alt="{self.title}" style="max-width: 100%" src="data:image/svg+xml;base64,{data}">'


def plan_pipeline(pipeline: Pipeline, options: PipelineOptions | None = None) -> PipelinePlan:
    """Return how ``LuminosityRunner`` would run a pipeline on this machine, without running it.

    ``options`` are those of the pipeline by default. Raises the errors that a run would raise before it starts.

    >>> import apache_beam as beam
    >>> pipeline = beam.Pipeline()
    >>> _ = pipeline | beam.Create([1, 2, 3]) | beam.Map(print)
    >>> print(plan_pipeline(pipeline))
    plan: 2 stages...
    """
    runs: list[DryRun] = []
    runner: Any = pipeline.runner
    DryRunner(runs, runner).run_pipeline(pipeline, pipeline.options if options is None else options)
    (found,) = runs
    return PipelinePlan(explain(found.prepared, found.pipeline))
