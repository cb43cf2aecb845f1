"""A stage of a run: makes bundles of its input for the workers of its pool."""

from __future__ import annotations

import itertools
import sys
from collections import deque
from collections.abc import Sequence

from luminosity.engine.data.blocks import Block, BlockStore
from luminosity.engine.data.event_time import MAX
from luminosity.engine.data.shard import Shard
from luminosity.engine.data.timers import FamilyKey
from luminosity.engine.data.world import Clock
from luminosity.engine.loop.bundle import Bundle
from luminosity.engine.loop.sizing import Gathering
from luminosity.engine.loop.stage_input import StageInput
from luminosity.engine.loop.workers import PoolRun, Worker
from luminosity.engine.plan.codecs import Codecs, TimerRecord
from luminosity.engine.plan.graph import Stage

__all__ = ["StageRun"]

_BUNDLE_BYTES = 64 << 20  # at most, since a bundle's input can't be spilled while it runs
_LEAST_BUNDLE_BYTES = 1 << 20  # below this, a bundle costs more than its elements
_BUNDLE_PART = 16  # a bundle takes at most 1/16 of the memory budget, so that several can run
_JOINED_BYTES = 4 << 20  # of small partitions that are grouped together: some ten milliseconds of work
_BUNDLE_TIMERS = 10_000  # at most in a bundle: about a second of work
_ONE_BATCH = 4  # elements for a model: one batch takes less than one more copy of the model takes to load
_OVERDUE_S = 0.1  # how long input of a stream waits for the worker that has the state of its keys: two bundles


class StageRun(StageInput):
    """A stage while a run lasts. Only the loop's thread uses it; nothing blocks.

    Makes bundles of the stage's input, and owns those that wait to be retried. ``pool`` has the workers.
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
        super().__init__(plan, pool.plan, max_active_bundles, codecs, blocks, clock, has_test_stream=has_test_stream)
        self.pool = pool
        self.retries: deque[Bundle] = deque()  # run before other input of their shards
        self.has_begun = False
        self._bundle_bytes = max(_LEAST_BUNDLE_BYTES, min(_BUNDLE_BYTES, blocks.ledger.limit // _BUNDLE_PART))
        # In a stream, few elements come at a time: a bundle has those of all shards. In batch it has those of one,
        # since each key of a bundle costs as much as several elements.
        self._joins_shards = plan.is_stateful and self.is_endless and not plan.is_splittable
        self._turns = itertools.count(1)
        self._gathering = Gathering(queue_limit, plan.has_endless_input)

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
        """Return the first bundle to retry that can run: no other has its shards or waits for them before it.

        A bundle that has killed its worker may be retried in parts. Those of a TestStream's event keep their order.
        """
        waiting: set[Shard] = set()
        for bundle in self.retries:
            if not any((self.takes_all or s.is_exclusive) and (s.running or s in waiting) for s in bundle.shards):
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
            bundle.hold_watermark()
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
        return next((worker for worker in free_workers if worker is shard.last_worker), None)

    def _take(
        self, worker: Worker, now: float, wall_micros: int, most_elements: int | None
    ) -> tuple[Bundle, Worker] | None:
        """Take input or due timers from shards that have the same worker, or from one shard alone in batch."""
        if self.is_source:
            return self._take_restriction(worker)
        if self.plan.partitions:
            return self._take_partition(worker)
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

    def _take_partition(self, worker: Worker) -> tuple[Bundle, Worker] | None:
        """Take all of the largest partition, which takes longest: small ones end together. Several may share a bundle.

        Shards of a grouper are its partitions.
        """
        waiting = sorted((s for s in self.shards if s.is_free() and s.count), key=lambda s: s.bytes, reverse=True)
        inputs: dict[str, list[Block]] = {}
        members: list[Shard] = []
        size = 0
        for shard in waiting:
            if members and size + shard.bytes > _JOINED_BYTES:
                break
            size += shard.bytes
            members.append(shard)
            for read_id, blocks in shard.take(self._codecs, shard.count, sys.maxsize).items():
                inputs.setdefault(read_id, []).extend(blocks)
        return (Bundle(self, tuple(members), inputs), worker) if members else None

    def _bundle_of(self, shards: list[Shard], now: float, wall_micros: int, most_elements: int | None) -> Bundle | None:
        """Take due timers of these shards if the first has some, or else input. Returns None if the first has neither.

        Timers come first: with steady input they would otherwise never fire.
        """
        clock, first = self.timer_clock(wall_micros), shards[0]
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
        elif self.plan.sorts_its_bundle and self._is_one_batch(count):
            slots = 1
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

    def _is_one_batch(self, count: int) -> bool:
        """Return whether elements for a step that sorts its bundle are too few for one more copy of its model."""
        is_small = count <= _ONE_BATCH and not self.plan.sorts_blocks
        return is_small and not self.pool.plan.device_groups and not self.size.speed.is_observed

    def is_short(self, seconds: float) -> bool:
        """Return whether one worker is known to take less than ``seconds`` for what is queued."""
        return not self.plan.is_splittable and self.size.takes_less(self.queued, seconds)

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
                clock = clock or self.timer_clock(wall_micros)
                if shard.timers.has_due(clock):
                    return True
        return False

    def retry(self, old: Bundle, bundles: list[Bundle]) -> None:
        """Run ``bundles`` in place of ``old``, before all other input of its shard."""
        old.finished()
        for bundle in reversed(bundles):
            if bundle.pieces:  # all of its input may have been given back
                self._retry_first(bundle)

    def give_back(self, shards: Sequence[Shard], read_id: str, blocks: list[Block]) -> None:
        """Queue input that a running bundle of these shards has not begun, before all others. Takes over the blocks.

        If bundles that wait to be retried come after the running one, as the second half of a lost bundle does after
        the first, the input comes before them: elements of a key stay in order.
        """
        if any(shard.is_exclusive and shard.retries for shard in shards):
            self._retry_first(Bundle(self, tuple(shards), {read_id: blocks}))
        else:
            super().give_back(shards, read_id, blocks)

    def _retry_first(self, bundle: Bundle) -> None:
        bundle.hold_watermark()
        self.retries.appendleft(bundle)
        for shard in bundle.shards:
            shard.retries += 1

    def release(self) -> None:
        """Release all input, also that of bundles to retry. Called once, when the run ends."""
        super().release()
        for bundle in self.retries:
            bundle.release()
