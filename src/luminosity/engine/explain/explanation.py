"""A plan in words, for people: what ``lum plan`` prints and draws."""

from __future__ import annotations

from dataclasses import dataclass
from enum import Enum

from luminosity.engine.resources.machine import Machine
from luminosity.engine.resources.pools import Pool


class ReasonKind(Enum):
    GROUP = "group"
    COMBINE = "combine"
    MOVE = "move"
    PARTS = "parts"
    FLATTEN = "flatten"
    RESOURCES = "resources"
    STATE = "state"
    WAIT = "wait"
    SIDE_INPUT = "side input"


@dataclass(frozen=True)
class Reason:
    """Why elements are handed from one stage to another instead of going on in the same worker."""

    kind: ReasonKind
    short: str  # a few words, for a drawing
    text: str


@dataclass(frozen=True)
class Break:
    """A place where fusion breaks: what these stages write lies in a buffer until another one reads it."""

    buffer_id: bytes
    writers: tuple[int, ...]  # numbers of stages
    reader: int | None  # None: nothing reads it
    from_steps: tuple[str, ...]
    to_steps: tuple[str, ...]
    reasons: tuple[Reason, ...]  # each of them alone would be enough
    is_side_input: bool
    inside: str  # the step of Beam's whose inner matter it is; empty where it is the author's

    @property
    def short(self) -> str:
        return " · ".join(dict.fromkeys(reason.short for reason in self.reasons))


@dataclass(frozen=True)
class Step:
    """The author's step, or what of it runs in one stage."""

    name: str
    part: str  # which part; empty where all of it runs here
    transforms: tuple[str, ...]  # full names of what Beam made of it


@dataclass(frozen=True)
class ExplainedStage:
    number: int
    label: str
    pool: Pool
    max_active_bundles: int
    asks_for: str  # its resource hints
    is_source: bool
    steps: tuple[Step, ...]


@dataclass(frozen=True)
class Explanation:
    """Everything about a plan that a reader may want to know."""

    machine: Machine
    pools: tuple[Pool, ...]
    stages: tuple[ExplainedStage, ...]
    breaks: tuple[Break, ...]
    absorbed: tuple[str, ...]  # steps that need neither a stage nor a break: a Reshuffle after a GroupByKey

    def sources(self, stage: ExplainedStage) -> tuple[list[int], list[int]]:
        """The stages whose output it reads: as its main input, and as side inputs."""
        breaks = [b for b in self.breaks if b.reader == stage.number]
        main = {writer for b in breaks if not b.is_side_input for writer in b.writers}
        side = {writer for b in breaks if b.is_side_input for writer in b.writers}
        return sorted(main), sorted(side)

    def readers(self, stage: ExplainedStage) -> list[int]:
        """The stages that read its output."""
        return sorted({b.reader for b in self.breaks if stage.number in b.writers and b.reader is not None})
