"""A bundle: what it takes, what one attempt at it has given so far, and how it is cut."""

from __future__ import annotations

import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import TYPE_CHECKING

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.data.blocks import Block
from luminosity.engine.data.timers import FamilyKey
from luminosity.engine.data.watermarks import MAX
from luminosity.engine.plan.codecs import ElementCodec, TimerRecord
from luminosity.errors import StepFailed

if TYPE_CHECKING:
    from luminosity.engine.loop.buffers import PendingOutput
    from luminosity.engine.loop.shard import Shard
    from luminosity.engine.loop.stage import StageRun
    from luminosity.engine.loop.workers import Worker

_numbers = itertools.count(1)


def new_instruction_id(prefix: str) -> str:
    return f"{prefix}{next(_numbers)}"


@dataclass
class Attempt:
    """One try at a bundle, on one worker."""

    instruction_id: str
    worker: Worker
    stream_id: str
    started_at: float
    output_hold: int  # nothing it outputs is earlier
    is_warm: bool  # the worker has run this stage before
    open_outputs: set[str | FamilyKey]
    pending_output: PendingOutput
    outputs: list[tuple[str, Block]] = field(default_factory=list[tuple[str, Block]])
    timers: list[tuple[FamilyKey, bytes]] = field(default_factory=list[tuple[FamilyKey, bytes]])
    response: beam_fn_api_pb2.InstructionResponse | None = None
    # Splits: those that were asked for and not answered, and what the answers took away.
    split_at: float = float("inf")
    splits_requested: int = 0
    pending_splits: set[str] = field(default_factory=set[str])
    ends: dict[str, int] = field(default_factory=dict[str, int])  # read → elements of it that are left
    residual_ranges: list[tuple[str, int, int]] = field(default_factory=list[tuple[str, int, int]])
    residual_roots: list[beam_fn_api_pb2.DelayedBundleApplication] = field(
        default_factory=list[beam_fn_api_pb2.DelayedBundleApplication]
    )

    def is_complete(self) -> bool:
        """Everything is here. A split's answer may come after the bundle's, and belongs to it."""
        if self.response is None or self.pending_splits:
            return False
        return bool(self.response.error) or not self.open_outputs

    def drop_outputs(self) -> None:
        for _, block in self.outputs:
            block.release()
        self.outputs.clear()


@dataclass
class Search:
    """What is tried in place of a bundle that failed, to find what fails alone."""

    error: StepFailed  # ends the run if none of it fails
    parts: int  # not committed yet


@dataclass(eq=False)
class Bundle:
    """Input that is taken together, until it is committed or the run ends."""

    stage: StageRun
    shard: Shard
    inputs: dict[str, list[Block]]
    timers: dict[FamilyKey, list[TimerRecord]] = field(default_factory=dict[FamilyKey, list[TimerRecord]])
    failures: int = 0  # user exceptions
    deaths: int = 0  # workers lost with this bundle alone in them and nothing left to halve
    is_suspect: bool = False  # its worker was lost while others ran there, too: it is tried alone
    attempt: Attempt | None = None
    search: Search | None = None

    @property
    def count(self) -> int:
        return sum(block.count for block in self._blocks())

    @property
    def pieces(self) -> int:
        """What it can be cut into: elements and timers."""
        return self.count + sum(len(timers) for timers in self.timers.values())

    @property
    def hold(self) -> int:
        return min((block.hold for block in self._blocks()), default=self.timer_hold)

    @property
    def timer_hold(self) -> int:
        return min((t.hold_micros for timers in self.timers.values() for t in timers), default=MAX)

    def _blocks(self) -> Iterator[Block]:
        return (block for blocks in self.inputs.values() for block in blocks)

    def pin(self) -> None:
        for block in self._blocks():
            block.pin()

    def unpin(self) -> None:
        for block in self._blocks():
            block.unpin()

    def release(self) -> None:
        for block in self._blocks():
            block.release()

    def halves(self) -> list[Bundle]:
        """Two bundles in place of this one, or just this one where it has a single element or timer."""
        if self.pieces < 2:
            return [self]
        if not self.inputs:
            return self._halves_of_timers()
        half = self.count // 2
        first: dict[str, list[Block]] = {}
        second: dict[str, list[Block]] = {}
        for read_id, blocks in self.inputs.items():
            codec = self.stage.codec(read_id)
            total = sum(b.count for b in blocks)
            taken = min(half, total)
            half -= taken
            if head := slice_blocks(blocks, codec, 0, taken):
                first[read_id] = head
            if tail := slice_blocks(blocks, codec, taken, total):
                second[read_id] = tail
        self.release()
        return [
            Bundle(self.stage, self.shard, first, self.timers, self.failures),
            Bundle(self.stage, self.shard, second, {}, self.failures),
        ]

    def _halves_of_timers(self) -> list[Bundle]:
        due = [(family, timer) for family, timers in self.timers.items() for timer in timers]
        halves: list[Bundle] = []
        for part in (due[: len(due) // 2], due[len(due) // 2 :]):
            timers: dict[FamilyKey, list[TimerRecord]] = {}
            for family, timer in part:
                timers.setdefault(family, []).append(timer)
            halves.append(Bundle(self.stage, self.shard, {}, timers, self.failures))
        return halves


def slice_blocks(blocks: Iterable[Block], codec: ElementCodec, start: int, stop: int) -> list[Block]:
    """New references to the elements ``start`` up to ``stop`` of ``blocks`` laid end to end."""
    taken: list[Block] = []
    position = 0
    for block in blocks:
        first, last = max(start - position, 0), min(stop - position, block.count)
        position += block.count
        if first >= last:
            continue
        part = block.share()
        if first:
            before, part = part.cut(codec, first)
            before.release()
        if last - first < part.count:
            part, after = part.cut(codec, last - first)
            after.release()
        taken.append(part)
    return taken
