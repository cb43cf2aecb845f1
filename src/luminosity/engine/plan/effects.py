"""What a pipeline reads and writes: what its transforms declare, and what Beam's own show in their display data."""

from __future__ import annotations

import json
import os
import re
from collections.abc import Iterator

from apache_beam.portability.api import beam_runner_api_pb2

from luminosity.core import MODELS, READS, WRITES
from luminosity.events import ModelVersion
from luminosity.runs.manifest.places import Effects, Place

__all__ = ["effects_of"]

_FILE_PATTERN = "file_pattern"  # the key with which Beam's sources and sinks show their files
_SINK = "Sink"  # how the names of classes of Beam's sinks end
_SHARD = re.compile(r"%\(\w+\)\d*d")  # the number of a shard in the pattern of a sink
# Transforms that neither read nor write anything outside of the pipeline.
_CLOSED = frozenset({"Create", "Impulse", "Flatten", "GroupByKey", "CombinePerKey", "CombineGlobally", "Reshuffle"}) | {
    "WindowInto",
}


def effects_of(pipeline: beam_runner_api_pb2.Pipeline, versions: tuple[ModelVersion, ...] = ()) -> Effects:
    """Return what a pipeline reads and writes, given as Beam hands it over, with its composite transforms."""
    reads: dict[Place, None] = {}
    writes: dict[Place, None] = {}
    models: dict[Place, None] = {}
    seeds: dict[str, str] = {}
    transforms = pipeline.components.transforms
    for transform in transforms.values():
        step = transform.unique_name
        reads |= dict.fromkeys(_declared(transform, READS))
        writes |= dict.fromkeys(_declared(transform, WRITES))
        for path in json.loads(transform.annotations.get(MODELS, b"[]")):
            here = os.path.abspath(path) if os.path.exists(path) else path
            models[Place(step, here, "model")] = None
        for shown in _display_data(transform):
            if shown.key == _FILE_PATTERN and shown.string_value:
                is_sink = shown.namespace.endswith(_SINK)
                path = _SHARD.sub("*", shown.string_value) if is_sink else shown.string_value
                is_local = "://" not in path
                whole = os.path.abspath(path) if is_local else path
                place = Place(_outer(step), whole, is_relative=is_local and not os.path.isabs(path))
                (writes if is_sink else reads)[place] = None
            elif "seed" in shown.key.lower() and shown.WhichOneof("value") == "int_value":
                seeds[f"{step}: {shown.key}"] = str(shown.int_value)
    for version in versions:
        models[Place(version.step, version.name, "model", version.version, version.digest)] = None
    known = {place.step for place in (*reads, *writes)}
    return Effects(
        _distinct(reads), _distinct(writes), tuple(models), tuple(_unknown(pipeline, known)), tuple(seeds.items())
    )


def _declared(transform: beam_runner_api_pb2.PTransform, annotation: str) -> Iterator[Place]:
    for fields in json.loads(transform.annotations.get(annotation, b"[]")):
        yield Place(transform.unique_name, **fields)


def _display_data(transform: beam_runner_api_pb2.PTransform) -> Iterator[beam_runner_api_pb2.LabelledPayload]:
    for shown in transform.display_data:
        yield beam_runner_api_pb2.LabelledPayload.FromString(shown.payload)


def _outer(step: str) -> str:
    """Return the transform that the user applied: Beam's sources and sinks have a ``Read`` or ``Write`` inside.

    >>> _outer("Lines/Read"), _outer("Write")
    ('Lines', 'Write')
    """
    outer, _, inner = step.rpartition("/")
    return outer if outer and inner in ("Read", "Write") else step


def _distinct(places: dict[Place, None]) -> tuple[Place, ...]:
    """Return each place once, with the outermost step: a composite shows the files of its parts, too."""
    found: dict[tuple[str, str], Place] = {}
    for place in sorted(places, key=lambda each: len(each.step)):
        found.setdefault((place.path, place.name), place)
    return tuple(found.values())


def _unknown(pipeline: beam_runner_api_pb2.Pipeline, known: set[str]) -> Iterator[str]:
    """Yield steps at the borders of the pipeline, those that read or write, of which no place is known."""
    transforms = pipeline.components.transforms
    top = [transforms[child] for root in pipeline.root_transform_ids for child in transforms[root].subtransforms]
    if not top:
        top = [transforms[root] for root in pipeline.root_transform_ids]
    consumed = {pcollection for each in top for pcollection in each.inputs.values()}
    for each in top:
        kind = each.annotations.get("python_type", b"").decode(errors="replace").rpartition(".")[2]
        is_border = not each.inputs or not consumed & {*each.outputs.values()}
        is_known = any(step == each.unique_name or step.startswith(f"{each.unique_name}/") for step in known)
        if is_border and not is_known and kind not in _CLOSED:
            yield each.unique_name
