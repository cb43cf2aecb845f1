"""What each stage does or waits for, and because of whom."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Sequence

from luminosity.engine.loop.buffers import BufferRun
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.plan.graph import Stage
from luminosity.events import Status


def distinct_labels(stages: Iterable[Stage]) -> dict[str, str]:
    """A label for each stage's id; of several with the same label, each with its own innermost step."""
    stages = list(stages)
    common = [stage.label for stage in stages]
    labels: dict[str, str] = {}
    for stage in stages:
        label = stage.label
        if common.count(label) > 1 and stage.steps:
            label = f"{label} ({stage.steps[-1].rsplit('/', 1)[-1].split('(', 1)[0]})"
        taken = set(labels.values())
        labels[stage.id] = next(name for name in (label, f"{label} {stage.id}") if name not in taken)
    return labels


class Statuses:
    """Knows who stands before and behind each stage."""

    def __init__(
        self, stages: Sequence[StageRun], buffers: dict[bytes, BufferRun], label_of: Callable[[StageRun], str]
    ) -> None:
        self._label_of = label_of
        self.before = {run.id: _writers(buffers[read.buffer_id] for read in run.stage.reads) for run in stages}
        self.of_side_inputs = {
            run.id: _writers(buffers[side_input.buffer_id] for side_input in run.stage.side_inputs) for run in stages
        }
        self._behind = {run.id: [buffers[write.buffer_id] for write in run.stage.writes] for run in stages}

    def of(self, stage: StageRun, running: int) -> tuple[Status, tuple[str, ...]]:
        """What ``stage``, of which ``running`` bundles run, does or waits for, and whom it waits for."""
        if stage.is_done():
            return "done", ()
        if not stage.is_ready:
            return "waiting", self._unfinished(self.of_side_inputs[stage.id])
        has_work = stage.has_work(time.time_ns() // 1000)
        full = [reader for buffer in self._behind[stage.id] if (reader := buffer.holds_back())] if has_work else []
        if full:
            return "held back", tuple(dict.fromkeys(map(self._label_of, full)))
        if running:
            return "busy", ()
        is_worker_free = stage.pool.free_slots() > 0
        before = self._unfinished(self.before[stage.id])
        # A sink with a little input waits for more, to write fewer files.
        if before and (not has_work or (stage.stage.is_sink and is_worker_free)):
            return "starved", before
        if has_work:
            return ("busy", ()) if is_worker_free else ("needs worker", (stage.pool.pool.name,))
        return "waiting", ()  # for time to pass

    def _unfinished(self, stages: Iterable[StageRun]) -> tuple[str, ...]:
        return tuple(self._label_of(stage) for stage in stages if not stage.is_done())


def _writers(buffers: Iterable[BufferRun]) -> list[StageRun]:
    return list(dict.fromkeys(writer for buffer in buffers for writer in buffer.writers))
