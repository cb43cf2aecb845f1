"""The input of a stage: what is queued or waits, and the watermarks that follow from it."""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator, Sequence

from luminosity.engine.data.blocks import Block, BlockStore
from luminosity.engine.data.event_time import MAX, MIN, Holds, WindowExpiry
from luminosity.engine.data.shard import DelayedInput, Shard, cut_by_shard
from luminosity.engine.data.side_gate import Side, SideGate
from luminosity.engine.data.timers import FamilyKey
from luminosity.engine.data.world import Clock
from luminosity.engine.loop.metrics import BusyTime, StageUsage
from luminosity.engine.loop.sizing import BundleSize, Kind, SizedWork, SourceTurns
from luminosity.engine.plan.codecs import Codecs, ElementCodec, KeyedElement, TimerCodec, TimerRecord
from luminosity.engine.plan.graph import Stage
from luminosity.engine.resources.pools import Pool

__all__ = ["StageInput"]

_LOGGER = logging.getLogger(__name__)

_SHARDS_PER_SLOT = 4  # enough that slots stay busy if keys are spread unevenly
_LEAST_SHARDS = 8  # even for one slot: the fewer keys a bundle has, the fewer cells it opens and writes
_EXPIRED_AT_ONCE = 2000  # timers or cells of a shard, which take some milliseconds


