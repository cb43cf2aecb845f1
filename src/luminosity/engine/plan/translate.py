"""Fusion: Beam's own translations, in the order that the engine needs, with Reshuffle as a buffer of the engine."""

from __future__ import annotations

import copy
from collections.abc import Collection, Iterable, Iterator

from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2
from apache_beam.runners.pipeline_utils import merge_common_environments
from apache_beam.runners.portability.fn_api_runner import translations
from apache_beam.runners.worker import bundle_processor

from luminosity.engine.plan.graph import may_never_end

__all__ = ["MOVE_URNS", "optimize", "resolve_alias", "test_stream_buffer_id"]


MOVE_URNS = frozenset(
    [
        common_urns.composites.RESHUFFLE.urn,
        common_urns.composites.REDISTRIBUTE_BY_KEY.urn,
        common_urns.composites.REDISTRIBUTE_ARBITRARILY.urn,
    ]
)
_FLATTEN_URN = common_urns.primitives.FLATTEN.urn
_TEST_STREAM_URN = common_urns.primitives.TEST_STREAM.urn
_RUNNER_URNS = MOVE_URNS | {_FLATTEN_URN, common_urns.primitives.GROUP_BY_KEY.urn, _TEST_STREAM_URN}


def optimize(
    pipeline: beam_runner_api_pb2.Pipeline,
    *,
    is_drain: bool = False,
    is_durable: bool = False,
    roots: Collection[str] = (),
) -> tuple[translations.TransformContext, list[translations.Stage], dict[bytes, bytes]]:
    """Fuse ``pipeline`` into stages, in no particular order. Doesn't change the proto.

    Steps whose names are in ``roots`` start a new stage. If the run is durable, combiners are not packed: a packed one
    stores its groups together with those of the others, so that each new one changes them. The last item returned maps
    each buffer that was removed to the buffer that is read in its place.
    """
    aliases: dict[bytes, bytes] = {}
    pipeline = copy.deepcopy(merge_common_environments(pipeline))
    _combine_after_grouping(pipeline.components)
    context, stages = translations.create_and_optimize_stages(
        pipeline,
        phases=[
            translations.annotate_downstream_side_inputs,
            # A stateful step starts a new stage, so that its input can be routed by key.
            translations.annotate_stateful_dofns_as_roots,
            lambda stages, _: _as_roots(stages, roots),
            translations.fix_side_input_pcoll_coders,
            *([] if is_durable else [translations.pack_combiners]),
            _lift_combiners,
            translations.expand_sdf,
            lambda stages, _: _as_roots(stages, roots),  # again, for the parts of combiners and splittable steps
            _readers_of_streams_as_roots,
            _expand_moves,
            _expand_test_streams,
            translations.expand_gbk,
            _free_flattens,
            translations.sink_flattens,
            translations.greedily_fuse,
            translations.read_to_impulse,
            translations.impulse_to_input,
            lambda stages, _: _read_shared_buffers_directly(stages, aliases),
            lambda stages, _: _write_past_relays(stages, aliases, roots),
            translations.add_impulse_to_dangling_transforms,
            translations.setup_timer_mapping,
            translations.populate_data_channel_coders,
        ],
        known_runner_urns=_RUNNER_URNS,
        # Workers can read a large group's values piece by piece.
        use_state_iterables=True,
        is_drain=is_drain,
    )
    return context, stages, aliases


def _combine_after_grouping(components: beam_runner_api_pb2.Components) -> None:
    """Let a Combine over unbounded input group first if its panes have the earliest timestamp of their elements.

    A pane's timestamp leaves out elements that were behind the watermark when they arrived. Elements that are combined
    before they are grouped have one timestamp together, so one that is behind takes the others with it. Without its
    URN, a Combine is what it is made of: a GroupByKey and a step that combines the values of each group.
    """
    for transform in components.transforms.values():
        if transform.spec.urn != common_urns.composites.COMBINE_PER_KEY.urn or not transform.subtransforms:
            continue
        source = translations.only_element(list(transform.inputs.values()))
        windowing = components.windowing_strategies[components.pcollections[source].windowing_strategy_id]
        if (
            may_never_end(source, components)
            and windowing.output_time == beam_runner_api_pb2.OutputTime.EARLIEST_IN_PANE
        ):
            transform.spec.Clear()


def _lift_combiners(
    stages: Iterable[translations.Stage], context: translations.TransformContext
) -> Iterator[translations.Stage]:
    """Combine before the grouping where Beam does, and with a trigger ``AfterWatermark`` that has only one part, too.

    Beam takes an early or late trigger that is missing for one that must see every element.
    """
    strategies = context.components.windowing_strategies
    triggers = {strategy_id: copy.deepcopy(strategy.trigger) for strategy_id, strategy in strategies.items()}
    for strategy in strategies.values():
        if strategy.trigger.HasField("after_end_of_window"):
            at_end = strategy.trigger.after_end_of_window
            for part in ("early_firings", "late_firings"):
                if not at_end.HasField(part):
                    getattr(at_end, part).never.SetInParent()
    lifted = list(translations.lift_combiners(list(stages), context))
    for strategy_id, trigger in triggers.items():
        strategies[strategy_id].trigger.CopyFrom(trigger)
    yield from lifted


