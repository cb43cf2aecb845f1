"""The planner: turns a pipeline's proto into a :class:`~luminosity.engine.plan.graph.Graph`."""

from __future__ import annotations

from collections.abc import Collection, Iterable, Iterator
from dataclasses import replace
from graphlib import CycleError, TopologicalSorter
from typing import Any

from apache_beam.internal import pickler
from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.pvalue import AsSingleton
from apache_beam.runners.portability.fn_api_runner import translations
from apache_beam.runners.worker import bundle_processor

from luminosity.core import OF_BLOCKS, SORTS_ITS_BUNDLE, WRITES_A_FILE_PER_BUNDLE
from luminosity.engine.plan.graph import (
    Buffer,
    BufferKind,
    Graph,
    Read,
    SideInput,
    Stage,
    TestStream,
    TimerFamily,
    Write,
    may_never_end,
)
from luminosity.engine.plan.translate import optimize, resolve_alias, test_stream_buffer_id
from luminosity.errors import UnsupportedPipeline
from luminosity.runs.run_ids import AT_INTERVALS

__all__ = ["SINK_STARTS", "plan"]


_SDF_PROCESS_URN = common_urns.sdf_components.PROCESS_SIZED_ELEMENTS_AND_RESTRICTIONS.urn
_ONE_WINDOW_URNS = {
    common_urns.fixed_windows.urn,
    common_urns.global_windows.urn,
    common_urns.session_windows.urn,
}
_SDF_TRUNCATE_URN = common_urns.sdf_components.TRUNCATE_SIZED_RESTRICTION.urn
# Beam's sinks without a fixed number of shards. Only their name tells them in the proto; our sinks are annotated.
_BEFORE_MOVING_FILES = "/GroupTempFilesByDestination"  # in fileio.WriteToFiles: the next step gives files their names
_BEAM_WRITES_FILE_PER_BUNDLE = "/WriteImpl/WriteBundles"
SINK_STARTS = "/WriteImpl/WindowInto(WindowIntoFn)"  # the first step of the same sinks
_IO_URNS = (bundle_processor.DATA_INPUT_URN, bundle_processor.DATA_OUTPUT_URN)


def plan(
    pipeline: beam_runner_api_pb2.Pipeline,
    *,
    is_drain: bool = False,
    is_durable: bool = False,
    roots: frozenset[str] = frozenset(),
) -> Graph:
    """Return the plan of ``pipeline``, with writers before readers.

    ``is_drain`` truncates restrictions without end. ``is_durable`` leaves out what would let a new step change how an
    unrelated step stores its data. The steps in ``roots`` start a stage.

    Raises :class:`UnsupportedPipeline` if steps wait for each other's side inputs.
    """
    # A sink of Beam's starts a stage. It writes a file per bundle: fused with a slow step, it would get that step's
    # short bundles. The queue before it gathers enough elements for a file.
    steps = {step.unique_name: step for step in pipeline.components.transforms.values()}
    sinks = [step for name, step in steps.items() if name.endswith(_BEAM_WRITES_FILE_PER_BUNDLE)]
    starts = [step for name, step in steps.items() if name.endswith(SINK_STARTS)]
    # With a fixed number of files, other steps come first.
    roots |= frozenset(
        start.unique_name
        for start in starts
        for sink in sinks
        if set(start.outputs.values()) & set(sink.inputs.values())
    )
    while True:
        graph = _fused(pipeline, is_drain, is_durable, roots)
        try:
            return replace(graph, stages=_in_order(graph.stages))
        except CycleError as error:
            # Fusion never puts a step into the stage that makes its side input, but two stages may still wait for each
            # other's side inputs. The steps that read those then start stages of their own.
            waiting = {
                side_input.transform_id
                for stage in graph.stages
                if stage.id in error.args[1]
                for side_input in stage.side_inputs
            }
            if waiting <= roots:
                labels = [repr(stage.label) for stage in graph.stages if stage.id in error.args[1]]
                raise UnsupportedPipeline(f"steps wait for each other's side inputs: {', '.join(labels)}") from error
            roots |= waiting


