"""Collects what has changed in a run since its last checkpoint, and hands it to the writer."""

from __future__ import annotations

import marshal
from collections import deque
from collections.abc import Callable, Iterator
from dataclasses import dataclass, replace

from luminosity.engine.data.blocks import Block, BlockStore
from luminosity.engine.data.saved_rows import BlockReference
from luminosity.engine.data.state import StateStore
from luminosity.engine.data.wire import StateKeys
from luminosity.engine.data.world import World
from luminosity.engine.durable.copies.copied import CheckpointCopy
from luminosity.engine.durable.names import SOURCES, Names
from luminosity.engine.durable.store import CheckpointFolder, Transaction
from luminosity.engine.durable.writer import CheckpointWriter, Collected, Contents, Removal
from luminosity.engine.loop.buffers import BufferRun
from luminosity.engine.loop.bundle import Attempt, AttemptWorker, Bundle
from luminosity.engine.loop.metrics import RunMetrics
from luminosity.engine.loop.parts import CheckpointProgress
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.loop.workers import CheckpointWritten, PoolRun

__all__ = ["FROM_UPSTREAM", "Checkpointer", "SavedParts", "inlined"]

FROM_UPSTREAM = -1.0  # in place of the time at which an entry of a queue is due: it has not reached the queue yet

_STABLE_S = 0.05  # how long input behind a Reshuffle waits for a checkpoint, if they are quick
_PATIENT_S = 1.0  # the same for readers that rather get much at once
_LOOK_S = 0.1  # between two looks at the copy: finalization is for what others see later
_LATEST_COPY_S = 60.0  # with a copy that is later, what others see goes on without it: a warning has told that
_LONGEST_WAIT_S = 10.0  # of the end of a run for a copy that can't be written
_LONGEST_SHARE = 0.1  # of the loop's time, for checkpoints: after one that took long, the next one waits
_LONGEST_PAUSE_S = 10.0  # but no longer than this: a kill repeats what was done since, and later changes cost as much


@dataclass(frozen=True)
class SavedParts:
    """The parts of a run that a checkpoint has."""

    stages: list[StageRun]
    buffers: dict[bytes, BufferRun]
    pools: list[PoolRun]
    blocks: BlockStore
    state: StateStore
    metrics: RunMetrics
    check_memory: Callable[[], None]  # spills data if there is more than memory has room for
    world: World


@dataclass
class _Unfinalized:
    """Attempts that are finalized once their checkpoint can't be lost any more."""

    number: int  # of the checkpoint
    attempts: list[Attempt]
    written_at: float | None = None