def _as_roots(stages: Iterable[translations.Stage], names: Collection[str]) -> Iterator[translations.Stage]:
    for stage in stages:
        stage.forced_root |= any(transform.unique_name in names for transform in stage.transforms)
        yield stage


def _readers_of_streams_as_roots(
    stages: Iterable[translations.Stage], context: translations.TransformContext
) -> Iterator[translations.Stage]:
    """Let each step with an unbounded side input start a stage: its elements wait there, each for its own window."""
    for stage in stages:
        stage.forced_root |= any(
            may_never_end(transform.inputs[tag], context.components)
            for transform in stage.transforms
            if transform.spec.urn in translations.PAR_DO_URNS
            for tag in beam_runner_api_pb2.ParDoPayload.FromString(transform.spec.payload).side_inputs
        )
        yield stage


def _expand_moves(
    stages: Iterable[translations.Stage], context: translations.TransformContext
) -> Iterator[translations.Stage]:
    """Replace each Reshuffle by a write to and a read from one buffer, in the environments of its neighbours."""
    for stage in stages:
        transform = translations.only_transform(stage.transforms)
        if transform.spec.urn in MOVE_URNS:
            yield from _expand_move(stage, transform, context)
        else:
            yield stage


def _expand_move(
    stage: translations.Stage,
    transform: beam_runner_api_pb2.PTransform,
    context: translations.TransformContext,
) -> Iterator[translations.Stage]:
    pcollections = context.components.pcollections
    output = translations.only_element(transform.outputs.values())
    # expand_sdf gives the Reshuffle before an SDF the SDF's side inputs as well; only the main input moves.
    main = [p for p in transform.inputs.values() if pcollections[p].coder_id == pcollections[output].coder_id]
    source = main[0] if main else next(iter(transform.inputs.values()))
    name = transform.unique_name
    if not main:
        transcoded = translations.unique_name(pcollections, source + "_transcoded")
        pcollections[transcoded].CopyFrom(pcollections[source])
        pcollections[transcoded].coder_id = pcollections[output].coder_id
        identity = beam_runner_api_pb2.PTransform(
            unique_name=f"{name}/Transcode",
            inputs={"in": source},
            outputs={"out": transcoded},
            spec=beam_runner_api_pb2.FunctionSpec(urn=_FLATTEN_URN),
        )
        yield translations.Stage(
            f"{name}/Transcode",
            [identity],
            downstream_side_inputs=stage.downstream_side_inputs,
            must_follow=stage.must_follow,
        )
        source = transcoded
    context.length_prefix_pcoll_coders(source)
    context.length_prefix_pcoll_coders(output)
    # Not named after its PCollection: fusion would use that name for a buffer of its own.
    buffer_id = translations.create_buffer_id(name)
    write = translations.Stage(
        f"{name}/Write",
        [
            beam_runner_api_pb2.PTransform(
                unique_name=f"{name}/Write",
                inputs={"in": source},
                spec=beam_runner_api_pb2.FunctionSpec(urn=bundle_processor.DATA_OUTPUT_URN, payload=buffer_id),
            )
        ],
        downstream_side_inputs=frozenset(),
        must_follow=stage.must_follow,
    )
    yield write
    yield translations.Stage(
        f"{name}/Read",
        [
            beam_runner_api_pb2.PTransform(
                unique_name=f"{name}/Read",
                outputs={"out": output},
                spec=beam_runner_api_pb2.FunctionSpec(urn=bundle_processor.DATA_INPUT_URN, payload=buffer_id),
            )
        ],
        downstream_side_inputs=stage.downstream_side_inputs,
        must_follow=translations.union(frozenset([write]), stage.must_follow),
    )


def _expand_test_streams(
    stages: Iterable[translations.Stage], context: translations.TransformContext
) -> Iterator[translations.Stage]:
    """Replace each TestStream by a read from a buffer for each of its outputs."""
    for stage in stages:
        transform = translations.only_transform(stage.transforms)
        if transform.spec.urn != _TEST_STREAM_URN:
            yield stage
            continue
        for tag, output in transform.outputs.items():
            context.length_prefix_pcoll_coders(output)
            name = f"{transform.unique_name}/{tag}"
            read = beam_runner_api_pb2.PTransform(
                unique_name=name,
                outputs={"out": output},
                spec=beam_runner_api_pb2.FunctionSpec(
                    urn=bundle_processor.DATA_INPUT_URN, payload=test_stream_buffer_id(transform.unique_name, tag)
                ),
            )
            yield translations.Stage(
                name, [read], downstream_side_inputs=stage.downstream_side_inputs, must_follow=stage.must_follow
            )