class StageInput:
    """The input of a stage while a run lasts. Only the loop's thread uses it; nothing blocks.

    Holds the stage's queued and delayed input in shards until a bundle takes it, and computes the stage's watermarks.
    ``plan`` is what the planner decided. :meth:`release` drops what is left at the end.
    """

    def __init__(
        self,
        plan: Stage,
        pool_plan: Pool,
        max_active_bundles: int,
        codecs: Codecs,
        blocks: BlockStore,
        clock: Clock,
        *,
        has_test_stream: bool,
    ) -> None:
        self.id = plan.id
        self.plan = plan
        self.pool_plan = pool_plan
        self.max_active_bundles = max_active_bundles
        self.blocks = blocks
        self._monotonic = clock.monotonic
        # A stream's source has slots of its own, and one restriction in a bundle.
        self.is_source = plan.is_source and not pool_plan.device_groups
        self.is_endless = plan.has_endless_input and not plan.is_sink
        # The elements of a TestStream's event stay in one bundle, in their order, so that a test ends the same way each
        # time. Those of a key are never in two.
        self.takes_all = has_test_stream and self.is_endless and not plan.is_splittable and not plan.is_stateful
        self.takes_all |= bool(plan.partitions)  # a partition is grouped whole
        self.size = BundleSize(self._kind(), sorts=plan.sorts_its_bundle)
        if plan.sorts_blocks:
            self.size.expect_large_elements()
        self.turns = SourceTurns()
        self._codecs = {read.transform_id: codecs.elements(read.coder_id) for read in plan.reads}
        self.written_buffers = {write.transform_id: write.buffer_id for write in plan.writes}
        self.timer_codecs: dict[FamilyKey, TimerCodec] = {
            f.key: codecs.timers(f, plan.reads[0].coder_id) for f in plan.timers
        }
        self.shards = self._new_shards()
        # None if windows never expire: in the global window, or in batch.
        self.expiry = self._window_expiry(codecs) if plan.is_stateful else None
        self._processing_time = {family.key for family in plan.timers if family.is_processing_time}
        self._warned: set[FamilyKey] = set()
        self.dropped = 0  # elements that came after their windows had expired
        self.delayed = DelayedInput()
        self.running_holds = Holds()  # of input in bundles that run or will be retried
        self.running_timer_holds = Holds()
        self.feeds_queue = False  # whether other stages can process the output while this stage runs
        # Whether all bounded side inputs are complete, or all partitions.
        self.is_ready = not plan.partitions and all(side_input.is_unbounded for side_input in plan.side_inputs)
        self.gate: SideGate | None = None  # where input waits for windows of unbounded side inputs
        self._upstream_watermark = MIN
        self.input_watermark = MIN
        self.output_watermark = MIN
        self.busy = BusyTime(clock)
        self.usage = StageUsage()
        self.sized_work = SizedWork(self.codec) if plan.is_splittable else None
        self.elements_done = 0
        self.bundles_done = 0

    def _new_shards(self) -> list[Shard]:
        """Return one shard, or those over which keys are spread: a key's elements are never in two bundles at once."""
        reads = [read.transform_id for read in self.plan.reads]
        if not self.plan.is_stateful and not self.plan.partitions:
            return [Shard(reads, is_exclusive=False)]
        count = self.plan.partitions or max(
            _LEAST_SHARDS, _SHARDS_PER_SLOT * self.pool_plan.workers * self.pool_plan.slots
        )
        return [Shard(reads, is_exclusive=True, index=index) for index in range(count)]

    def _window_expiry(self, codecs: Codecs) -> WindowExpiry | None:
        (first, *_) = self.plan.reads
        (pcollection,) = next(t for t in self.plan.transforms if t.unique_name == first.transform_id).outputs.values()
        return WindowExpiry.of(pcollection, first.coder_id, codecs)

    def _kind(self) -> Kind:
        if self.plan.is_sink:
            return "source and sink" if self.is_source else "sink"
        return "source" if self.is_source else "stream" if self.is_endless else "batch"

    def codec(self, read_id: str) -> ElementCodec:
        """Return the codec of a read's elements."""
        return self._codecs[read_id]

    @property
    def queued_bytes(self) -> int:
        """The weight of the queued input in bytes."""
        return sum(shard.bytes for shard in self.shards)

    @property
    def queued(self) -> int:
        """The number of queued elements."""
        return sum(shard.count for shard in self.shards)

    def wait_for(self, sides: list[Side]) -> None:
        """Let the input wait for unbounded side inputs. Call it before the first input arrives."""
        self.gate = SideGate(sides, self._codecs, self.blocks)

    def add(self, read_id: str, block: Block) -> None:
        """Queue a block from upstream, or let it wait for side inputs. Takes over the block."""
        if self.gate is None:
            self._add(read_id, block)
            return
        for part in self.gate.admit(read_id, block, self.input_watermark):
            self._add(read_id, part)
        self.dropped += self.gate.dropped
        self.gate.dropped = 0

    def add_ready(self) -> None:
        """Queue the input that has waited for side inputs and need not wait any more."""
        if self.gate is not None:
            for read_id, block in self.gate.take_ready():
                self._add(read_id, block)

    def _add(self, read_id: str, block: Block) -> None:
        if self.sized_work is not None:
            self.sized_work.arrived(read_id, block)
        self._queue(read_id, block)

    def _queue(self, read_id: str, block: Block, *, may_have_expired: bool = True) -> None:
        """Queue a block; if there are several shards, each element in the shard of its key."""
        now = self._monotonic()
        if block.partition >= 0:
            self.shards[block.partition].append(read_id, block, now)
            return
        if len(self.shards) == 1:
            self.shards[0].append(read_id, block, now)
            return
        elements = self._in_time(read_id, block) if may_have_expired else self._keyed(read_id, block)
        for shard, part in cut_by_shard(block, elements, self.shards, self.blocks):
            shard.append(read_id, part, now)

    def _keyed(self, read_id: str, block: Block) -> Iterator[KeyedElement]:
        return self.codec(read_id).keyed_elements(block.data(), with_header=False)

    def give_back(self, shards: Sequence[Shard], read_id: str, blocks: list[Block]) -> None:
        """Queue input that a running bundle of these shards has not begun, before all others. Takes over the blocks."""
        if len(shards) == 1:
            shards[0].prepend(read_id, blocks)
            return
        for block in reversed(blocks):
            for shard, part in cut_by_shard(block, self._keyed(read_id, block), self.shards, self.blocks):
                shard.prepend(read_id, [part])

    def restore_input(self, read_id: str, block: Block, due_at: float | None) -> None:
        """Queue input that waited before a restart, or let it wait until ``due_at``. Takes over the block."""
        if self.sized_work is not None:
            self.sized_work.arrived(read_id, block)
        if due_at is not None:
            self.delayed.add(read_id, block, due_at)
        else:
            self._queue(read_id, block, may_have_expired=False)

    def _in_time(self, read_id: str, block: Block) -> Iterator[KeyedElement]:
        """Return the elements of a block, without the windows that have expired."""
        if self.expiry is None:
            return self._keyed(read_id, block)
        return self._without_expired(self.expiry, self.codec(read_id).keyed_elements(block.data()))

    def _without_expired(self, expiry: WindowExpiry, elements: Iterable[KeyedElement]) -> Iterator[KeyedElement]:
        for element, expired in expiry.kept(elements, self.input_watermark):
            self.dropped += expired
            if element.encoded:
                yield element

    def waiting_blocks(self) -> Iterator[Block]:
        """Yield the queued blocks, the last of each queue first."""
        for shard in self.shards:
            yield from shard.waiting_blocks()

    def wake_delayed(self, now: float) -> None:
        """Queue the delayed residuals that are due."""
        for read_id, block in self.delayed.take_due(now):
            self._queue(read_id, block)

    def timers_in_time(
        self, family: FamilyKey, records: Iterable[TimerRecord], *, has_input: bool
    ) -> list[TimerRecord]:
        """Return the timers that a bundle set, without those that would fire after their windows have expired.

        ``has_input`` says that the bundle had elements, not timers.

        The global window of a stream expires with the end of the stream. Processing-time timers that are set then may
        still fire once, since a step may have elements to emit, but a timer that sets itself again ends.
        """
        records = list(records)
        if family in self._processing_time:
            has_ended = self.plan.has_endless_input and self.input_watermark >= MAX and not has_input
            kept = [record for record in records if record.is_clear] if has_ended else records
            reason = "after the end of the stream"
        elif self.expiry is None:
            return records
        else:
            kept = [record for record in records if record.is_clear or self.expiry.allows(record)]
            reason = "beyond the end of its window"
        if len(kept) < len(records) and family not in self._warned:
            self._warned.add(family)
            _LOGGER.warning("%r sets the timer %r %s: it will not fire", *family, reason)
        return kept

    def take_expired(self) -> Iterator[tuple[Shard, list[bytes]]]:
        """Drop the timers of expired windows, and yield the cells of state that belong to such windows, by shard.

        A shard whose event-time timers are still to fire, or whose bundle may still write, is left for later, and so is
        what would take long: call it again if it yields anything. Processing-time timers of an expired window are
        dropped even if they are due: of many that set themselves again, some are always due.
        """
        if self.expiry is None:
            return
        passed = self._passed_micros()  # not earlier than timers, which may be set for the very end of the window
        clock = {family.key: passed for family in self.plan.timers if not family.is_processing_time}
        ended = passed - self.expiry.lateness
        for shard in self.shards:
            if shard.timers.next_expiry >= ended and shard.cell_expiry.next_expiry >= passed:
                continue
            is_late_input = shard.holds.minimum < self.input_watermark
            if shard.running or shard.retries or is_late_input or shard.timers.has_due(clock):
                continue
            dropped = shard.timers.drop_expired(ended, _EXPIRED_AT_ONCE)
            # Timers need their state until they are gone.
            cells = shard.cell_expiry.take(passed, _EXPIRED_AT_ONCE) if dropped < _EXPIRED_AT_ONCE else []
            if cells or dropped:
                yield shard, cells

    @property
    def expired_ms(self) -> int | None:
        """The end of the last windows that have expired, in milliseconds. None if only the runner can tell."""
        return None if self.expiry is None else self.expiry.expired_ms(self._passed_micros())

    @property
    def has_processing_timers(self) -> bool:
        """Whether a step of the stage may set processing-time timers."""
        return bool(self._processing_time)

    def next_processing_timer(self) -> int | None:
        """Return when the next processing-time timer of a shard that can run fires, in microseconds since 1970."""
        shards = [shard for shard in self.shards if shard.timers and shard.is_free()]
        fires = [shard.timers.next_fire(family) for family in self._processing_time for shard in shards]
        return min((fire for fire in fires if fire is not None), default=None)

    def timer_clock(self, wall_micros: int) -> dict[FamilyKey, int]:
        """Return the current time of each timer family: timers up to it are due."""
        event_micros = self._passed_micros()
        return {f.key: wall_micros if f.is_processing_time else event_micros for f in self.plan.timers}

    def _passed_micros(self) -> int:
        """Return the last event time that has passed. An element at the watermark itself may still arrive."""
        return self.input_watermark if self.input_watermark >= MAX else self.input_watermark - 1

    def advance(self, upstream: int) -> None:
        """Compute the watermarks, given the watermark of all input that is still to arrive from upstream.

        ::

            input watermark  = max(itself, min(upstream, queued, running, delayed, gated))
            output watermark = max(itself, min(input watermark, timers, running timers))

        Each of the others is the earliest hold of such elements or timers. Late ones never move time backwards.
        """
        self._upstream_watermark = upstream
        queued = min(shard.holds.minimum for shard in self.shards)
        running, delayed = self.running_holds.minimum, self.delayed.holds.minimum
        gated = self.gate.holds.minimum if self.gate is not None else MAX
        self.input_watermark = max(self.input_watermark, min(upstream, queued, running, delayed, gated))
        timers = min(shard.timers.holds.minimum for shard in self.shards)
        running_timers = self.running_timer_holds.minimum
        self.output_watermark = max(self.output_watermark, min(self.input_watermark, timers, running_timers))

    def is_done(self) -> bool:
        """Return whether the stage has no input left and will get no more."""
        if self.delayed or (self.gate is not None and self.gate.count):
            return False
        return self.output_watermark >= MAX and all(shard.is_idle() for shard in self.shards)

    def release(self) -> None:
        """Release all queued, waiting and delayed input. Called once, when the run ends."""
        if self.gate is not None:
            self.gate.release()
        for shard in self.shards:
            shard.release()
        self.delayed.release()