class Checkpointer:
    """Saves a run at intervals, once its parts are restored. The loop's hook for checkpoints.

    Between two messages of the loop, the state of all parts is consistent. Bundles that run count as not started: their
    input is saved with the queue that it came from. So one transaction with what changed is a checkpoint.
    """

    def __init__(
        self,
        folder: CheckpointFolder,
        contents: Contents,
        names: Names,
        interval_s: float,
        parts: SavedParts,
        saved: dict[str, bytes],
        copy: CheckpointCopy | None = None,
    ) -> None:
        """Save into ``folder``, which has the rows ``saved`` of queues and stages, by their owners.

        What is saved goes to the ``copy``, too, which its owner closes.
        """
        self._folder = folder
        self._contents = contents
        self._names = names
        self._interval_s = interval_s
        self._parts = parts
        self._clock = parts.world.clock
        self._saved = saved
        self._copy = copy
        self._number = 0
        self.progress = CheckpointProgress()
        self._submitted: tuple[int, float] | None = None  # what is being written: its number, and when it was begun
        self._due = self._soonest = self._soonest_patient = 0.0
        self._writer: CheckpointWriter | None = None
        self._notify: Callable[[CheckpointWritten], None] | None = None
        self._written = self._synced = 0  # the numbers of the last checkpoints that were written, and are on the disk
        self._awaited: dict[str, int] = {}  # by stage: the checkpoint with which its side inputs are saved
        self._unsaved: list[Attempt] = []  # to be finalized after the next checkpoint
        self._saved_attempts: list[_Unfinalized] = []
        # Checkpoints that the copy may lack, and when they were written.
        self._uncopied: deque[tuple[int, float]] = deque()
        self._copied = 0  # the number of the last one that it has, or that is not waited for
        self._look_at = 0.0  # when to look whether the copy has more of their checkpoints
        self._removals: list[Removal] = []
        for stage in parts.stages:
            for shard in stage.shards:
                shard.timers.track()
        parts.state.track()

    def start(self, notify: Callable[[CheckpointWritten], None]) -> None:
        """Start to write."""
        self._notify = notify
        if self._copy is not None:
            self._copy.begin(self._folder)
        self._writer = CheckpointWriter(
            self._folder,
            self._parts.world,
            lambda number, synced, error: notify(CheckpointWritten(number, synced, error)),
        )
        self._due = self._clock.monotonic() + self._interval_s

    def next_due(self) -> float:
        """Return when the next checkpoint is due: soon, if input waits for it."""
        stables = [buffer.stable for buffer in self._parts.buffers.values() if buffer.stable is not None]
        is_awaited = any(number > self._number for number in self._awaited.values())
        if is_awaited or any(stable.is_waiting and not stable.is_patient for stable in stables):
            return min(self._due, self._soonest)
        return min(self._due, self._soonest_patient) if any(s.is_waiting for s in stables) else self._due

    def tick(self, now: float) -> None:
        """Save what has changed, if it is time to and the last checkpoint is written."""
        assert self._writer is not None
        if self._copy is not None:
            self._copy.check()
            self.progress.copy_lag_s = self._copy.lag_s
            if (self._saved_attempts or self._uncopied) and self._notify is not None and now >= self._look_at:
                self._look_at = now + _LOOK_S
                self._notify(CheckpointWritten(self._written, self._synced))
        if self._writer.is_busy or now < self.next_due():
            return
        before = self._clock.thread_time()
        self._submit({})
        took = self._clock.thread_time() - before  # of CPU: on a busy machine, the thread waits for a core
        pause = min(took / _LONGEST_SHARE, _LONGEST_PAUSE_S)
        self._due = now + max(self._interval_s, pause)
        self._soonest = now + max(min(self._interval_s, _STABLE_S), pause)
        self._soonest_patient = now + max(min(self._interval_s, _PATIENT_S), pause)

    def has_side_inputs(self, stage_id: str) -> bool:
        """Return whether a checkpoint was written since the first call for this stage. If not, one is due soon."""
        if self._written >= self._awaited.setdefault(stage_id, self._number + 1):
            del self._awaited[stage_id]
            return True
        return False

    def finalize_later(self, attempt: Attempt) -> None:
        """Keep an attempt until the checkpoint that has its commit is on the disk."""
        self._unsaved.append(attempt)

    def will_finalize_in(self, worker: AttemptWorker) -> bool:
        """Return whether attempts of a worker wait for their finalization."""
        waiting = (self._unsaved, *(each.attempts for each in self._saved_attempts))
        return any(attempt.worker is worker for attempts in waiting for attempt in attempts)

    def has_unsaved(self) -> bool:
        """Return whether attempts wait for their finalization."""
        if self._copy is not None and self._copy.lag_s > _LONGEST_WAIT_S:
            return bool(self._unsaved) or any(each.number > self._synced for each in self._saved_attempts)
        return bool(self._unsaved or self._saved_attempts)

    def written(self, message: CheckpointWritten) -> list[Attempt]:
        """Pass on stable input, and remove files that are not needed any more. Returns attempts to be finalized."""
        if self._submitted is not None and message.number >= self._submitted[0]:
            now = self._clock.monotonic()
            self.progress = replace(
                self.progress, count=self.progress.count + 1, last_at=now, last_seconds=now - self._submitted[1]
            )
            self._submitted = None
        if self._copy is not None and message.number > self._written:
            self._uncopied.append((message.number, self._clock.monotonic()))
        self._written = max(self._written, message.number)
        self._synced = max(self._synced, message.synced)
        self._pass_on_stable()
        waiting: list[Removal] = []
        for removal in self._removals:
            if removal.is_safe(self._written, self._synced):
                removal.remove()
            else:
                waiting.append(removal)
        self._removals = waiting
        finalizable: list[Attempt] = []
        for each in self._saved_attempts:
            if each.written_at is None and each.number <= self._written:
                each.written_at = self._clock.monotonic()
        safe_until = self._clock.monotonic()
        if self._copy is not None:
            safe_until -= self._copy.lag_s
        while self._saved_attempts and self._is_safe(self._saved_attempts[0], safe_until):
            finalizable += self._saved_attempts.pop(0).attempts
        if message.error is not None:
            raise message.error
        return finalizable

    def _pass_on_stable(self) -> None:
        """Pass on what has waited for a checkpoint that is written, or for readers that are patient, copied.

        What those write elsewhere must be known wherever the run goes on, so that it is not written again.
        """
        copied = self._written
        if self._copy is not None:
            now = self._clock.monotonic()  # Before the lag: the thread may stand still between the two.
            lag = self._copy.lag_s
            safe_until = now - lag if lag <= _LATEST_COPY_S else float("inf")
            while self._uncopied and self._uncopied[0][1] <= safe_until:
                self._copied = self._uncopied.popleft()[0]
            copied = self._copied
        for buffer in self._parts.buffers.values():
            is_patient = buffer.stable is not None and buffer.stable.is_patient
            buffer.release_saved(copied if is_patient else self._written)

    def _is_safe(self, waiting: _Unfinalized, safe_until: float) -> bool:
        """Return whether no loss of power, or of the machine if there is a copy, takes a checkpoint away."""
        at = waiting.written_at
        return waiting.number <= self._synced and at is not None and at <= safe_until

    def before_end(self, state: str) -> None:
        """Save everything with the final state, and wait until it is on the disk."""
        assert self._writer is not None
        self._writer.wait_until_written()
        if state in ("finished", "drained"):
            self._forget_all(state)
        else:
            self._submit({"state": state})
        self._writer.finish()
        if self._copy is not None:
            self._copy.finish()
        if state in ("finished", "drained"):
            self._folder.forget_kept_states()
        self.written(CheckpointWritten(self._number, self._number))

    def close(self) -> None:
        """End the writer's thread."""
        if self._writer is not None:
            self._writer.close()

    def _forget_all(self, state: str) -> None:
        """Save that the run has finished: only its metrics stay, and where a drain has ended its sources."""
        assert self._writer is not None
        began_at = self._clock.monotonic()
        # It is a checkpoint: if its sync fails, the next start must not begin anew beside the metrics of this one.
        changes = self._new_transaction({"state": state, "saved_at": f"{self._clock.time():.3f}"})
        collected = Collected(self._contents, changes)
        self._parts.metrics.save(collected, self._metrics_owner)
        stays = ("metrics/", SOURCES)
        changes.cleared.update(owner for owner in self._folder.owners() if not owner.startswith(stays))
        self._removals += self._contents.drop_unused(set(), set(), changes)
        self._submitted = changes.number, began_at
        self._writer.submit(changes)

    def _new_transaction(self, meta: dict[str, str]) -> Transaction:
        self._number += 1
        return Transaction(self._number, meta=dict(meta))

    def _submit(self, meta: dict[str, str]) -> None:
        assert self._writer is not None
        began_at = self._clock.monotonic()
        changes = self._new_transaction(meta)
        collected = Collected(self._contents, changes)
        self._collect(collected)
        self._removals += self._contents.drop_unused(collected.used, collected.tokens, changes)
        if changes.is_empty and not self._unsaved:
            if self._awaited and self._notify is not None:  # The last checkpoint has it already.
                self._notify(CheckpointWritten(changes.number, self._synced))
            return
        changes.meta["saved_at"] = f"{self._clock.time():.3f}"
        if self._unsaved:
            self._saved_attempts.append(_Unfinalized(changes.number, self._unsaved))
            self._unsaved = []
        self._submitted = changes.number, began_at
        self._writer.submit(changes)

    def _collect(self, changes: Collected) -> None:
        running: dict[str, list[Bundle]] = {}
        for pool in self._parts.pools:
            for worker in pool.workers.values():
                for bundle in worker.bundles.values():
                    running.setdefault(bundle.stage.id, []).append(bundle)
        for buffer in self._parts.buffers.values():
            buffer.finish_work()  # first, since panes that fire meanwhile go to the queues
        for buffer_id, buffer in self._parts.buffers.items():
            buffer.save(changes, self._names.of_buffer(buffer_id))
        for stage in self._parts.stages:
            self._save_stage(stage, [*running.get(stage.id, ()), *stage.retries], changes)
        state_keys = StateKeys()
        for cell_key, cell in self._parts.state.take_changed():
            state_keys.read(cell_key)
            owner = f"state/{self._names.of_step(state_keys.step)}"
            if cell:
                changes.put(owner, cell_key, marshal.dumps(cell))
            else:
                changes.remove(owner, cell_key)
        self._parts.metrics.save(changes, self._metrics_owner)
        for buffer in self._parts.buffers.values():
            if buffer.stable is not None:
                buffer.stable.submitted(self._number)

    def _metrics_owner(self, stage_id: str) -> str:
        stage = next(stage for stage in self._parts.stages if stage.id == stage_id)
        return f"metrics/{self._names.of_stage(stage.plan)}"

    def _save_stage(self, stage: StageRun, bundles: list[Bundle], changes: Collected) -> None:
        entries: dict[str, list[tuple[float, BlockReference]]] = {read.transform_id: [] for read in stage.plan.reads}
        for bundle in bundles:
            for read_id, reference in _remaining(bundle, changes):
                entries[read_id].append((0.0, reference))
        for shard in stage.shards:
            for read_id, queue in entries.items():
                queue += [(0.0, changes.refer(block)) for block in shard.queued(read_id)]
        for read in stage.plan.reads:
            if (stable := self._parts.buffers[read.buffer_id].stable) is not None:
                entries[read.transform_id] += [(FROM_UPSTREAM, changes.refer(block)) for block in stable.blocks()]
        wall_minus_monotonic = self._clock.time() - self._clock.monotonic()
        for due_at, read_id, block in stage.delayed.entries():
            entries[read_id].append((round(due_at + wall_minus_monotonic, 3), changes.refer(block)))
        for read in stage.plan.reads:
            queue = entries[read.transform_id]
            self._put(f"queue/{self._names.of_read(stage.plan, read)}", marshal.dumps(queue) if queue else b"", changes)
        if stage.gate is not None:
            stage.gate.save(changes, self._names.of_gates(stage.plan))
        facts = stage.input_watermark, stage.output_watermark, stage.elements_done, stage.bundles_done
        self._put(f"stage/{self._names.of_stage(stage.plan)}", marshal.dumps(facts), changes)
        for shard in stage.shards:
            for (step, family), identity, record in shard.timers.take_changed():
                owner = f"timers/{self._names.of_step(step)}/{family}"
                if record is None:
                    changes.remove(owner, identity)
                else:
                    changes.put(owner, identity, marshal.dumps(tuple(record)))

    def _put(self, owner: str, value: bytes, changes: Collected) -> None:
        """Write the only row of an owner if it has changed. Empty: there is none."""
        if value != self._saved.get(owner, b""):
            self._saved[owner] = value
            if value:
                changes.put(owner, b"", value)
            else:
                changes.remove(owner, b"")


def _remaining(bundle: Bundle, changes: Collected) -> Iterator[tuple[str, BlockReference]]:
    """Yield what an uncommitted bundle still has to do: the read, and a reference.

    What splits took and queued is left out. What they took from a source's restriction waits for the end of the bundle,
    so it still counts as a part of it.
    """
    attempt = bundle.attempt
    if attempt is None or not (attempt.ends or attempt.primary_roots):
        for read_id, blocks in bundle.inputs.items():
            for block in blocks:
                yield read_id, changes.refer(block)
        return
    for read_id, blocks in bundle.kept_inputs(attempt).items():
        for block in blocks:
            # A primary part that a split made is in no other block: its bytes go into the row.
            yield read_id, changes.refer(block) if block.content.references > 1 else inlined(block)
            block.release()


def inlined(block: Block) -> BlockReference:
    """Return what stands for a block in rows, with all of its data."""
    return 0, block.data(), block.size, block.count, block.hold, block.weight, b""