def test_stream_buffer_id(name: str, tag: str) -> bytes:
    """Return the id of the buffer for an output of the TestStream with this name."""
    return translations.create_buffer_id(f"{name}/{tag}")


def _free_flattens(
    stages: Iterable[translations.Stage], context: translations.TransformContext
) -> Iterator[translations.Stage]:
    """Let each producer write a Flatten's input in its own environment; a stage for the Flatten would only copy."""
    for stage in stages:
        transform = translations.only_transform(stage.transforms)
        if transform.spec.urn == _FLATTEN_URN and len(transform.inputs) > 1:
            transform.environment_id = ""
            stage.environment = None
        yield stage


def _read_shared_buffers_directly(
    stages: Iterable[translations.Stage], aliases: dict[bytes, bytes]
) -> list[translations.Stage]:
    """Let every consumer of a buffer read it, instead of having the first one copy it for the others.

    Fusion gives a buffer's read to one consumer, and lets that stage write what it read for the others. If the written
    PCollection is the one that was read, drop the write, and let its readers read the first buffer.
    """
    stages = list(stages)
    writers: dict[bytes, int] = {}
    for stage in stages:
        for transform in stage.transforms:
            if transform.spec.urn == bundle_processor.DATA_OUTPUT_URN:
                writers[transform.spec.payload] = writers.get(transform.spec.payload, 0) + 1
    for stage in stages:
        read_from = {
            translations.only_element(t.outputs.values()): t.spec.payload
            for t in stage.transforms
            if t.spec.urn == bundle_processor.DATA_INPUT_URN and t.spec.payload != translations.IMPULSE_BUFFER
        }
        kept: list[beam_runner_api_pb2.PTransform] = []
        for transform in stage.transforms:
            written = transform.spec.payload
            if (
                transform.spec.urn == bundle_processor.DATA_OUTPUT_URN
                and not written.startswith(b"group:")
                and (pcollection := next(iter(transform.inputs.values()))) in read_from
                and writers[written] == 1
            ):
                aliases[written] = read_from[pcollection]
            else:
                kept.append(transform)
        stage.transforms[:] = kept
    for stage in stages:
        for transform in stage.transforms:
            if transform.spec.urn == bundle_processor.DATA_INPUT_URN:
                transform.spec.payload = resolve_alias(aliases, transform.spec.payload)
    return [s for s in stages if any(t.spec.urn != bundle_processor.DATA_INPUT_URN for t in s.transforms)]


def _write_past_relays(
    stages: Iterable[translations.Stage], aliases: dict[bytes, bytes], roots: Collection[str]
) -> list[translations.Stage]:
    """Remove stages that only copy one buffer into another, as a Flatten before a GroupByKey does.

    Those before a step in ``roots`` stay.
    """
    stages = list(stages)
    side_inputs = {resolve_alias(aliases, translations.create_buffer_id(p)) for s in stages for p in s.side_inputs()}
    for relay in list(stages):
        source = _only_copies(relay)
        if source is None or source in side_inputs:
            continue
        if any(t.unique_name.removesuffix("/Write") in roots for t in relay.transforms):
            continue
        uses = [(s, t) for s in stages for t in s.transforms if t.spec.payload == source]
        if not any(t.spec.urn == bundle_processor.DATA_OUTPUT_URN for _, t in uses):
            continue  # a TestStream writes it
        if sum(t.spec.urn == bundle_processor.DATA_INPUT_URN for _, t in uses) == 1:
            target = next(t.spec.payload for t in relay.transforms if t.spec.urn == bundle_processor.DATA_OUTPUT_URN)
            stages.remove(relay)
            for stage, transform in uses:
                if stage is not relay:
                    transform.spec.payload = target
    return stages


def _only_copies(stage: translations.Stage) -> bytes | None:
    """Return the buffer that ``stage`` reads if it does nothing but write it to another one."""
    if len(stage.transforms) != 2:
        return None
    read, write = sorted(stage.transforms, key=lambda t: t.spec.urn != bundle_processor.DATA_INPUT_URN)
    if (
        read.spec.urn != bundle_processor.DATA_INPUT_URN
        or write.spec.urn != bundle_processor.DATA_OUTPUT_URN
        or not read.spec.payload.startswith(b"materialize:")
        or list(read.outputs.values()) != list(write.inputs.values())
    ):
        return None
    return read.spec.payload


def resolve_alias(aliases: dict[bytes, bytes], buffer_id: bytes) -> bytes:
    """Return the buffer that is read in place of ``buffer_id``, or ``buffer_id`` itself."""
    while buffer_id in aliases:
        buffer_id = aliases[buffer_id]
    return buffer_id
