"""What each stage does or waits for, as the loop's parts show it."""

from __future__ import annotations

from collections.abc import Callable, Iterable, Sequence

from luminosity.engine.data.world import Clock
from luminosity.engine.loop.buffers import BufferRun
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.loop.stage_input import StageInput
from luminosity.events import Status

__all__ = ["Statuses"]


class Statuses:
    """Finds out what each stage does or waits for."""

    def __init__(
        self,
        stages: Sequence[StageRun],
        buffers: dict[bytes, BufferRun],
        clock: Clock,
        label_of: Callable[[StageInput], str],
    ) -> None:
        self._clock = clock
        self._label_of = label_of
        self.writers_before = {run.id: _writers(buffers[read.buffer_id] for read in run.plan.reads) for run in stages}
        self.side_input_writers = {
            run.id: _writers(buffers[side_input.buffer_id] for side_input in run.plan.side_inputs) for run in stages
        }
        self._behind = {run.id: [buffers[write.buffer_id] for write in run.plan.writes] for run in stages}

    def status(self, stage: StageRun, running: int) -> tuple[Status, tuple[str, ...]]:
        """Return the status of a stage with ``running`` bundles, and the labels of the stages or pool it waits for."""
        if stage.is_done():
            return "done", ()
        if not stage.is_ready:
            return "waiting", self._unfinished(self.side_input_writers[stage.id])
        if not running and stage.gate is not None and stage.gate.count and not stage.queued:
            return "waiting", self._unfinished(self.side_input_writers[stage.id])
        has_work = stage.has_work(self._clock.micros())
        full = [reader for buffer in self._behind[stage.id] if (reader := buffer.full_reader())] if has_work else []
        if running:  # a queue that is full only with what its own bundles are about to write holds nobody back
            full = [reader for reader in full if reader.queued_bytes]
        if full:
            return "held back", tuple(dict.fromkeys(map(self._label_of, full)))
        if running:
            return "busy", ()
        is_worker_free = stage.pool.has_free_slot()
        before = self._unfinished(self.writers_before[stage.id])
        # A sink with little input waits for more, in order to write fewer files.
        if before and (not has_work or (stage.plan.is_sink and is_worker_free)):
            return "starved", before
        if has_work:
            return ("busy", ()) if is_worker_free else ("needs worker", (stage.pool.plan.name,))
        return "waiting", ()  # for a timer or a delayed element

    def _unfinished(self, stages: Iterable[StageInput]) -> tuple[str, ...]:
        return tuple(self._label_of(stage) for stage in stages if not stage.is_done())


def _writers(buffers: Iterable[BufferRun]) -> list[StageInput]:
    return list(dict.fromkeys(writer for buffer in buffers for writer in buffer.writers))
