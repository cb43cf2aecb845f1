"""A stage of a run: its queued input, watermarks and bundles."""

from __future__ import annotations

import itertools
import logging
from collections import deque
from collections.abc import Iterable, Iterator
from typing import TYPE_CHECKING

from luminosity.engine.data.blocks import Block, BlockStore
from luminosity.engine.data.expiry import WindowExpiry
from luminosity.engine.data.sides.side_gate import Side, SideGate
from luminosity.engine.data.timers import FamilyKey
from luminosity.engine.data.watermarks import MAX, MIN, Holds
from luminosity.engine.data.world import Clock
from luminosity.engine.loop.bundle import Bundle
from luminosity.engine.loop.metrics import BusyTime, StageUsage
from luminosity.engine.loop.shard import DelayedInput, Shard, cut_by_shard
from luminosity.engine.loop.sizing import BundleSize, Gathering, SizedWork
from luminosity.engine.plan.codecs import Codecs, ElementCodec, KeyedElement, TimerCodec, TimerRecord
from luminosity.engine.plan.graph import Stage

if TYPE_CHECKING:
    from luminosity.engine.loop.workers import PoolRun, Worker

__all__ = ["StageRun"]

_LOGGER = logging.getLogger(__name__)

_SHARDS_PER_SLOT = 4  # enough that slots stay busy if keys are spread unevenly
_LEAST_SHARDS = 8  # even for one slot: the fewer keys a bundle has, the fewer cells it opens and writes
_BUNDLE_BYTES = 64 << 20  # at most, since a bundle's input can't be spilled while it runs
_LEAST_BUNDLE_BYTES = 1 << 20  # below this, a bundle costs more than its elements
_BUNDLE_PART = 16  # a bundle takes at most 1/16 of the memory budget, so that several can run
_BUNDLE_TIMERS = 10_000  # at most in a bundle: about a second of work
_EXPIRED_AT_ONCE = 2000  # timers or cells of a shard, which take some milliseconds
_OVERDUE_S = 0.1  # how long input of a stream waits for the worker that has the state of its keys: two bundles