def _fused(pipeline: beam_runner_api_pb2.Pipeline, is_drain: bool, is_durable: bool, roots: frozenset[str]) -> Graph:
    context, fused, aliases = optimize(pipeline, is_drain=is_drain, is_durable=is_durable, roots=roots)
    # The order of fused stages changes from run to run.
    places = _places(pipeline)
    fused.sort(key=lambda stage: (min(_place(t.unique_name, places) for t in stage.transforms), stage.name))
    components = context.components
    transforms = pipeline.components.transforms.values()
    reshuffles = {t.unique_name for t in transforms if t.spec.urn == common_urns.composites.RESHUFFLE.urn}
    buffers = _buffers(fused, context, reshuffles)
    # For stages that only move data: the environment with the fewest hints.
    default_environment = min(components.environments, key=lambda e: len(components.environments[e].resource_hints))
    stages = tuple(
        _stage(index, stage, context, buffers, aliases, default_environment) for index, stage in enumerate(fused)
    )
    return Graph(stages, buffers, components, dict(context.safe_coders), tuple(_test_streams(pipeline, buffers)))


def _test_streams(pipeline: beam_runner_api_pb2.Pipeline, buffers: dict[bytes, Buffer]) -> Iterator[TestStream]:
    for transform in pipeline.components.transforms.values():
        if transform.spec.urn == common_urns.primitives.TEST_STREAM.urn:
            payload = beam_runner_api_pb2.TestStreamPayload.FromString(transform.spec.payload)
            ids = {tag: test_stream_buffer_id(transform.unique_name, tag) for tag in transform.outputs}
            outputs = {tag: (i, buffers[i].coder_id) for tag, i in ids.items() if i in buffers}
            yield TestStream(transform.unique_name, payload, outputs)


def _places(pipeline: beam_runner_api_pb2.Pipeline) -> dict[str, int]:
    """Return the position of each step in the author's program."""
    transforms = pipeline.components.transforms
    places: dict[str, int] = {}
    waiting = list(reversed(pipeline.root_transform_ids))
    while waiting:
        transform = transforms[waiting.pop()]
        places[transform.unique_name] = len(places)
        waiting += reversed(transform.subtransforms)
    return places


def _place(name: str, places: dict[str, int]) -> int:
    """Return the position of a transform, or of the step that it was made from."""
    while name not in places and "/" in name:
        name = name.rpartition("/")[0]
    return places.get(name, len(places))


def _in_order(stages: tuple[Stage, ...]) -> tuple[Stage, ...]:
    """Sort writers before readers, including readers of side inputs."""
    writers: dict[bytes, list[Stage]] = {}
    for stage in stages:
        for write in stage.writes:
            writers.setdefault(write.buffer_id, []).append(stage)
    by_id = {stage.id: stage for stage in stages}
    before = {
        stage.id: [w.id for source in (*stage.reads, *stage.side_inputs) for w in writers.get(source.buffer_id, ())]
        for stage in stages
    }
    return tuple(by_id[stage_id] for stage_id in TopologicalSorter(before).static_order())


def _transforms(stages: Iterable[translations.Stage], urn: str) -> Iterator[beam_runner_api_pb2.PTransform]:
    for stage in stages:
        for transform in stage.transforms:
            if transform.spec.urn == urn:
                yield transform


