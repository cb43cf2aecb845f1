"""The transforms of a pipeline as its author applied them, for the first event of a run."""

from __future__ import annotations

from collections.abc import Iterator
from dataclasses import replace
from typing import Literal

from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2

from luminosity.events import TransformInfo

__all__ = ["author_transforms"]

_MOST = 2_000  # transforms; a pipeline with more is told without its innermost levels
_MOVES: dict[str, Literal["reshuffle", "group", "flatten"]] = {
    common_urns.composites.RESHUFFLE.urn: "reshuffle",
    common_urns.primitives.GROUP_BY_KEY.urn: "group",
    common_urns.primitives.FLATTEN.urn: "flatten",
}
# Composites that the planner takes as a whole: what Beam makes them of runs nowhere.
_WHOLE = {common_urns.composites.RESHUFFLE.urn, common_urns.composites.COMBINE_PER_KEY.urn}


def author_transforms(pipeline: beam_runner_api_pb2.Pipeline) -> tuple[TransformInfo, ...]:
    """Return the transforms of a pipeline, given as Beam hands it over, each composite before its parts.

    >>> import apache_beam as beam
    >>> pipeline = beam.Pipeline()
    >>> _ = pipeline | "Numbers" >> beam.Create([1]) | beam.Reshuffle() | beam.Map(print)
    >>> for each in author_transforms(pipeline.to_runner_api()):
    ...     if each.inside < 0:
    ...         print(each.name, repr(each.moves))
    Numbers ''
    Reshuffle 'reshuffle'
    Map(print) ''
    """
    found = list(_walked(pipeline))
    depth = max((level for _, level, _ in found), default=0)
    while sum(level <= depth for _, level, _ in found) > _MOST and depth > 0:
        depth -= 1
    places: dict[str, int] = {}  # of each transform, or of the innermost composite around it that is told
    names: list[str] = []
    infos: list[TransformInfo] = []
    for transform, level, outer in found:
        if level > depth:
            places[transform.unique_name] = places[outer]
            continue
        places[transform.unique_name] = len(infos)
        inside = places.get(outer, -1)
        within = f"{names[inside]}/" if inside >= 0 else ""
        name = transform.unique_name
        names.append(name)
        short = name.removeprefix(within)
        infos.append(TransformInfo(short or name, inside, moves=_MOVES.get(transform.spec.urn, "")))
    return tuple(_linked([transform for transform, _, _ in found], places, infos))


def _walked(pipeline: beam_runner_api_pb2.Pipeline) -> Iterator[tuple[beam_runner_api_pb2.PTransform, int, str]]:
    """Yield each transform with its level and the name of its composite, in the author's order."""
    transforms = pipeline.components.transforms
    waiting = [(root, 0, "") for root in reversed(pipeline.root_transform_ids)]
    while waiting:
        transform_id, level, outer = waiting.pop()
        transform = transforms[transform_id]
        is_root = not outer and not transform.spec.urn and bool(transform.subtransforms)  # the whole pipeline
        if not is_root:
            outputs = {*transform.outputs.values()}
            if outputs and not transform.subtransforms and outputs <= {*transform.inputs.values()}:
                continue  # it passes its input on
            yield transform, level, outer
        if transform.spec.urn not in _WHOLE:
            inner = (level, outer) if is_root else (level + 1, transform.unique_name)
            waiting += [(child, *inner) for child in reversed(transform.subtransforms)]


def _linked(
    transforms: list[beam_runner_api_pb2.PTransform], places: dict[str, int], infos: list[TransformInfo]
) -> Iterator[TransformInfo]:
    """Yield the transforms with the places of the steps that make their inputs."""
    # Composites come first, so that of all that put out a collection the innermost one counts.
    makers = {
        pcollection: places[each.unique_name]
        for each in transforms
        for pcollection in {*each.outputs.values()} - {*each.inputs.values()}
    }
    composites = {info.inside for info in infos}
    main: list[dict[int, None]] = [{} for _ in infos]
    sides: list[dict[int, None]] = [{} for _ in infos]
    for each in transforms:
        place = places[each.unique_name]
        is_step = not each.subtransforms or each.spec.urn in _WHOLE
        if not is_step and place in composites:
            continue
        side_tags: set[str] = set()
        if each.spec.urn == common_urns.primitives.PAR_DO.urn:
            side_tags = set(beam_runner_api_pb2.ParDoPayload.FromString(each.spec.payload).side_inputs)
        for tag, pcollection in each.inputs.items():
            maker = makers.get(pcollection, place)
            if maker != place:
                (sides if tag in side_tags else main)[place][maker] = None
    for place, info in enumerate(infos):
        yield replace(info, reads_from=tuple(main[place]), side_inputs_from=tuple(sides[place]))