class StageRun:
    """A stage while a run lasts. Only the loop's thread uses it; nothing blocks.

    Holds the stage's queued input in shards, makes bundles of it, and computes the stage's watermarks. ``plan`` is what
    the planner decided, ``pool`` has the workers. The stage owns its queued, delayed and retried input until a bundle
    takes it; :meth:`release` drops what is left at the end.
    """

    def __init__(
        self,
        plan: Stage,
        pool: PoolRun,
        max_active_bundles: int,
        codecs: Codecs,
        blocks: BlockStore,
        queue_limit: int,
        clock: Clock,
        *,
        has_test_stream: bool,
    ) -> None:
        self.id = plan.id
        self.plan = plan
        self.pool = pool
        self.max_active_bundles = max_active_bundles
        self.blocks = blocks
        self._monotonic = clock.monotonic
        self._bundle_bytes = max(_LEAST_BUNDLE_BYTES, min(_BUNDLE_BYTES, blocks.ledger.limit // _BUNDLE_PART))
        # A stream's source has slots of its own, and one restriction in a bundle.
        self.is_source = plan.is_source and not pool.plan.device_groups
        is_endless = plan.has_endless_input and not plan.is_sink
        # The elements of a TestStream's event stay in one bundle, in their order, so that a test ends the same way each
        # time. Those of a key are never in two.
        self.takes_all = has_test_stream and is_endless and not plan.is_splittable and not plan.is_stateful
        self.size = BundleSize(plan.is_sink, plan.sorts_its_bundle, plan.sorts_blocks, is_endless, self.is_source)
        self._codecs = {read.transform_id: codecs.elements(read.coder_id) for read in plan.reads}
        self.written_buffers = {write.transform_id: write.buffer_id for write in plan.writes}
        self.timer_codecs: dict[FamilyKey, TimerCodec] = {
            f.key: codecs.timers(f, plan.reads[0].coder_id) for f in plan.timers
        }
        reads = [read.transform_id for read in plan.reads]
        if plan.is_stateful:
            # Keys are spread over shards, so that a key's elements are never in two bundles at once.
            total_slots = pool.plan.workers * pool.plan.slots
            shards = max(_LEAST_SHARDS, _SHARDS_PER_SLOT * total_slots)
            self.shards = [Shard(reads, is_exclusive=True, index=index) for index in range(shards)]
        else:
            self.shards = [Shard(reads, is_exclusive=False)]
        # In a stream, few elements come at a time: a bundle has those of all shards. In batch it has those of one,
        # since each key of a bundle costs as much as several elements.
        self._joins_shards = plan.is_stateful and is_endless and not plan.is_splittable
        self.retries: deque[Bundle] = deque()  # run before other input of their shards
        self.expiry: WindowExpiry | None = None  # if windows never expire: in the global window, or in batch
        if plan.is_stateful:
            (first, *_) = plan.reads
            (pcollection,) = next(t for t in plan.transforms if t.unique_name == first.transform_id).outputs.values()
            self.expiry = WindowExpiry.of(pcollection, first.coder_id, codecs)
        self._processing_time = {family.key for family in plan.timers if family.is_processing_time}
        self._warned: set[FamilyKey] = set()
        self.dropped = 0  # elements that came after their windows had expired
        self._turns = itertools.count(1)
        self.delayed = DelayedInput()
        self._running_holds = Holds()  # of input in bundles that run or will be retried
        self._running_timer_holds = Holds()
        self.feeds_queue = False  # whether other stages can process the output while this stage runs
        # Whether all bounded side inputs are complete.
        self.is_ready = all(side_input.is_unbounded for side_input in plan.side_inputs)
        self.gate: SideGate | None = None  # where input waits for windows of unbounded side inputs
        self._gathering = Gathering(queue_limit, plan.has_endless_input)
        self._upstream_watermark = MIN
        self.input_watermark = MIN
        self.output_watermark = MIN
        self.busy = BusyTime(clock)
        self.usage = StageUsage()
        self.sized_work = SizedWork(self.codec) if plan.is_splittable else None
        self.has_begun = False
        self.elements_done = 0
        self.bundles_done = 0

    # Input

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

    def _queue(self, read_id: str, block: Block) -> None:
        """Queue a block; if there are several shards, each element in the shard of its key."""
        if len(self.shards) == 1:
            self.shards[0].append(read_id, block, self._monotonic())
            return
        for shard, part in cut_by_shard(block, self._in_time(read_id, block), self.shards, self.blocks):
            shard.append(read_id, part, self._monotonic())

    def give_back(self, bundle: Bundle, read_id: str, blocks: list[Block]) -> None:
        """Queue input that a running bundle has not begun, before all others. Takes over the blocks."""
        if len(bundle.shards) == 1:
            bundle.shards[0].prepend(read_id, blocks)
            return
        for block in reversed(blocks):
            elements = self.codec(read_id).keyed_elements(block.data(), with_header=False)
            for shard, part in cut_by_shard(block, elements, self.shards, self.blocks):
                shard.prepend(read_id, [part])

    def restore_input(self, read_id: str, block: Block, due_at: float | None) -> None:
        """Queue input that waited before a restart, or let it wait until ``due_at``. Takes over the block."""
        if self.sized_work is not None:
            self.sized_work.arrived(read_id, block)
        if due_at is not None:
            self.delayed.add(read_id, block, due_at)
        elif len(self.shards) == 1:
            self.shards[0].append(read_id, block, self._monotonic())
        else:
            elements = self.codec(read_id).keyed_elements(block.data(), with_header=False)
            for shard, part in cut_by_shard(block, elements, self.shards, self.blocks):
                shard.append(read_id, part, self._monotonic())

    def _in_time(self, read_id: str, block: Block) -> Iterator[KeyedElement]:
        """Return the elements of a block, without the windows that have expired."""
        if self.expiry is None:
            return self.codec(read_id).keyed_elements(block.data(), with_header=False)
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

    # Bundles

    def is_gathering(self, now: float) -> bool:
        """Return whether to wait for more input, because a sink writes a file per bundle and more input is coming."""
        if not self.plan.is_sink or self._upstream_watermark >= MAX or self.retries:
            return False
        return self._gathering.is_worth_it(now, self.queued_bytes)

    def next_is_suspect(self) -> bool:
        """Return whether the next bundle must run alone in a worker, because it may be the one that kills workers."""
        bundle = self._next_retry()
        return bundle is not None and bundle.is_suspect

    def _next_retry(self) -> Bundle | None:
        """Return the first bundle to retry that can run: no other has its shards or waits for them before it."""
        waiting: set[Shard] = set()
        for bundle in self.retries:
            if not any(s.is_exclusive and (s.running or s in waiting) for s in bundle.shards):
                return bundle
            waiting.update(bundle.shards)
        return None

    def next_bundle(
        self, worker: Worker, now: float, wall_micros: int, most_elements: int | None
    ) -> tuple[Bundle, Worker] | None:
        """Take the input of a bundle that can run now, of at most ``most_elements``. Returns None if there is none.

        ``worker`` has a free slot. The worker that is returned with the bundle may be another free one, which has the
        state of the bundle's keys in its cache, or a reader open for its restriction.
        """
        self._gathering.end()
        bundle = self._next_retry()
        if bundle is not None:
            self.retries.remove(bundle)
            for shard in bundle.shards:
                shard.retries -= 1
            if not bundle.is_suspect:
                worker = self._last_worker(bundle.shards[0], self._free_workers()) or worker
        elif (taken := self._take(worker, now, wall_micros, most_elements)) is not None:
            bundle, worker = taken
            self.has_begun = True
            self._add_hold(bundle)
            for shard in bundle.shards:
                shard.turn = next(self._turns)
        if bundle is None:
            return None
        for shard in bundle.shards:
            shard.running += 1
            shard.had_timers = not bundle.inputs
        return bundle, worker

    def _free_workers(self) -> list[Worker]:
        return self.pool.free_workers(self.id, self.max_active_bundles, is_idle=False, is_source=self.is_source)

    def _last_worker(self, shard: Shard, free_workers: list[Worker]) -> Worker | None:
        """Return the worker that has the shard's state in its cache, if that worker is free."""
        return shard.last_worker if self.plan.is_stateful and shard.last_worker in free_workers else None

    def _take(
        self, worker: Worker, now: float, wall_micros: int, most_elements: int | None
    ) -> tuple[Bundle, Worker] | None:
        """Take input or due timers from shards that have the same worker, or from one shard alone in batch."""
        if self.is_source:
            return self._take_restriction(worker)
        if not self.plan.is_stateful:
            bundle = self._bundle_of(self.shards, now, wall_micros, most_elements)
            return (bundle, worker) if bundle is not None else None
        # A shard stays with its worker, which has its state in the cache, unless that worker is busy for long. Shards
        # take turns, so that none starves.
        free_workers = self._free_workers()
        shards = sorted((shard for shard in self.shards if shard.is_free()), key=lambda shard: shard.turn)
        staying = [shard for shard in shards if shard.last_worker is None or shard.last_worker in free_workers]
        overdue = now - _OVERDUE_S if self._joins_shards else float("inf")
        moving = [
            shard
            for shard in shards
            if shard not in staying and shard.may_move(now) and (shard.waiting_since < overdue or not shard.has_worker)
        ]
        for first in staying + moving:
            chosen = self._last_worker(first, free_workers) or worker
            joined = [first]
            if self._joins_shards:
                joined += [s for s in staying if s is not first and s.last_worker in (None, chosen)]
                joined += [s for s in moving if s is not first]
            if (bundle := self._bundle_of(joined, now, wall_micros, most_elements)) is not None:
                return bundle, chosen
        return None

    def _take_restriction(self, worker: Worker) -> tuple[Bundle, Worker] | None:
        """Take one restriction of a source. It stays with the worker that had it last, while that worker lives."""
        workers = {other.id: other for other in self.pool.workers.values()}
        free_workers = self._free_workers()
        taken = self.shards[0].take_one(lambda block: block.home not in workers or workers[block.home] in free_workers)
        if not taken:
            return None
        ((block,),) = taken.values()
        if block.count > 1:
            (read_id,) = taken
            block, rest = block.cut(self.codec(read_id), 1)
            self.shards[0].prepend(read_id, [rest])
            taken = {read_id: [block]}
        return Bundle(self, (self.shards[0],), taken), workers.get(block.home, worker)

    def _bundle_of(self, shards: list[Shard], now: float, wall_micros: int, most_elements: int | None) -> Bundle | None:
        """Take due timers of these shards if the first has some, or else input. Returns None if the first has neither.

        Timers come first: with steady input they would otherwise never fire.
        """
        clock, first = self._clock(wall_micros), shards[0]
        may_fire = first.timers and (not first.count or self._must_fire_first(first, clock))
        if may_fire and (due := first.timers.take_due(clock, _BUNDLE_TIMERS)):
            return self._bundle_of_timers(shards, due, clock)
        if not first.count:
            return None
        if len(shards) > 1:
            shards = [shard for shard in shards if shard.count and not self._must_fire_first(shard, clock)]
        count = sum(shard.count for shard in shards)
        # Each bundle takes its share of what is left, so that the last bundles are small and end together. A step that
        # begins its whole bundle at once, or makes a file of it, also leaves input for workers that have not started
        # yet: they can't take it later.
        if shards[0].is_exclusive:
            slots = 1  # no other slot can get these keys meanwhile
        elif self.plan.is_sink:
            slots = self.pool.all_slots()
        elif self.plan.sorts_its_bundle:
            slots = max(1, self.pool.all_slots() - self.pool.connected_slots() + self.pool.free_slots())
        else:
            slots = self.pool.connected_slots()
        size = sum(shard.bytes for shard in shards) if self.sized_work is None else self.sized_work.left
        is_ending = self.feeds_queue and self._upstream_watermark >= MAX
        elements = count if self.takes_all else self.size.next(now, count, max(1, slots), size, is_ending=is_ending)
        if most_elements is not None:
            elements = min(elements, most_elements)
        return self._bundle_of_input(shards, elements, now)

    def _must_fire_first(self, shard: Shard, clock: dict[FamilyKey, int]) -> bool:
        """Return whether the shard has due timers that come before its input.

        In a stream, those of processing time may be due all the time, if they set themselves again. So they take turns.
        """
        if shard.had_timers and self.plan.has_endless_input:
            clock = {family: micros for family, micros in clock.items() if family not in self._processing_time}
        return shard.timers.has_due(clock)

    def _bundle_of_input(self, shards: list[Shard], elements: int, now: float) -> Bundle:
        """Take up to ``elements``, but at least one, from the fronts of the shards' queues."""
        inputs: dict[str, list[Block]] = {}
        members: list[Shard] = []
        size = 0
        for shard in shards:
            if members and (elements <= 0 or size >= self._bundle_bytes):
                break
            for read_id, blocks in shard.take(self._codecs, elements, self._bundle_bytes - size).items():
                inputs.setdefault(read_id, []).extend(blocks)
                elements -= sum(block.count for block in blocks)
                size += sum(block.weight for block in blocks)
            shard.waiting_since = now
            members.append(shard)
        return Bundle(self, tuple(members), inputs)

    def _bundle_of_timers(
        self, shards: list[Shard], due: dict[FamilyKey, list[TimerRecord]], clock: dict[FamilyKey, int]
    ) -> Bundle:
        """Add the due timers of the other shards to those of the first."""
        members = [shards[0]]
        for shard in shards[1:]:
            room = _BUNDLE_TIMERS - sum(map(len, due.values()))
            if room > 0 and shard.timers and (more := shard.timers.take_due(clock, room)):
                members.append(shard)
                for family, timers in more.items():
                    due.setdefault(family, []).extend(timers)
        return Bundle(self, tuple(members), {}, due)

    def timers_in_time(self, bundle: Bundle, family: FamilyKey, records: Iterable[TimerRecord]) -> list[TimerRecord]:
        """Return the timers that a bundle set, without those that would fire after their windows have expired.

        The global window of a stream expires with the end of the stream. Processing-time timers that are set then may
        still fire once, since a step may have elements to emit, but a timer that sets itself again ends.
        """
        records = list(records)
        if family in self._processing_time:
            has_ended = self.plan.has_endless_input and self.input_watermark >= MAX and not bundle.inputs
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

    def has_work(self, wall_micros: int) -> bool:
        """Return whether a bundle could start: a free shard has input, a bundle to retry or a due timer."""
        if self.retries and self._next_retry() is not None:
            return True
        clock = None
        for shard in self.shards:
            if not shard.is_free():
                continue
            if shard.count:
                return True
            if shard.timers:
                clock = clock or self._clock(wall_micros)
                if shard.timers.has_due(clock):
                    return True
        return False

    @property
    def has_processing_timers(self) -> bool:
        """Whether a step of the stage may set processing-time timers."""
        return bool(self._processing_time)

    def next_processing_timer(self) -> int | None:
        """Return when the next processing-time timer of a shard that can run fires, in microseconds since 1970."""
        shards = [shard for shard in self.shards if shard.timers and shard.is_free()]
        fires = [shard.timers.next_fire(family) for family in self._processing_time for shard in shards]
        return min((fire for fire in fires if fire is not None), default=None)

    def finished(self, bundle: Bundle) -> None:
        """Note that ``bundle`` is committed or replaced by others."""
        for shard in bundle.shards:
            shard.running -= 1
        self._drop_hold(bundle)

    def retry(self, old: Bundle, bundles: list[Bundle]) -> None:
        """Run ``bundles`` in place of ``old``, before all other input of its shard."""
        self.finished(old)
        for bundle in reversed(bundles):
            if bundle.pieces:  # all of its input may have been given back
                self._add_hold(bundle)
                self.retries.appendleft(bundle)
                for shard in bundle.shards:
                    shard.retries += 1

    def replace_inputs(self, bundle: Bundle, inputs: dict[str, list[Block]]) -> None:
        """Give a bundle other input, after its worker has ended. Releases the input that it had."""
        self._drop_hold(bundle)
        bundle.release()
        bundle.set_inputs(inputs)
        self._add_hold(bundle)

    def _add_hold(self, bundle: Bundle) -> None:
        (self._running_holds if bundle.inputs else self._running_timer_holds).add(bundle.hold)

    def _drop_hold(self, bundle: Bundle) -> None:
        (self._running_holds if bundle.inputs else self._running_timer_holds).remove(bundle.hold)

    def _clock(self, wall_micros: int) -> dict[FamilyKey, int]:
        """Return the current time of each timer family: timers up to it are due."""
        event_micros = self._passed_micros()
        return {f.key: wall_micros if f.is_processing_time else event_micros for f in self.plan.timers}

    def _passed_micros(self) -> int:
        """Return the last event time that has passed. An element at the watermark itself may still arrive."""
        return self.input_watermark if self.input_watermark >= MAX else self.input_watermark - 1

    # Time

    def advance(self, upstream: int) -> None:
        """Compute the watermarks, given the watermark of all input that is still to arrive from upstream."""
        self._upstream_watermark = upstream
        queued = min(shard.holds.minimum for shard in self.shards)
        # Elements that come late don't move time backwards.
        waiting = self.gate.holds.minimum if self.gate is not None else MAX
        earliest = min(upstream, queued, self._running_holds.minimum, self.delayed.holds.minimum, waiting)
        self.input_watermark = max(self.input_watermark, earliest)
        timers = min(shard.timers.holds.minimum for shard in self.shards)
        earliest = min(self.input_watermark, timers, self._running_timer_holds.minimum)
        self.output_watermark = max(self.output_watermark, earliest)

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
        for bundle in self.retries:
            bundle.release()
        self.delayed.release()