def _buffers(
    stages: list[translations.Stage], context: translations.TransformContext, reshuffles: Collection[str]
) -> dict[bytes, Buffer]:
    coders: dict[str, str] = context.data_channel_coders
    buffers: dict[bytes, Buffer] = {}
    written = {
        t.spec.payload: next(iter(t.inputs.values())) for t in _transforms(stages, bundle_processor.DATA_OUTPUT_URN)
    }
    read = {
        t.spec.payload: next(iter(t.outputs.values())) for t in _transforms(stages, bundle_processor.DATA_INPUT_URN)
    }
    tested = {
        test_stream_buffer_id(transform.unique_name, tag): output
        for transform in context.components.transforms.values()
        if transform.spec.urn == common_urns.primitives.TEST_STREAM.urn
        for tag, output in transform.outputs.items()
    }
    read |= tested  # also if they are read as side inputs only
    for buffer_id in {**read, **written}:
        if buffer_id == translations.IMPULSE_BUFFER:
            buffers[buffer_id] = Buffer(buffer_id, BufferKind.IMPULSE, "", "")
            continue
        kind, name = translations.split_buffer_id(buffer_id)
        if kind == "group":
            gbk = context.components.transforms[name]
            pcollection = next(iter(gbk.inputs.values()))
            output = next(iter(gbk.outputs.values()))
            context.add_data_channel_coder(pcollection)
            context.add_data_channel_coder(output, is_input=True)
            is_unbounded = may_never_end(pcollection, context.components)
            buffers[buffer_id] = Buffer(
                buffer_id,
                BufferKind.GROUP,
                coders[pcollection],
                pcollection,
                coders[output],
                is_unbounded,
                gbk.unique_name,
                is_stable=gbk.unique_name.endswith(_BEFORE_MOVING_FILES),
            )
        else:
            pcollection = written.get(buffer_id) or read[buffer_id]
            if buffer_id in tested:
                context.add_data_channel_coder(pcollection)
            buffers[buffer_id] = Buffer(
                buffer_id,
                BufferKind.QUEUE,
                coders[pcollection],
                pcollection,
                is_stable=name in reshuffles,
                is_patient=name.rpartition("/")[2] == AT_INTERVALS,
            )
    return buffers


def _stage(
    index: int,
    stage: translations.Stage,
    context: translations.TransformContext,
    buffers: dict[bytes, Buffer],
    aliases: dict[bytes, bytes],
    default_environment: str,
) -> Stage:
    coders: dict[str, str] = context.data_channel_coders
    reads: list[Read] = []
    writes: list[Write] = []
    side_inputs: list[SideInput] = []
    timers: list[TimerFamily] = []
    is_stateful = is_splittable = False
    for transform in stage.transforms:
        urn = transform.spec.urn
        if urn == bundle_processor.DATA_INPUT_URN:
            # Not the PCollection's coder: a group that is grouped again is written and read with different coders.
            buffer = buffers[transform.spec.payload]
            coder_id = buffer.output_coder_id or coders[next(iter(transform.outputs.values()))]
            reads.append(Read(transform.unique_name, transform.spec.payload, coder_id))
        elif urn == bundle_processor.DATA_OUTPUT_URN:
            coder_id = buffers[transform.spec.payload].coder_id
            writes.append(Write(transform.unique_name, transform.spec.payload, coder_id))
        elif urn in translations.PAR_DO_URNS:
            payload = beam_runner_api_pb2.ParDoPayload.FromString(transform.spec.payload)
            is_stateful = is_stateful or bool(payload.state_specs or payload.timer_family_specs)
            is_splittable = is_splittable or urn == _SDF_PROCESS_URN
            side_inputs.extend(_side_inputs(transform, payload, aliases, context))
            timers.extend(_timers(transform, payload))
    steps = tuple(t.unique_name for t in stage.transforms if t.spec.urn not in _IO_URNS)
    return Stage(
        id=f"s{index}",
        label=_label(steps) or _label(t.unique_name for t in stage.transforms),
        steps=steps,
        environment_id=stage.environment or default_environment,
        reads=tuple(reads),
        writes=tuple(writes),
        side_inputs=tuple(side_inputs),
        timers=tuple(timers),
        is_stateful=is_stateful,
        is_splittable=is_splittable,
        is_unbounded=(is_unbounded := is_splittable and _is_unbounded(stage.transforms, context)),
        # Beam repeats windows if a step that looks at its window is cut in the first of several.
        can_cut_elements=is_splittable and (is_unbounded or _has_one_window(stage.transforms, context)),
        is_sink=any(step.endswith(_BEAM_WRITES_FILE_PER_BUNDLE) for step in steps)
        or any(WRITES_A_FILE_PER_BUNDLE in transform.annotations for transform in stage.transforms),
        sorts_its_bundle=any(SORTS_ITS_BUNDLE in transform.annotations for transform in stage.transforms),
        sorts_blocks=any(t.annotations.get(SORTS_ITS_BUNDLE) == OF_BLOCKS.encode() for t in stage.transforms),
        transforms=tuple(stage.transforms),
        residual_reads=_residual_reads(stage.transforms),
        is_source=is_unbounded and not _reads_unbounded(stage.transforms, context),
        has_endless_input=is_unbounded or _reads_unbounded(stage.transforms, context),
    )


