"""The steps of a translated pipeline: container, resource hints and names in their code; and what checks find there."""

from __future__ import annotations

import base64
import binascii
import bz2
import pickletools
import sys
import zlib
from collections.abc import Collection, Iterable, Iterator, Mapping
from dataclasses import dataclass

from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2

from luminosity._shared.accelerators import read_accelerators
from luminosity.core import ACCELERATORS
from luminosity.engine.resources.hints import describe_hints

__all__ = ["Finding", "Step", "error", "name_steps", "read_steps", "warning"]

_PAR_DO = common_urns.primitives.PAR_DO.urn
_COMBINES = frozenset(
    [
        common_urns.composites.COMBINE_PER_KEY.urn,
        common_urns.composites.COMBINE_GLOBALLY.urn,
        *(each.urn for each in vars(common_urns.combine_components).values() if hasattr(each, "urn")),
    ]
)


@dataclass(frozen=True)
class Step:
    """A transform that workers run."""

    name: str  # with the names of the transforms that it is part of
    environment: str  # the id of its environment: steps with the same one can be fused
    image: str  # the container; empty if the environment is none
    hints: Mapping[str, bytes]  # by URN
    asks_for: str  # the hints in words
    texts: frozenset[str]  # all texts in the pickled code and its values
    annotations: Mapping[str, bytes]

    @property
    def accelerators(self) -> tuple[str, ...] | None:
        """The kinds of accelerators that its models can use; None if that is unknown, or if it has no model."""
        found = self.annotations.get(ACCELERATORS)
        return None if found is None else read_accelerators(found)

    @property
    def modules(self) -> set[str]:
        """The modules, among those imported here, that the code names: workers import them."""
        return {text for text in self.texts if text in sys.modules}


def read_steps(pipeline: beam_runner_api_pb2.Pipeline) -> list[Step]:
    """Return the steps of a pipeline, in the order of their names."""
    components = pipeline.components
    found: list[Step] = []
    for transform in components.transforms.values():
        if transform.subtransforms or not transform.environment_id:
            continue
        environment = components.environments[transform.environment_id]
        is_docker = environment.urn == common_urns.environments.DOCKER.urn
        docker = beam_runner_api_pb2.DockerPayload.FromString(environment.payload) if is_docker else None
        found.append(
            Step(
                transform.unique_name,
                transform.environment_id,
                "" if docker is None else docker.container_image,
                dict(environment.resource_hints),
                describe_hints(environment),
                frozenset(_texts(_code_of(transform.spec))),
                dict(transform.annotations),
            )
        )
    return sorted(found, key=lambda step: step.name)


def name_steps(chosen: Iterable[str], every: Collection[str]) -> list[str]:
    """Return names for some of the steps: of whole transforms where all their steps are among them.

    >>> name_steps(["Read/Find", "Read/Split", "Write/Open"], ["Read/Find", "Read/Split", "Write/Open", "Write/Close"])
    ['Read', 'Write/Open']
    """
    wanted = set(chosen)
    names: dict[str, None] = {}
    for name in sorted(wanted):
        parts = name.split("/")
        prefixes = ("/".join(parts[:length]) for length in range(1, len(parts)))
        names[next((each for each in prefixes if _under(each, every) <= wanted), name)] = None
    return list(names)


def _under(prefix: str, every: Collection[str]) -> set[str]:
    return {name for name in every if name == prefix or name.startswith(f"{prefix}/")}


def _code_of(spec: beam_runner_api_pb2.FunctionSpec) -> bytes:
    """Return the pickled function of a transform, as Beam has packed it."""
    if spec.urn == _PAR_DO:
        return beam_runner_api_pb2.ParDoPayload.FromString(spec.payload).do_fn.payload
    if spec.urn in _COMBINES:
        return beam_runner_api_pb2.CombinePayload.FromString(spec.payload).combine_fn.payload
    return spec.payload


def _texts(packed: bytes) -> Iterator[str]:
    """Yield the texts in a pickle without loading it; none if this is not a pickle of Beam's.

    >>> sorted(_texts(base64.b64encode(bz2.compress(b"\\x80\\x04\\x8c\\x04here.")))), list(_texts(b"no pickle"))
    (['here'], [])
    """
    try:
        compressed = base64.b64decode(packed, validate=True)
    except binascii.Error:
        return
    raw = _unpacked(compressed)
    if raw is None:
        return
    try:
        for _, argument, _ in pickletools.genops(raw):
            if isinstance(argument, str):
                yield argument
            elif isinstance(argument, bytes | bytearray):  # a pickle in a pickle
                yield from _texts(bytes(argument))
    except ValueError:  # bytes that only look like a pickle: they name nothing that can be read
        return


def _unpacked(compressed: bytes) -> bytes | None:
    for unpack, error in ((bz2.decompress, OSError), (zlib.decompress, zlib.error)):
        try:
            return unpack(compressed)
        except (error, ValueError):
            continue
    return None


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or that has no effect, in words."""

    is_error: bool
    message: str  # what was found, and what it means on Dataflow
    fix: str
    steps: tuple[str, ...] = ()  # the full names of the steps it is about; empty for the whole job


def error(message: str, fix: str, steps: Iterable[Step | str] = ()) -> Finding:
    """Return a finding with which Dataflow refuses the job, or the job fails; ``steps`` or their names."""
    return Finding(True, message, fix, _names(steps))


def warning(message: str, fix: str, steps: Iterable[Step | str] = ()) -> Finding:
    """Return a finding about something that has no effect, or probably not the one that is wanted."""
    return Finding(False, message, fix, _names(steps))


def _names(steps: Iterable[Step | str]) -> tuple[str, ...]:
    return tuple(step if isinstance(step, str) else step.name for step in steps)
