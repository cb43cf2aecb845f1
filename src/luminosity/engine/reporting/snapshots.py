"""Snapshots of a run: the status of its stages, pools, devices and memory at one moment."""

from __future__ import annotations

import time
from collections.abc import Callable, Iterable, Mapping, Sequence
from dataclasses import asdict

from luminosity.engine.loop.bundle import Bundle
from luminosity.engine.loop.metrics import RunMetrics
from luminosity.engine.loop.parts import RunParts
from luminosity.engine.loop.stage import StageRun
from luminosity.engine.loop.stage_input import StageInput
from luminosity.engine.loop.workers import PoolRun
from luminosity.engine.plan.graph import Stage
from luminosity.engine.reporting.lag_watch import LagWatch
from luminosity.engine.reporting.progress import StageProgress, StreamProgress
from luminosity.engine.reporting.statuses import Statuses
from luminosity.engine.reporting.step_metrics import Views, user_metrics
from luminosity.engine.resources.hints import largest
from luminosity.engine.workers.failure import describe_location
from luminosity.engine.workers.sdk.bundle_report import Stall
from luminosity.events import (
    CheckpointView,
    DeviceView,
    MemoryUse,
    MetricView,
    NodeView,
    PoolInfo,
    PoolView,
    ProcessMemory,
    Resources,
    Snapshot,
    StageInfo,
    StageView,
    StallView,
)
from luminosity.runs.manifest.masking import mask_text
from luminosity.runs.sampling import Sampler

__all__ = ["Snapshots", "pool_view", "stall_view"]

_STEPS_EVERY_S = 2.0  # between two looks at the figures of steps, which change slowly
_MOST_NODES = 100  # in a snapshot
_MOST_STALLS = 4  # of a stage: with hundreds of workers, all may wait for the same thing


