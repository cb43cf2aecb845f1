"""Bundles, the attempts to run them, and how bundles are cut."""

from __future__ import annotations

import heapq
import itertools
from collections.abc import Iterable, Iterator
from dataclasses import dataclass, field
from typing import Protocol

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.data.blocks import Block
from luminosity.engine.data.event_time import MAX
from luminosity.engine.data.live_side_input import LiveSideInput
from luminosity.engine.data.shard import Shard
from luminosity.engine.data.timers import FamilyKey
from luminosity.engine.loop.buffers import PendingOutput
from luminosity.engine.loop.stage_input import StageInput
from luminosity.engine.plan.codecs import ElementCodec, TimerRecord
from luminosity.engine.workers.sdk.bundle_report import Stall
from luminosity.errors import StepFailed

__all__ = ["Attempt", "AttemptWorker", "Bundle", "Deadlines", "Overdue", "Search", "new_instruction_id", "slice_blocks"]

_numbers = itertools.count(1)
_LEAST_STALE = 64  # deadlines, before those that no longer count are removed


def new_instruction_id(prefix: str) -> str:
    """Return an instruction id that is unique in this process."""
    return f"{prefix}{next(_numbers)}"


class AttemptWorker(Protocol):
    """What an attempt needs of the worker that runs it."""

    id: str
    writer: int  # its number among all processes that write blocks
    has_exited: bool
    warm_stages: set[str]  # ids of stages that have run here before
    cpu_seconds: float  # what its committed bundles have reported
    resident: int
    pid: int

    def instruct(self, request: beam_fn_api_pb2.InstructionRequest) -> None:
        """Send an instruction. Does not wait for the response."""
        ...

    def vacate(self, attempt: Attempt) -> None:
        """Free the slot of an attempt that has ended."""
        ...

    def cause(self, instruction_id: str) -> BaseException | None:
        """Return the exception that failed the instruction, if it was raised in this process."""
        ...


@dataclass
class Attempt:
    """One execution of a bundle in one worker, with everything that the worker has sent so far."""

    instruction_id: str
    worker: AttemptWorker
    stream_id: str
    started_at: float
    output_hold: int  # microseconds: no output is earlier
    is_warm: bool  # whether the worker has run this stage before
    open_outputs: set[str | FamilyKey]  # whose end mark has not arrived
    pending_output: PendingOutput
    deadlines: Deadlines  # of all attempts in the worker's pool
    outputs: list[tuple[str, Block]] = field(default_factory=list[tuple[str, Block]])  # transform id and block
    timers: list[tuple[FamilyKey, bytes]] = field(default_factory=list[tuple[FamilyKey, bytes]])
    response: beam_fn_api_pb2.InstructionResponse | None = None
    split_at: float = float("inf")  # when to request the next split; set by :meth:`Deadlines.set`
    is_patient: bool = False  # whether it may run to its deadline while other restrictions wait for its slot
    splits_requested: int = 0
    take_at: float = float("inf")  # from when on idle workers may take elements from the bundle
    take_wait: float = 0.0  # how long they wait after the next request
    # Instruction ids of split requests without a response, and whether each is for an idle worker.
    pending_splits: dict[str, bool] = field(default_factory=dict[str, bool])
    # What is left after splits took from the bundle: how many elements of each read, and the primary parts of the last
    # of them, if that was cut.
    ends: dict[str, int] = field(default_factory=dict[str, int])
    primary_roots: dict[str, list[bytes]] = field(default_factory=dict[str, list[bytes]])
    # What splits took from a source's restriction. It waits for the end of the bundle, which may still read the source.
    residuals: list[beam_fn_api_pb2.DelayedBundleApplication] = field(
        default_factory=list[beam_fn_api_pb2.DelayedBundleApplication]
    )
    # The versions of unbounded side inputs that the bundle reads.
    side_versions: dict[LiveSideInput, int] = field(default_factory=dict[LiveSideInput, int])
    stall: Stall | None = None  # that it takes long, and what is known about it
    memory: int = 0  # bytes that the bundle may group in, which count as held while it runs
    given_back: int = 0  # whole elements that splits took
    given_back_size: float = 0.0  # the size of the work that splits took, if the stage is splittable

    def is_complete(self) -> bool:
        """Return whether everything has arrived. Responses to splits count: they may come after the bundle's own."""
        if self.response is None or self.pending_splits:
            return False
        return bool(self.response.error) or not self.open_outputs

    def drop_outputs(self) -> None:
        """Release all blocks that the worker has sent."""
        for _, block in self.outputs:
            block.release()
        self.outputs.clear()


