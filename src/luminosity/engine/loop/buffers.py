"""The buffers between stages, and the output that running bundles are about to add to them."""

from __future__ import annotations

from collections.abc import Iterable, Iterator

from luminosity.engine.data.blocks import Block
from luminosity.engine.data.complete_side_input import SideInputData
from luminosity.engine.data.event_time import MAX
from luminosity.engine.data.grouping import Grouping
from luminosity.engine.data.live_side_input import LiveSideInput
from luminosity.engine.data.panes.live_grouping import LiveGrouping
from luminosity.engine.data.saved_rows import Changes, SavedRows, StableInput
from luminosity.engine.data.world import Clock
from luminosity.engine.loop.spill_policy import SpillPolicy
from luminosity.engine.loop.stage_input import StageInput

__all__ = ["BufferRun", "Outflow", "Partitions", "PendingOutput", "queue_limit"]

# For each worker: the output of the bundles that run counts as queued, and a second's work of one worker may make tens
# of MB. With less, workers stand still while the step behind them waits for input. More would delay the first results.
_MOST_QUEUE_BYTES = 64 << 20
_LEAST_QUEUE_BYTES = 1 << 20  # one block
_QUEUES_PART = 2  # all queues together may fill 1/2 of the memory budget before they hold back their writers

# A bundle with output of unknown size is stopped at this part of a queue's limit: it writes on until the request
# reaches it.
_UNEXPECTED_PART = 8
_FINISH_STEP_S = 0.01  # between two looks at the memory while work is finished


def queue_limit(memory_limit: int, buffers: int, workers: int) -> int:
    """Return how many bytes may wait in one buffer, if there are ``buffers`` of them.

    >>> queue_limit(16 << 30, buffers=4, workers=16) >> 20
    1024
    """
    share = memory_limit // (_QUEUES_PART * max(1, buffers))
    return max(_LEAST_QUEUE_BYTES, min(_MOST_QUEUE_BYTES * workers, share))


