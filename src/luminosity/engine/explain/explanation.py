"""The explanation of a plan, as data: what ``lum plan`` prints and draws."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from luminosity.engine.resources.machine import Machine
from luminosity.engine.resources.pools import Pool
from luminosity.events import ModelVersion

__all__ = ["Break", "ExplainedStage", "Explanation", "Reason", "ReasonKind", "Step"]


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
