"""How a run stands at a moment, as events show it."""

from __future__ import annotations

from collections.abc import Callable
from typing import TYPE_CHECKING

from luminosity.engine.loop.bundle import Bundle
from luminosity.engine.loop.progress import StageProgress
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.loop.statuses import Statuses, distinct_labels
from luminosity.engine.loop.workers import PoolRun
from luminosity.engine.monitor.sampling import Sampler
from luminosity.events import DeviceView, MemoryUse, PoolInfo, PoolView, Snapshot, StageInfo, StageView

if TYPE_CHECKING:
    from luminosity.engine.loop.parts import RunParts


class Snapshots:
    """Looks at the loop's parts, on the loop's thread, and changes none of them."""

    def __init__(self, parts: RunParts, memory: Callable[[], MemoryUse], sampler: Sampler) -> None:
        self._parts = parts
        self._memory = memory
        self._sampler = sampler
        labels = distinct_labels(run.stage for run in parts.stages)
        self._label_of: Callable[[StageRun], str] = lambda stage: labels[stage.id]
        self._statuses = Statuses(parts.stages, parts.buffers, self._label_of)
        self._progress = {stage.id: StageProgress(stage, parts.metrics) for stage in parts.stages}

    def stages(self) -> tuple[StageInfo, ...]:
        return tuple(
            StageInfo(
                stage.id,
                self._label_of(stage),
                stage.pool.pool.name,
                tuple(writer.id for writer in self._statuses.before[stage.id]),
                tuple(writer.id for writer in self._statuses.of_side_inputs[stage.id]),
            )
            for stage in self._parts.stages
        )

    def pools(self) -> tuple[PoolInfo, ...]:
        pools = [run.pool for run in self._parts.pools]
        return tuple(
            PoolInfo(
                pool.name, pool.workers, pool.slots, tuple(dict.fromkeys(d for g in pool.device_groups for d in g))
            )
            for pool in pools
        )

    def take(self, run_id: str, seconds: float) -> Snapshot:
        stages = self._stage_views(seconds)
        return Snapshot(
            run_id,
            round(seconds, 3),
            stages=stages,
            pools=tuple(_pool_view(pool, seconds) for pool in self._parts.pools),
            devices=self._device_views(seconds),
            memory=self._memory(),
            processes=self._sampler.processes,
            seconds_left=max((s.seconds_left for s in stages if s.seconds_left is not None), default=None),
        )

    def _stage_views(self, seconds: float) -> tuple[StageView, ...]:
        running: dict[str, list[Bundle]] = {stage.id: [] for stage in self._parts.stages}
        workers = dict.fromkeys(running, 0)
        for pool in self._parts.pools:
            for worker in pool.workers.values():
                for bundle in worker.bundles.values():
                    running[bundle.stage.id].append(bundle)
                for stage_id in {bundle.stage.id for bundle in worker.bundles.values()}:
                    workers[stage_id] += 1
        return tuple(
            self._stage_view(stage, running[stage.id], workers[stage.id], seconds) for stage in self._parts.stages
        )

    def _stage_view(self, stage: StageRun, running: list[Bundle], workers: int, seconds: float) -> StageView:
        retrying = [bundle for lane in stage.lanes for bundle in lane.retries]
        queued = stage.queued + sum(bundle.count for bundle in retrying)
        waiting = queued + sum(bundle.count for bundle in running)
        status, by = self._statuses.of(stage, len(running))
        progress = self._progress[stage.id]
        progress.look(seconds, len(running), waiting, self._arrived(stage))
        return StageView(
            stage.id,
            status,
            by,
            elements=progress.elements,
            rate=round(progress.rate, 2),
            queued=queued,
            queued_bytes=stage.queued_bytes,
            running=len(running),
            workers=workers,
            busy_seconds=round(stage.busy.seconds / stage.pool.pool.slots, 3),
            fraction=None if progress.fraction is None else round(progress.fraction, 3),
            seconds_left=None if progress.seconds_left is None else round(progress.seconds_left, 1),
            inference=progress.inference,
        )

    def _arrived(self, stage: StageRun) -> float | None:
        """The part of the stage's input that has been written, if all that write it know how far they are."""
        arrived = min((self._parts.buffers[read.buffer_id].fraction_out() for read in stage.stage.reads), default=1.0)
        for writer in self._statuses.before[stage.id]:
            fraction = self._progress[writer.id].fraction
            if fraction is None:
                return None
            arrived = min(arrived, fraction)
        return arrived

    def _device_views(self, seconds: float) -> tuple[DeviceView, ...]:
        busy: dict[str, float] = {}
        for pool in self._parts.pools:
            for index, devices in enumerate(pool.pool.device_groups):
                for device in devices:
                    busy[device] = busy.get(device, 0.0) + pool.worker_busy[index].spanned_seconds
        views: list[DeviceView] = []
        for device, busy_seconds in busy.items():
            view = DeviceView(device, _part(busy_seconds, seconds))
            if use := self._sampler.devices.get(device):
                view = DeviceView(device, view.busy_fraction, use.utilization, use.memory_used, use.memory_total)
            views.append(view)
        return tuple(views)


def _pool_view(pool: PoolRun, seconds: float) -> PoolView:
    busy_seconds = sum(busy.spanned_seconds for busy in pool.worker_busy)
    return PoolView(
        pool.pool.name,
        workers=sum(worker.is_connected for worker in pool.workers.values()),
        busy=sum(len(worker.bundles) for worker in pool.workers.values()),
        slots=pool.pool.workers * pool.pool.slots,
        busy_seconds=round(busy_seconds, 3),
        busy_fraction=_part(busy_seconds, pool.pool.workers * seconds),
    )


def _part(some: float, whole: float) -> float:
    return round(min(1.0, some / whole), 3) if whole > 0 else 0.0