def _reads_unbounded(
    transforms: Iterable[beam_runner_api_pb2.PTransform], context: translations.TransformContext
) -> bool:
    """Return whether one of the PCollections that these transforms read may never end."""
    return any(
        may_never_end(output, context.components)
        for transform in transforms
        if transform.spec.urn == bundle_processor.DATA_INPUT_URN
        for output in transform.outputs.values()
    )


def _is_unbounded(transforms: Iterable[beam_runner_api_pb2.PTransform], context: translations.TransformContext) -> bool:
    """Return whether a splittable step among these has output without end."""
    return any(
        may_never_end(output, context.components)
        for transform in transforms
        if transform.spec.urn == _SDF_PROCESS_URN
        for output in transform.outputs.values()
    )


def _has_one_window(
    transforms: Iterable[beam_runner_api_pb2.PTransform], context: translations.TransformContext
) -> bool:
    """Return whether each element of the splittable steps among these is in a single window."""
    components = context.components
    return all(
        components.windowing_strategies[components.pcollections[output].windowing_strategy_id].window_fn.urn
        in _ONE_WINDOW_URNS
        for transform in transforms
        if transform.spec.urn == _SDF_PROCESS_URN
        for output in transform.outputs.values()
    )


def _side_inputs(
    transform: beam_runner_api_pb2.PTransform,
    payload: beam_runner_api_pb2.ParDoPayload,
    aliases: dict[bytes, bytes],
    context: translations.TransformContext,
) -> Iterator[SideInput]:
    for tag in payload.side_inputs:
        pcollection = transform.inputs[tag]
        buffer_id = resolve_alias(aliases, translations.create_buffer_id(pcollection))
        is_unbounded = may_never_end(pcollection, context.components)
        is_singleton = is_unbounded and _is_singleton(payload.side_inputs[tag])
        yield SideInput(transform.unique_name, tag, buffer_id, is_unbounded, is_singleton)


def _is_singleton(side_input: beam_runner_api_pb2.SideInput) -> bool:
    """Return whether a step reads a side input with ``AsSingleton``, which only the pickled function tells."""
    view: Any = pickler.loads(side_input.view_fn.payload)
    inner = [cell.cell_contents for cell in getattr(view, "__closure__", None) or ()]
    return any(getattr(each, "__qualname__", "").startswith(f"{AsSingleton.__name__}.") for each in inner)


def _timers(
    transform: beam_runner_api_pb2.PTransform, payload: beam_runner_api_pb2.ParDoPayload
) -> Iterator[TimerFamily]:
    for family_id, spec in payload.timer_family_specs.items():
        yield TimerFamily(
            transform.unique_name,
            family_id,
            spec.time_domain == beam_runner_api_pb2.TimeDomain.PROCESSING_TIME,
            spec.timer_family_coder_id,
        )


def _residual_reads(transforms: Iterable[beam_runner_api_pb2.PTransform]) -> dict[tuple[str, str], str]:
    reads = {
        pcollection: t.unique_name
        for t in transforms
        if t.spec.urn == bundle_processor.DATA_INPUT_URN
        for pcollection in t.outputs.values()
    }
    for t in transforms:
        # A drained SDF's restriction is truncated between its read and its processing.
        if t.spec.urn == _SDF_TRUNCATE_URN:
            read_id = next(reads[p] for p in t.inputs.values() if p in reads)
            reads |= dict.fromkeys(t.outputs.values(), read_id)
    return {
        (t.unique_name, tag): reads[pcollection]
        for t in transforms
        for tag, pcollection in t.inputs.items()
        if pcollection in reads
    }


def _label(steps: Iterable[str]) -> str:
    """Return the first level of the steps' names, in order: ``Create + Map(f)``."""
    return " + ".join(dict.fromkeys(step.split("/", 1)[0] for step in steps))
