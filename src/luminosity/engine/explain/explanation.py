"""The explanation of a plan, as data: what ``lum plan`` prints and draws, with steps as their author named them."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from apache_beam.portability import common_urns
from apache_beam.portability.api import beam_runner_api_pb2

from luminosity.engine.plan.translate import MOVE_URNS
from luminosity.engine.resources.machine import Machine
from luminosity.engine.resources.pools import Pool
from luminosity.events import ModelVersion

__all__ = ["Break", "ExplainedStage", "Explanation", "Outline", "Reason", "ReasonKind", "Step"]

_FLATTEN_URN = common_urns.primitives.FLATTEN.urn
_MOVES = MOVE_URNS | {_FLATTEN_URN}
_BEAMS_OWN = b"apache_beam."
# The class that @beam.ptransform_fn makes; the function inside is nearly always the user's.
_WRAPPED_FUNCTION = b"apache_beam.transforms.ptransform._PTransformFnPTransform"


class ReasonKind(Enum):
    """The kinds of reasons for a break."""

    GROUP = "group"
    COMBINE = "combine"
    MOVE = "move"
    PARTS = "parts"
    FLATTEN = "flatten"
    RESOURCES = "resources"
    STATE = "state"
    FILES = "files"
    WAIT = "wait"
    SIDE_INPUT = "side input"


@dataclass(frozen=True)
class Reason:
    """The reason why elements go through a buffer to another stage instead of staying in the same worker."""

    kind: ReasonKind
    short: str  # a few words, for a drawing
    text: str


@dataclass(frozen=True)
class Break:
    """A place where fusion breaks: a buffer that some stages write and another one reads."""

    buffer_id: bytes
    writers: tuple[int, ...]  # numbers of stages
    reader: int | None  # number of a stage; None if nothing reads it
    from_steps: tuple[str, ...]
    to_steps: tuple[str, ...]
    reasons: tuple[Reason, ...]  # each of them would be enough
    is_side_input: bool
    inside: str  # the step of Beam's that contains both stages; empty otherwise

    @property
    def short(self) -> str:
        """The reasons in a few words, for a drawing."""
        return " · ".join(dict.fromkeys(reason.short for reason in self.reasons))


@dataclass(frozen=True)
class Step:
    """A step of the author, or the part of it that runs in one stage."""

    name: str
    part: str  # the name of the part; empty if the whole step runs here
    transforms: tuple[str, ...]  # full names of the transforms that Beam made of it


@dataclass(frozen=True)
class ExplainedStage:
    """A stage with its steps, its pool and its resource hints."""

    number: int
    label: str
    pool: Pool
    max_active_bundles: int
    asks_for: str  # its resource hints
    is_source: bool
    steps: tuple[Step, ...]
    is_stream: bool = False  # whether its input may never end


@dataclass(frozen=True)
class Explanation:
    """A plan with everything that ``lum plan`` shows."""

    machine: Machine
    pools: tuple[Pool, ...]
    stages: tuple[ExplainedStage, ...]
    breaks: tuple[Break, ...]
    models: tuple[ModelVersion, ...]  # versions that registries name now
    absorbed: tuple[str, ...]  # steps without a stage or a break of their own, such as a Reshuffle after a GroupByKey

    @property
    def streams(self) -> tuple[int, ...]:
        """The numbers of the stages whose input may never end."""
        return tuple(stage.number for stage in self.stages if stage.is_stream)

    def sources(self, stage: ExplainedStage) -> tuple[list[int], list[int]]:
        """Return the numbers of the stages that ``stage`` reads: as its main input, and as side inputs."""
        breaks = [b for b in self.breaks if b.reader == stage.number]
        main = {writer for b in breaks if not b.is_side_input for writer in b.writers}
        side = {writer for b in breaks if b.is_side_input for writer in b.writers}
        return sorted(main), sorted(side)

    def readers(self, stage: ExplainedStage) -> list[int]:
        """Return the numbers of the stages that read the output of ``stage``."""
        return sorted({b.reader for b in self.breaks if stage.number in b.writers and b.reader is not None})


class Outline:
    """Finds the author's step for each transform, including transforms that the planner made.

    A transform inside one of Beam's own transforms belongs to that step. A transform inside the user's own composite
    is a step itself. With ``is_full``, every transform counts as a step.
    """

    def __init__(self, pipeline: beam_runner_api_pb2.Pipeline, *, is_full: bool = False) -> None:
        self.is_full = is_full
        self._transforms = pipeline.components.transforms
        self._steps: dict[str, str] = {}  # unique name of a transform: unique name of the author's step
        self._positions: dict[str, int] = {}
        self._urns: dict[str, str] = {}
        self._producers: dict[str, str] = {}
        for root in pipeline.root_transform_ids:
            self._add(root, "")

    def step(self, name: str) -> str:
        """Return the author's step that transform ``name`` belongs to, or the name's first part if unknown."""
        if self.is_full:
            return name
        return self._steps.get(self._known(name), name.split("/", 1)[0])

    def position(self, name: str) -> int:
        """Return the transform's position in the author's program; unknown transforms come last."""
        return self._positions.get(self._known(name), len(self._positions))

    def urn(self, name: str) -> str:
        """Return the URN of transform ``name`` in the author's program, or an empty string if it isn't there."""
        return self._urns.get(name, "")

    def movers(self) -> list[str]:
        """Return the author's steps that only move elements."""
        return [name for name, urn in self._urns.items() if urn in _MOVES and self._steps.get(name) == name]

    def producer(self, pcollection_id: str) -> str:
        """Return the transform that makes a PCollection of the author's program, or an empty string."""
        return self._producers.get(pcollection_id, "")

    def is_recoding(self, transform: beam_runner_api_pb2.PTransform) -> bool:
        """Return whether the planner added it to give the inputs of a Flatten or a Reshuffle one encoding."""
        return transform.spec.urn == _FLATTEN_URN and transform.unique_name not in self._urns

    def _add(self, transform_id: str, step: str) -> None:
        transform = self._transforms[transform_id]
        name = transform.unique_name
        if not step and not (transform.subtransforms and _is_users(transform)):
            step = name
        self._positions[name] = len(self._positions)
        self._urns[name] = transform.spec.urn
        if step:
            self._steps[name] = step
        for child in transform.subtransforms:
            self._add(child, step)
        if not transform.subtransforms:
            made = set(transform.outputs.values()) - set(transform.inputs.values())  # some pass their input on
            self._producers |= dict.fromkeys(made, name)

    def _known(self, name: str) -> str:
        """Return the nearest transform around ``name`` that is in the author's program."""
        while name and name not in self._positions:
            name = name.rpartition("/")[0]
        return name


def _is_users(transform: beam_runner_api_pb2.PTransform) -> bool:
    python_type = transform.annotations.get("python_type", b"")
    return python_type == _WRAPPED_FUNCTION or not python_type.startswith(_BEAMS_OWN)