class Snapshots:
    """Describes the loop's parts as events. Call it on the loop's thread; it changes none of the parts."""

    def __init__(
        self,
        parts: RunParts,
        sampler: Sampler,
        asked: Mapping[str, Resources],
        watch: LagWatch | None = None,
    ) -> None:
        """``asked`` is what the resource hints of each stage ask for, by the id of its environment.

        ``watch`` knows how much waits in the partitions of sources.
        """
        self.parts = parts
        self.nodes: tuple[NodeView, ...] = ()  # all that the cluster has for the run, at the last snapshot
        self._peak = 0  # of the memory of all processes of a cluster
        self._asked = asked
        self._sampler = sampler
        labels = _distinct_labels(run.plan for run in parts.stages)
        self._label_of: Callable[[StageInput], str] = lambda stage: labels[stage.id]
        self._statuses = Statuses(parts.stages, parts.buffers, parts.clock, self._label_of)
        self._progress = {stage.id: StageProgress(stage, parts.metrics, watch) for stage in parts.stages}
        streams = [stage for stage in parts.stages if stage.plan.has_endless_input]
        self._steps: dict[str, tuple[tuple[float, ...], tuple[int, ...]]] = {}  # by stage: time and elements of steps
        self._steps_at: dict[str, float] = {}  # by stage: when to look at them again
        self._streams = {stage.id: StreamProgress(stage, parts.metrics) for stage in streams}

    def stages(self) -> tuple[StageInfo, ...]:
        """Return what is known of the stages when the run starts."""
        return tuple(
            StageInfo(
                stage.id,
                self._label_of(stage),
                stage.pool.plan.name,
                tuple(writer.id for writer in self._statuses.writers_before[stage.id]),
                tuple(writer.id for writer in self._statuses.side_input_writers[stage.id]),
                stage.plan.has_endless_input,
                stage.plan.steps,
                self._asked.get(stage.plan.environment_id, Resources()),
                reads_groups=any(self.parts.buffers[r.buffer_id].grouping is not None for r in stage.plan.reads),
            )
            for stage in self.parts.stages
        )

    def pools(self) -> tuple[PoolInfo, ...]:
        """Return what is known of the pools when the run starts."""
        asked: dict[str, list[Resources]] = {}
        for stage in self.stages():
            asked.setdefault(stage.pool, []).append(stage.asked)
        return tuple(
            PoolInfo(
                pool.name,
                pool.workers,
                pool.slots,
                tuple(dict.fromkeys(device for group in pool.device_groups for device in group)),
                cores_per_worker=round(pool.cores_per_worker, 3),
                ram_per_worker=pool.ram_per_worker,
                asked=largest(asked.get(pool.name, ())),
                python="" if pool.python is None else pool.python.prefix,
            )
            for pool in (run.plan for run in self.parts.pools)
        )

    def take(
        self, run_id: str, seconds: float, *, is_last: bool = False, metrics: Sequence[MetricView] = ()
    ) -> Snapshot:
        """Return the state of the run ``seconds`` after its start. ``is_last``: the run has ended."""
        stages = self._stage_views(seconds, is_last)
        cluster = self.parts.cluster
        if cluster is not None:
            self._look_at_nodes()
            self.nodes = cluster.nodes()
        running = {
            worker.id: tuple(dict.fromkeys(b.stage.id for b in worker.bundles.values() if b.stage.id in self._progress))
            for pool in self.parts.pools
            for worker in pool.workers.values()
        }
        return Snapshot(
            run_id,
            round(seconds, 3),
            stages=stages,
            pools=tuple(pool_view(pool, seconds) for pool in self.parts.pools),
            devices=self._device_views(seconds),
            memory=self._memory(),
            processes=self._sampler.processes if cluster is None else self._processes_of_all_nodes(),
            seconds_left=_seconds_left(stages),
            workers=self._sampler.workers.views(None if is_last else running),
            checkpoint=self.checkpoint(seconds),
            metrics=tuple(metrics),
            nodes=self.nodes[:_MOST_NODES],
        )

    def _look_at_nodes(self) -> None:
        """Pass on what workers on other machines have said of themselves."""
        for pool in self.parts.pools:
            for worker in pool.workers.values():
                if worker.is_connected:
                    self._sampler.workers.reported(worker.id, worker.cpu_seconds, worker.resident, worker.pid)

    def _processes_of_all_nodes(self) -> ProcessMemory:
        """Return the memory of this process and of all workers, as far as they have said."""
        used = self._sampler.processes.used
        used += sum(worker.resident for pool in self.parts.pools for worker in pool.workers.values())
        self._peak = max(self._peak, used)
        return ProcessMemory(used, self._peak)

    def _memory(self) -> MemoryUse:
        ledger, cluster = self.parts.blocks.ledger, self.parts.cluster
        objects = cluster.object_bytes() if cluster is not None else 0
        return MemoryUse(ledger.used, ledger.peak, ledger.limit, ledger.spilled, objects)

    def checkpoint(self, seconds: float) -> CheckpointView | None:
        """Return the state of the checkpoints of a durable run, ``seconds`` after its start."""
        if self.parts.checkpoint is None:
            return None
        progress = self.parts.checkpoint.progress
        last_at = None if progress.last_at is None else seconds - (time.monotonic() - progress.last_at)
        return CheckpointView(
            progress.count,
            None if last_at is None else round(max(0.0, last_at), 3),
            round(progress.last_seconds, 6),
            self._sampler.folder_bytes,
            None if progress.copy_lag_s is None else round(progress.copy_lag_s, 3),
        )

    def inference(self) -> Views:
        """Return how models do, by stage, when the last snapshot was taken."""
        return {stage_id: progress.inference for stage_id, progress in self._progress.items()}

    def user_metrics(self) -> list[MetricView]:
        """Return what user code has counted in committed bundles."""
        steps = (step for stage in self.parts.stages for step in stage.plan.steps)
        return user_metrics(self.parts.metrics.by_stage(), steps)

    def _stage_views(self, seconds: float, is_last: bool) -> tuple[StageView, ...]:
        running: dict[str, list[Bundle]] = {stage.id: [] for stage in self.parts.stages}
        workers = dict.fromkeys(running, 0)
        for pool in self.parts.pools:
            for worker in pool.workers.values():
                bundles = [bundle for bundle in worker.bundles.values() if bundle.stage.id in running]
                for bundle in bundles:
                    running[bundle.stage.id].append(bundle)
                for stage_id in {bundle.stage.id for bundle in bundles}:
                    workers[stage_id] += 1
        return tuple(
            self._stage_view(stage, running[stage.id], workers[stage.id], seconds, is_last)
            for stage in self.parts.stages
        )

    def _stage_view(
        self, stage: StageRun, running: list[Bundle], workers: int, seconds: float, is_last: bool
    ) -> StageView:
        retrying = stage.retries
        waiting_for_sides = stage.gate.count if stage.gate is not None else 0
        queued = stage.queued + waiting_for_sides + sum(bundle.count for bundle in retrying)
        waiting = queued + sum(bundle.left for bundle in running)
        status, by = self._statuses.status(stage, len(running))
        progress, stream = self._progress[stage.id], self._streams.get(stage.id)
        sample = stage.usage.sample.kept if is_last else []  # not while the run goes on: it would swell every snapshot
        stalls = _stalls(running)
        is_stalled = any(stall.is_stalled for stall in stalls)
        if is_last or seconds >= self._steps_at.get(stage.id, 0.0):
            self._steps_at[stage.id] = seconds + _STEPS_EVERY_S
            self._steps[stage.id] = _of_steps(stage, self.parts.metrics)
        step_seconds, step_elements = self._steps[stage.id]
        progress.update(seconds, len(running), waiting, self._arrived(stage), is_stalled=is_stalled)
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
            busy_seconds=round(stage.busy.seconds / stage.pool.plan.slots, 3),
            fraction=None if progress.fraction is None else round(progress.fraction, 3),
            seconds_left=None if progress.seconds_left is None else round(progress.seconds_left, 1),
            inference=progress.inference,
            stream=stream.view(None if is_last else running, self.parts.clock.micros()) if stream else None,
            kafka=progress.kafka.views(seconds, is_last=is_last),
            bundles=stage.bundles_done,
            retries=stage.usage.failed,
            cpu_seconds=round(stage.usage.cpu_seconds, 6),
            peak_resident=stage.usage.peak_resident,
            output_bytes=stage.usage.output_bytes,
            stalls=stalls,
            bundle_seconds=tuple(round(seconds, 6) for seconds, _ in sample),
            bundle_elements=tuple(elements for _, elements in sample),
            step_seconds=step_seconds,
            step_elements=step_elements,
        )

    def _arrived(self, stage: StageRun) -> float | None:
        """Return the fraction of the stage's input that has been written, or None if a writer's progress is unknown."""
        arrived = min((self.parts.buffers[read.buffer_id].fraction_out() for read in stage.plan.reads), default=1.0)
        for writer in self._statuses.writers_before[stage.id]:
            fraction = self._progress[writer.id].fraction
            if fraction is None:
                return None
            arrived = min(arrived, fraction)
        return arrived

    def _device_views(self, seconds: float) -> tuple[DeviceView, ...]:
        busy: dict[str, float] = {}
        for pool in self.parts.pools:
            for index, devices in enumerate(pool.plan.device_groups):
                for device in devices:
                    busy[device] = busy.get(device, 0.0) + pool.worker_busy[index].spanned_seconds
        views: list[DeviceView] = []
        for device, busy_seconds in busy.items():
            use = self._sampler.devices.get(device)
            views.append(DeviceView(device, _fraction(busy_seconds, seconds), **({} if use is None else asdict(use))))
        return tuple(views)