@dataclass
class Search:
    """The search for the element of a failed bundle that fails alone."""

    error: StepFailed  # ends the run if no part fails
    attempts: int  # how often the whole bundle was attempted
    parts: int = 1  # parts of the bundle that are not committed yet


@dataclass(eq=False)
class Bundle:
    """Elements and timers that a worker processes and commits as one transaction.

    Owns its input blocks until it is committed or cut.
    """

    stage: StageInput
    shards: tuple[Shard, ...]  # all whose keys the bundle may have; in a stage without state, the only one
    inputs: dict[str, list[Block]]  # by read id
    timers: dict[FamilyKey, list[TimerRecord]] = field(default_factory=dict[FamilyKey, list[TimerRecord]])
    failures: int = 0  # attempts in which user code raised
    exits: int = 0  # workers that exited while they ran this bundle alone, once it could not be halved
    is_suspect: bool = False  # its worker exited while other bundles ran there: it must run in an idle worker
    attempt: Attempt | None = None
    search: Search | None = None
    passes_by: bool = False  # whether elements at which a step fails become dead letters
    count: int = field(init=False)  # elements
    hold: int = field(init=False)  # the earliest timestamp, in microseconds, that the bundle's output may have

    def __post_init__(self) -> None:
        self.set_inputs(self.inputs)

    def set_inputs(self, inputs: dict[str, list[Block]]) -> None:
        """Give the bundle other input. Does not release what it had."""
        self.inputs = inputs
        blocks = list(self._blocks())
        self.count = sum([block.count for block in blocks])
        self.hold = min([block.hold for block in blocks]) if blocks else self.timer_hold

    @property
    def left(self) -> int:
        """The number of elements without those that splits took from the attempt that runs."""
        return self.count - (self.attempt.given_back if self.attempt is not None else 0)

    @property
    def pieces(self) -> int:
        """The number of elements and timers, which is the number of bundles that this one could be cut into."""
        if self.stage.plan.partitions:
            return 1  # a partition is grouped whole
        return self.count + sum(len(timers) for timers in self.timers.values())

    @property
    def timer_hold(self) -> int:
        """The earliest timestamp that the output of the bundle's timers may have."""
        return min((t.hold_micros for timers in self.timers.values() for t in timers), default=MAX)

    def hold_watermark(self) -> None:
        """Let the stage's watermark wait for the bundle."""
        (self.stage.running_holds if self.inputs else self.stage.running_timer_holds).add(self.hold)

    def _free_watermark(self) -> None:
        (self.stage.running_holds if self.inputs else self.stage.running_timer_holds).remove(self.hold)

    def finished(self) -> None:
        """Note that the bundle is committed or replaced by others."""
        for shard in self.shards:
            shard.running -= 1
        self._free_watermark()

    def replace_inputs(self, inputs: dict[str, list[Block]]) -> None:
        """Give the bundle other input, after its worker has ended. Releases the input that it had."""
        self._free_watermark()
        self.release()
        self.set_inputs(inputs)
        self.hold_watermark()

    def split_at(self, at: float) -> None:
        """Ask the attempt that runs to split at this time, and no longer at the time that was set before."""
        assert self.attempt is not None
        self.attempt.deadlines.set(self, self.attempt, at)

    def _blocks(self) -> Iterator[Block]:
        return (block for blocks in self.inputs.values() for block in blocks)

    def pin(self) -> None:
        """Keep the input where it is while a worker reads it."""
        for block in self._blocks():
            block.pin()

    def unpin(self) -> None:
        """Undo one :meth:`pin`."""
        for block in self._blocks():
            block.unpin()

    def release(self) -> None:
        """Release the input blocks."""
        for block in self._blocks():
            block.release()

    def kept_inputs(self, attempt: Attempt) -> dict[str, list[Block]]:
        """Return new references to the input that is left after the attempt's splits.

        What they took from a source's restriction is not queued before the bundle is committed, so it is left, too.
        """
        kept: dict[str, list[Block]] = {}
        for read_id, blocks in self.inputs.items():
            total = sum(block.count for block in blocks)
            roots = [] if attempt.residuals else attempt.primary_roots.get(read_id, [])
            end = attempt.ends.get(read_id, total) - bool(roots)
            parts = slice_blocks(blocks, self.stage.codec(read_id), 0, end)
            parts += [self.stage.blocks.of_bytes(root, 1, self.hold) for root in roots]
            if parts:
                kept[read_id] = parts
        return kept

    def halves(self) -> list[Bundle]:
        """Cut this bundle into two, which take over its input. Returns only itself if it has a single piece."""
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
            Bundle(self.stage, self.shards, first, self.timers, self.failures),
            Bundle(self.stage, self.shards, second, {}, self.failures),
        ]

    def without_element(self, read_id: str, index: int) -> tuple[list[Bundle], Bundle]:
        """Cut out one element. Return the bundles that take over the input, and which of them has that element alone.

        The others go first, unless they could have the same key and come after the element: keys stay in order. Timers
        stay with the others.
        """
        if self.pieces < 2:
            return [self], self
        others: dict[str, list[Block]] = {}
        after: dict[str, list[Block]] = {}
        alone: dict[str, list[Block]] = {}
        for each, blocks in self.inputs.items():
            codec, total = self.stage.codec(each), sum(block.count for block in blocks)
            end = index if each == read_id else total
            before = slice_blocks(blocks, codec, 0, end)
            behind = slice_blocks(blocks, codec, end + 1, total)
            if each == read_id:
                alone[each] = slice_blocks(blocks, codec, index, index + 1)
            if behind and self.shards[0].is_exclusive:
                after[each] = behind
            else:
                before += behind
            if before:
                others[each] = before
        self.release()
        bundle = Bundle(self.stage, self.shards, alone, {}, self.failures)
        parts = [
            Bundle(self.stage, self.shards, others, self.timers, self.failures),
            bundle,
            Bundle(self.stage, self.shards, after, {}, self.failures),
        ]
        return [part for part in parts if part.pieces], bundle

    def _halves_of_timers(self) -> list[Bundle]:
        due = [(family, timer) for family, timers in self.timers.items() for timer in timers]
        halves: list[Bundle] = []
        for part in (due[: len(due) // 2], due[len(due) // 2 :]):
            timers: dict[FamilyKey, list[TimerRecord]] = {}
            for family, timer in part:
                timers.setdefault(family, []).append(timer)
            halves.append(Bundle(self.stage, self.shards, {}, timers, self.failures))
        return halves


@dataclass(frozen=True)
class Overdue:
    """A bundle whose worker is ended, because an element took longer than ``--element_timeout``."""

    bundle: Bundle
    stall: Stall
    place: tuple[str, int] | None  # of the element: its read, and the place there; None if unknown


class Deadlines:
    """When to ask running bundles to split, the earliest first. With hundreds of workers, a look at each takes long.

    A deadline no longer counts if its attempt has another one by now, has responded or was given up.
    """

    def __init__(self) -> None:
        self._heap: list[tuple[float, int, Bundle, Attempt]] = []
        self._numbers = itertools.count()  # attempts can't be compared
        self._most = _LEAST_STALE

    def set(self, bundle: Bundle, attempt: Attempt, at: float) -> None:
        """Let the attempt be asked at this time, and no longer at the time that was set before."""
        attempt.split_at = at
        heapq.heappush(self._heap, (at, next(self._numbers), bundle, attempt))
        if len(self._heap) > self._most:
            self._heap = [entry for entry in self._heap if _counts(entry)]
            heapq.heapify(self._heap)
            self._most = max(_LEAST_STALE, 2 * len(self._heap))

    def next(self) -> float:
        """Return the earliest time."""
        while self._heap and not _counts(self._heap[0]):
            heapq.heappop(self._heap)
        return self._heap[0][0] if self._heap else float("inf")

    def take_due(self, now: float) -> Iterator[tuple[Bundle, Attempt]]:
        """Remove and yield the bundles whose time has come."""
        while self.next() <= now:
            _, _, bundle, attempt = heapq.heappop(self._heap)
            yield bundle, attempt


def _counts(entry: tuple[float, int, Bundle, Attempt]) -> bool:
    at, _, bundle, attempt = entry
    return attempt.split_at == at and attempt.response is None and bundle.attempt is attempt


def slice_blocks(blocks: Iterable[Block], codec: ElementCodec, start: int, stop: int) -> list[Block]:
    """Return new references to the elements from ``start`` up to ``stop`` of ``blocks``, counted across blocks."""
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