class BufferRun:
    """A buffer while a run lasts: passes committed blocks from the stages that write it to the stages that read it.

    A buffer without a grouping hands blocks on at once, and its readers queue them. A buffer with a grouping collects
    all input first; :meth:`pump` then moves the groups out. One with a live grouping, for unbounded input, passes on
    each group as soon as its trigger fires. Owns its grouping and side input. Only the loop's thread
    uses it, and nothing blocks, except that threads of the server read ``side_input``.
    """

    def __init__(
        self,
        grouping: Grouping | None,
        limit: int,
        spill_policy: SpillPolicy,
        clock: Clock,
        live: LiveGrouping | None = None,
        step: str = "",
    ) -> None:
        self.grouping = grouping
        self.live = live
        self.step = step  # the name of the GroupByKey, if it is one
        self.limit = limit
        self._spill_policy = spill_policy
        self._monotonic = clock.monotonic
        self.writers: list[StageInput] = []
        self.source_watermark = MAX  # of input that comes from no stage
        self.readers: list[tuple[StageInput, str]] = []
        self.side_input: SideInputData | None = None  # if a stage reads all of it at once
        self.live_side_input: LiveSideInput | None = None  # if it is unbounded
        self.stable: StableInput | None = None  # where blocks wait for a checkpoint, if they must
        self.uncommitted_bytes = 0  # output of running bundles, received or expected
        self.grouper: StageInput | None = None  # groups the input in workers if it is large

    @property
    def is_split(self) -> bool:
        """Whether workers group the input, so that the writers may split what they write by key."""
        return self.grouping is not None and self.grouping.is_split

    @property
    def _is_exhausted(self) -> bool:
        """Whether no more groups come out of a grouping that waits for all its input."""
        return self.grouping is None or self.grouping.is_exhausted

    def track(self) -> None:
        """Note from now on what changes between two checkpoints. Call it before the first block is delivered."""
        for part in (self.grouping, self.live, self.live_side_input):
            if part is not None:
                part.track()

    def finish_work(self) -> None:
        """Finish what a live grouping has begun, and pass on its panes: a checkpoint can't have half of it.

        Call it for all buffers before any part of the run is saved. ``has_work`` says whether there is anything to do.
        It may take long if very many keys of a window fire at once.
        """
        if self.live is not None:
            while not self.live.finish_work(self._monotonic() + _FINISH_STEP_S):
                self._pass_on_panes(self.live)
            self._pass_on_panes(self.live)

    @property
    def does_work(self) -> bool:
        """Whether :meth:`pump` may have work, or triggers may fire: not if blocks are only handed on."""
        return self.grouping is not None or self.live is not None or self.live_side_input is not None

    @property
    def has_work(self) -> bool:
        """Whether a live grouping has begun something that is not finished."""
        return self.live is not None and self.live.has_work

    def save(self, changes: Changes, name: str) -> None:
        """Write what has changed since the last checkpoint. ``name`` is the same after a restart."""
        for group in (self.grouping, self.live):
            if group is not None:
                group.save(changes, f"grouping/{name}")
        for side_input in self._side_inputs():
            side_input.save(changes, f"side/{name}")

    def restore(self, saved: SavedRows, name: str) -> None:
        """Take over what a checkpoint has. Call it once, after :meth:`track` and before the first bundle."""
        if self.grouping is not None:
            self.grouping.restore(saved, f"grouping/{name}")
        if self.live is not None:
            self.live.restore(saved, f"grouping/{name}", self._spill_policy.check)
        for side_input in self._side_inputs():
            side_input.restore(saved, f"side/{name}")
        self._spill_policy.check()

    def _side_inputs(self) -> list[SideInputData | LiveSideInput]:
        return [each for each in (self.side_input, self.live_side_input) if each is not None]

    def side_input_data(self) -> Iterator[bytes]:
        """Yield all encoded elements that came through, if a stage reads the buffer as a side input."""
        side_input = self.side_input or self.live_side_input
        return side_input.data() if side_input is not None else iter(())

    def deliver(self, block: Block) -> None:
        """Pass on a committed block. Takes over the block."""
        if self.grouping is not None:
            self.grouping.add(block)
        elif self.live is not None:
            self.live.add(block)
        else:
            self._emit(block)

    def _emit(self, block: Block) -> None:
        """Hand a block to all readers, or let it wait for a checkpoint first. Takes over the block."""
        if self.stable is not None and self._is_only_queued():
            self.stable.add(block)
        else:
            self._fan_out(block)

    def release_saved(self, checkpoint: int) -> None:
        """Pass on what has waited for the checkpoint with this number."""
        if self.stable is not None:
            for block in self.stable.take_saved(checkpoint):
                self._fan_out(block)

    def watermark(self) -> int:
        """Return the watermark of the buffer's future output. A grouping has output once all its input is there."""
        watermark = self._input_watermark()
        if self.stable is not None:
            watermark = min(watermark, self.stable.holds.minimum)
        if self.grouping is not None and self.grouping.is_split and self.grouper is not None:
            return min(watermark, self.grouping.input_hold, self.grouper.output_watermark)
        if self.grouping is not None and not self._is_exhausted:
            return min(watermark, self.grouping.earliest, MAX - 1)
        if self.live is not None:
            # Before the watermark has passed through, groups for it may still come out.
            return min(watermark, self.live.watermark, self.live.earliest)
        return watermark

    def set_source_watermark(self, watermark: int) -> None:
        """Note the watermark of input that comes from no stage."""
        self.source_watermark = watermark

    def pump(self, deadline: float) -> bool:
        """Group pending input or move groups out, until soon after ``deadline``. Returns whether there was work.

        If there is work, some of it is done even after the deadline: a loop that the machine has stopped for a moment
        must not take the buffer for one that is done.
        """
        if self.live is not None:
            return self._pump_live(self.live, deadline)
        if self._is_exhausted or self.grouping is None:
            return False
        has_moved = False
        while not has_moved or self._monotonic() < deadline:
            if self.grouping.pending:
                self.grouping.absorb()
                self._spill_policy.check()
            elif not self.grouping.is_split and self._is_complete() and self._wants_more():
                block = self.grouping.next_block()
                if block is None:
                    return True
                self._emit(block)
            else:
                return has_moved
            has_moved = True
        return has_moved

    def _pump_live(self, live: LiveGrouping, deadline: float) -> bool:
        # Groups stay in the grouping, which can spill them, until the readers have room.
        if self._is_full():
            return False
        has_moved = live.pump(self._input_watermark(), deadline)
        self._pass_on_panes(live)
        return has_moved

    def _pass_on_panes(self, live: LiveGrouping) -> None:
        while (block := live.next_block()) is not None:
            self._emit(block)
        self._spill_policy.check()

    def _is_only_queued(self) -> bool:
        """Return whether no stage reads the buffer as a side input."""
        return self.side_input is None and self.live_side_input is None

    def next_fire(self) -> int | None:
        """Return when the next processing-time trigger fires that can fire, in microseconds since 1970."""
        fires = [self.live.next_fire()] if self.live is not None and not self._is_full() else []
        if self.live_side_input is not None:
            fires.append(self.live_side_input.next_fire())
        return min((fire for fire in fires if fire is not None), default=None)

    def _is_full(self) -> bool:
        """Return whether panes should wait for a reader. A side input never waits, since readers may wait for it."""
        return self.side_input is None and any(
            stage.is_ready and stage.queued_bytes > self.limit // 2 for stage, _ in self.readers
        )

    def _is_complete(self) -> bool:
        return self._input_watermark() >= MAX

    def _input_watermark(self) -> int:
        return min((self.source_watermark, *(writer.output_watermark for writer in self.writers)))

    def _wants_more(self) -> bool:
        """Return whether a reader can take more groups. Until then they stay in the grouping, which can spill them."""
        if self.side_input is not None or not self.readers:
            return True
        ready = [stage for stage, _ in self.readers if stage.is_ready]
        held = self.stable.bytes if self.stable is not None else 0
        return bool(ready) and all(stage.queued_bytes + held <= self.limit // 2 for stage in ready)

    def take_dropped(self) -> int:
        """Return how many elements were dropped since the last call, because they came too late."""
        if self.live is None:
            return 0
        dropped, self.live.dropped = self.live.dropped, 0
        return dropped

    def fraction_out(self) -> float:
        """Return the fraction of the written elements that has been passed to the readers."""
        if self._is_exhausted or self.grouping is None:
            return 1.0
        if self.grouper is not None and self.grouping.is_split:
            whole = self.grouper.elements_done + self.grouper.queued
            return self.grouper.elements_done / whole if self.grouper.is_ready and whole else 0.0
        table = self.grouping.table
        return table.values_out / table.values_in if self._is_complete() and table.values_in else 0.0

    def full_reader(self) -> StageInput | None:
        """Return a reader that could run and has so much queued that the writers should pause, or None.

        A reader that can't run yet never holds writers back, since it may wait for a side input that they produce. Half
        of the limit is left for the output of bundles that already run.
        """
        if self.grouping is not None:
            return None
        for stage, _ in self.readers:
            waiting = stage.queued_bytes + self.uncommitted_bytes + self._held_bytes()
            if stage.is_ready and waiting > self.limit // 2:
                return stage
        return None

    def room(self) -> int:
        """Return how many bytes may still be written before the limit is reached."""
        queued = max((stage.queued_bytes for stage, _ in self.readers if stage.is_ready), default=0)
        return max(0, self.limit - queued - self.uncommitted_bytes - self._held_bytes())

    def _held_bytes(self) -> int:
        if self.stable is not None:
            return self.stable.bytes
        return self.live.pending_bytes if self.live is not None else 0

    def release(self) -> None:
        """Release all data. Called once, when the run ends."""
        for part in (self.grouping, self.live, self.stable, self.side_input, self.live_side_input):
            if part is not None:
                part.release()

    def _fan_out(self, block: Block) -> None:
        for stage, read_id in self.readers:
            stage.add(read_id, block.share())
        for side_input in (self.side_input, self.live_side_input):
            if side_input is not None:
                side_input.add(block.share())
        block.release()
        self._spill_policy.check()


class Partitions(BufferRun):
    """The partitions of a grouping, which its grouper reads. They are complete when the grouping's input is."""

    def __init__(self, grouped: BufferRun, grouping: Grouping, spill_policy: SpillPolicy, clock: Clock) -> None:
        super().__init__(None, grouped.limit, spill_policy, clock, step=grouped.step)
        self.writers = grouped.writers
        self._input = grouping

    def watermark(self) -> int:
        """Return the watermark of what is still to be handed over. Until it is known whether that is all or nothing,
        it is that of all input."""
        return min(super().watermark(), self._input.input_hold)


class Outflow:
    """Tracks how much output a stage's bundles produce, so that the queues behind the stage keep to their limit."""

    def __init__(self, buffers: Iterable[tuple[bytes, BufferRun]]) -> None:
        # A grouping takes any amount, since it can spill.
        self._queues = {buffer_id: buffer for buffer_id, buffer in buffers if buffer.grouping is None}
        self._bytes_per_element: dict[bytes, float] = {}

    def is_held_back(self) -> bool:
        """Return whether the stage should start no bundle because a queue behind it is full."""
        return any(queue.full_reader() for queue in self._queues.values())

    def most_elements(self, bundles: int) -> int | None:
        """Return how many elements each of ``bundles`` may take so that their output fits, or None if unknown."""
        most = [
            queue.room() / self._bytes_per_element[buffer_id] / bundles
            for buffer_id, queue in self._queues.items()
            if self._bytes_per_element.get(buffer_id)
        ]
        return max(1, int(min(most))) if most else None

    def begin(self, elements: int) -> PendingOutput:
        """Count the expected output of a bundle of ``elements`` that starts now."""
        return PendingOutput(self._queues, {key: int(size * elements) for key, size in self._bytes_per_element.items()})

    def learn(self, pending: PendingOutput, elements: int) -> None:
        """Update the expected output per element from a bundle that was committed."""
        if not elements:
            return
        for buffer_id, size in pending.sizes.items():
            known = self._bytes_per_element.get(buffer_id, size / elements)
            self._bytes_per_element[buffer_id] = 0.5 * (known + size / elements)


class PendingOutput:
    """The output of one attempt that is not committed yet. Expected output counts as if it were there."""

    def __init__(self, queues: dict[bytes, BufferRun], expected: dict[bytes, int]) -> None:
        self._queues = queues
        self._expected = expected
        self._counted = dict(expected)
        self.sizes: dict[bytes, int] = {}
        for buffer_id, size in expected.items():
            queues[buffer_id].uncommitted_bytes += size

    def add(self, buffer_id: bytes, size: int) -> bool:
        """Count a block that arrived. Returns whether the bundle should stop, because the queue gets too long."""
        queue = self._queues.get(buffer_id)
        if queue is None:
            return False
        self.sizes[buffer_id] = total = self.sizes.get(buffer_id, 0) + size
        counted = self._counted.get(buffer_id, 0)
        if total > counted:
            queue.uncommitted_bytes += total - counted
            self._counted[buffer_id] = total
        if buffer_id not in self._expected and total > queue.limit // _UNEXPECTED_PART:
            return True
        return total > counted and queue.full_reader() is not None

    def keep(self, part: float) -> None:
        """Expect only this part of the output, because a split took the rest of the input."""
        for buffer_id, expected in self._expected.items():
            counted = max(self.sizes.get(buffer_id, 0), int(part * expected))
            if counted < self._counted.get(buffer_id, 0):
                self._queues[buffer_id].uncommitted_bytes -= self._counted[buffer_id] - counted
                self._counted[buffer_id] = counted

    def end(self) -> None:
        """Stop counting the output, because the attempt is committed or given up."""
        for buffer_id, size in self._counted.items():
            self._queues[buffer_id].uncommitted_bytes -= size
        self._counted = {}