def pool_view(pool: PoolRun, seconds: float) -> PoolView:
    """Return the state of a pool ``seconds`` after the run's start."""
    busy_seconds = sum(busy.spanned_seconds for busy in pool.worker_busy)
    starting = [worker.process for worker in pool.workers.values() if not worker.is_connected]
    waiting = [words for process in starting if process is not None and (words := process.waits_for())]
    return PoolView(
        pool.plan.name,
        workers=sum(worker.is_connected for worker in pool.workers.values()),
        # Sources of streams have slots of their own, and mostly wait.
        busy=sum(not b.stage.is_source for worker in pool.workers.values() for b in worker.bundles.values()),
        slots=max(len(pool.places), len(pool.workers)) * pool.plan.slots,
        busy_seconds=round(busy_seconds, 3),
        busy_fraction=_fraction(busy_seconds, pool.most_workers() * seconds),
        waiting=len(waiting),
        waits_for=waiting[0] if waiting else "",
        wanted=pool.wanted if pool.plan.lease is not None else 0,
    )


def stall_view(stall: Stall) -> StallView:
    """Return what views and records show of a bundle that takes long."""
    return StallView(
        stall.step,
        round(stall.seconds, 1),
        stall.doing,
        stall.is_stalled,
        worker=stall.worker,
        pid=stall.pid,
        node=stall.node,
        state=stall.state,
        waits_for=mask_text(stall.waits_for),
        place=describe_location(stall.location) if stall.location else "",
    )


def _of_steps(stage: StageRun, metrics: RunMetrics) -> tuple[tuple[float, ...], tuple[int, ...]]:
    """Return the time and the output of the steps of a stage. Empty if nothing is known yet.

    Bundles that share a worker share its time, as in the stage's own.
    """
    seconds, elements = metrics.of_steps(stage.id)
    slots = stage.pool.plan.slots
    outputs = {each.unique_name: each.outputs.values() for each in stage.plan.transforms}
    steps = stage.plan.steps
    times = tuple(round(seconds.get(step, 0.0) / slots, 3) for step in steps)
    counts = tuple(sum(elements.get(output, 0) for output in outputs.get(step, ())) for step in steps)
    return times if any(times) else (), counts if any(counts) else ()


def _stalls(running: Iterable[Bundle]) -> tuple[StallView, ...]:
    found = [bundle.attempt.stall for bundle in running if bundle.attempt is not None and bundle.attempt.stall]
    found.sort(key=lambda stall: (stall.is_stalled, stall.seconds), reverse=True)
    return tuple(stall_view(stall) for stall in found[:_MOST_STALLS])


def _seconds_left(stages: Sequence[StageView]) -> float | None:
    """Return the longest time that a stage needs; None if none is known, or a stage may need any time."""
    if any(stage.stalled_seconds for stage in stages):
        return None
    return max((stage.seconds_left for stage in stages if stage.seconds_left is not None), default=None)


def _fraction(some: float, whole: float) -> float:
    return round(min(1.0, some / whole), 3) if whole > 0 else 0.0


def _distinct_labels(stages: Iterable[Stage]) -> dict[str, str]:
    """Return a label for each stage id. Stages with equal labels are told apart by their innermost steps."""
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
