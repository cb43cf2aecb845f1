"""What must hold between any two messages of the loop, and after the end of a run."""

from __future__ import annotations

import os

from luminosity.engine.data.event_time import MAX
from luminosity.engine.data.scripted_stream import Played, TestStreams
from luminosity.engine.loop.parts import RunParts
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.simulated.simulation import Simulation

__all__ = ["Broken", "Invariants"]

_PATIENCE_S = 3000.0  # of simulated time without anything done: far longer than workers freeze
_SMALL_FILES = {"quota", "main-classes"}
_OVER_BUDGET = 2.0  # times the budget: what moves may exceed it for a moment, see docs/architecture.md
_LEAST_ROOM = 1 << 20  # bytes: a block of each worker counts whatever the budget


class Broken(AssertionError):
    """Something does not hold that must."""


class Invariants:
    """Looks at all parts of a run. It changes nothing."""

    def __init__(self, parts: RunParts, simulation: Simulation) -> None:
        self._parts = parts
        self._simulation = simulation
        self._watermarks: dict[str, tuple[int, int]] = {}
        self._progress: tuple[int, ...] = ()
        self._progress_at = simulation.now
        if parts.test_streams is not None:
            self._watch(parts.test_streams)

    def _watch(self, streams: TestStreams) -> None:
        """Check before each event of a TestStream that nothing is left to do of the last ones."""
        play = streams.play

        def checked() -> Played:
            for buffer in self._parts.buffers.values():
                grouping = buffer.grouping
                is_complete = all(writer.output_watermark >= MAX for writer in buffer.writers)
                if grouping is not None and (grouping.pending or (is_complete and not grouping.is_exhausted)):
                    raise Broken(f"a TestStream goes on while {buffer.step!r} has elements to group")
            return play()

        streams.play = checked

    def check(self) -> None:
        """Raise :class:`Broken` if something does not hold between two messages."""
        running = 0
        for stage in self._parts.all_stages():
            running += stage.bundles_done
            self._check_watermarks(stage)
        workers = [worker for pool in self._parts.pools for worker in pool.workers.values()]
        if not workers or not all(worker.is_stopping for worker in workers):  # else the loop has ended
            self._check_bundles()
        self._check_bytes()
        self._check_progress(running)

    def check_end(self) -> None:
        """Raise :class:`Broken` if the run has left anything."""
        parts = self._parts
        left = {
            "bytes in memory": parts.blocks.ledger.used,
            "files of blocks": sorted(parts.blocks.files - parts.blocks.kept),
            "workers": [worker.id for pool in parts.pools for worker in pool.workers.values()],
            "holds of running bundles": [s.id for s in parts.all_stages() if s.running_holds.minimum < MAX],
            "bytes of state": parts.state.memory_bytes,
        }
        for what, found in left.items():
            if found:
                raise Broken(f"after the end, the run has {what} left: {found}")
        if parts.checkpoint is None:
            names = {name for name in os.listdir(parts.folders.memory) if name not in _SMALL_FILES}
            if names:
                raise Broken(f"after the end, files are left: {sorted(names)}")

    def _check_watermarks(self, stage: StageRun) -> None:
        now = stage.input_watermark, stage.output_watermark
        before = self._watermarks.get(stage.id, now)
        if now[0] < before[0] or now[1] < before[1]:
            raise Broken(f"the watermarks of stage {stage.plan.label!r} went back from {before} to {now}")
        if now[1] > now[0]:
            raise Broken(f"stage {stage.plan.label!r} lets {now[1]} out at the input watermark {now[0]}")
        self._watermarks[stage.id] = now
        running = min(stage.running_holds.minimum, stage.running_timer_holds.minimum)
        if stage.output_watermark >= MAX and running < MAX and not stage.plan.has_endless_input:
            raise Broken(f"stage {stage.plan.label!r} is at the end of time while bundles run")

    def _check_bundles(self) -> None:
        in_shards: dict[int, int] = {}
        for pool in self._parts.pools:
            if pool.connected != sum(w.is_connected and not w.has_exited for w in pool.workers.values()):
                raise Broken(f"pool {pool.plan.name!r} counts {pool.connected} connected workers")
            for worker in pool.workers.values():
                for instruction_id, bundle in worker.bundles.items():
                    attempt = bundle.attempt
                    if attempt is None or attempt.worker is not worker or attempt.instruction_id != instruction_id:
                        raise Broken(f"{instruction_id} in {worker.id} is not the attempt of its bundle")
                    for shard in bundle.shards:
                        in_shards[id(shard)] = in_shards.get(id(shard), 0) + 1
        for stage in self._parts.all_stages():
            for shard in stage.shards:
                if shard.running != in_shards.get(id(shard), 0):
                    raise Broken(f"a shard of {stage.plan.label!r} counts {shard.running} running bundles")
                if shard.is_exclusive and shard.running > 1:
                    raise Broken(f"two bundles of {stage.plan.label!r} have the same keys")
                if shard.count < 0 or shard.bytes < 0:
                    raise Broken(f"a shard of {stage.plan.label!r} has {shard.count} elements, {shard.bytes} bytes")

    def _check_bytes(self) -> None:
        ledger = self._parts.blocks.ledger
        most = _OVER_BUDGET * ledger.limit + _LEAST_ROOM
        if not 0 <= ledger.used <= most:
            raise Broken(f"{ledger.used} bytes are counted, with a budget of {ledger.limit}")
        for buffer in self._parts.buffers.values():
            if buffer.uncommitted_bytes < 0:
                raise Broken(f"{buffer.uncommitted_bytes} bytes of buffer {buffer.step!r} are uncommitted")

    def _check_progress(self, bundles: int) -> None:
        parts = self._parts
        progress = (
            bundles,
            sum(stage.usage.failed for stage in parts.all_stages()),
            sum(stage.output_watermark for stage in parts.all_stages()),
            sum(len(pool.workers) for pool in parts.pools),
        )
        if progress != self._progress:
            self._progress, self._progress_at = progress, self._simulation.now
            return
        idle_s = self._simulation.now - self._progress_at
        if idle_s > _PATIENCE_S + self._simulation.clock.set_back:
            raise Broken(f"nothing has been done for {idle_s:.0f} s: {self.describe()}")

    def describe(self) -> str:
        """Return what each stage waits for, for a report."""
        lines: list[str] = []
        for stage in self._parts.all_stages():
            if not stage.is_done():
                running = sum(shard.running for shard in stage.shards)
                lines.append(
                    f"{stage.plan.label!r} (ready: {stage.is_ready}) has {stage.queued} queued, {running} running, "
                    f"{len(stage.retries)} to retry, {len(stage.delayed)} delayed"
                )
        workers = [
            f"{w.id}: {list(w.bundles)}{'' if w.is_connected else ' starting'}"
            for pool in self._parts.pools
            for w in pool.workers.values()
        ]
        return "; ".join([*lines, f"workers {workers}"])
