"""What the pools of recorded runs were given and what they used."""

from __future__ import annotations

import math
from collections.abc import Iterable, Sequence
from dataclasses import dataclass, field

from luminosity.events import InferenceView, PoolInfo, Snapshot, StageInfo, StageView, WorkerEnded, WorkerStarted
from luminosity.operate.cost.bill import Bill, PoolBill, bill_of, start_cpu
from luminosity.operate.cost.prices import PriceSheet
from luminosity.runs.records import Record

__all__ = ["PipelineUse", "PoolUse", "measure", "quantile"]

_CPU_QUANTILE = 0.95
_CPU_WINDOW_S = 3.0  # snapshots read the CPU time up to half a second before or after their own time


@dataclass(frozen=True)
class PoolUse:
    """What a pool was given and what it used. Peaks are the largest of all runs, the rest is the newest run's."""

    info: PoolInfo
    stages: tuple[StageInfo, ...]
    bill: PoolBill | None  # None if the record does not say what its workers had
    peak_ram: int = 0  # bytes of one worker; 0 if not known
    cpu_per_second: float | None = None  # CPU seconds of one worker in a second while it works, p95
    cpu_is_mean: bool = False  # whether only the mean is known
    busy_seconds: float = 0.0
    cpu_seconds: float = 0.0  # while it was busy
    busy_fraction: float = 0.0  # of its workers' lifetimes
    inference: tuple[InferenceView, ...] = ()
    device_busy: tuple[float, ...] = ()  # of each of its devices, the part of the run
    device_memory: float | None = None  # the largest part of a device's memory that was used; None if not known
    device_was_used: bool | None = None  # None if the driver does not say

    @property
    def name(self) -> str:
        """The pool's name."""
        return self.info.name

    @property
    def workers(self) -> int:
        """How many workers were up at once."""
        return max(1, self.bill.peak_workers if self.bill is not None else self.info.workers)

    @property
    def cpu_while_busy(self) -> float | None:
        """CPU seconds in a busy second, on average: far below 1, its steps mostly wait. None if it is not known."""
        return self.cpu_seconds / self.busy_seconds if self.cpu_seconds and self.busy_seconds else None


@dataclass(frozen=True)
class PipelineUse:
    """What the runs of one pipeline used."""

    name: str
    records: tuple[Record, ...]  # oldest first
    pools: tuple[PoolUse, ...]
    bill: Bill  # of the newest run
    busy: dict[str, float]  # by stage: seconds of its workers
    cpu: dict[str, float]  # by stage: CPU seconds of its workers
    bundles: dict[str, int] = field(default_factory=dict[str, int])  # by stage: those committed
    first_start: float = 0.0  # seconds until the first worker was up
    start_cpu: float = 0.0  # CPU seconds that a worker takes beside its bundles, mostly to start; 0 if not known

    @property
    def newest(self) -> Record:
        """The newest run."""
        return self.records[-1]

    @property
    def cpu_seconds(self) -> float:
        """The CPU seconds of all stages."""
        return sum(self.cpu.values())

    @property
    def seconds(self) -> float:
        """The time that the newest run took."""
        return self.bill.seconds


def measure(records: Sequence[Record], prices: PriceSheet) -> PipelineUse:
    """Return what the runs of one pipeline were given and used."""
    runs = tuple(sorted(records, key=lambda record: record.started.started_at))
    newest = runs[-1]
    bill = bill_of(newest, prices)
    views = {view.id: view for view in newest.last.stages} if newest.last is not None else {}
    pools = tuple(_pool(pool, runs, bill, views) for pool in newest.started.pools)
    starts = [event.seconds for event in newest.happenings if isinstance(event, WorkerStarted)]
    return PipelineUse(
        newest.started.title,
        runs,
        pools,
        bill,
        busy={stage_id: view.busy_seconds for stage_id, view in views.items()},
        cpu={stage_id: view.cpu_seconds for stage_id, view in views.items()},
        bundles={stage_id: view.bundles for stage_id, view in views.items()},
        first_start=min(starts, default=0.0),
        start_cpu=start_cpu(newest),
    )


def quantile(values: Iterable[float], part: float) -> float | None:
    """Return the smallest value that at least ``part`` of all values do not exceed; None if there are none.

    >>> quantile([1.0, 2.0, 3.0, 4.0], 0.5), quantile([], 0.5)
    (2.0, None)
    """
    ordered = sorted(values)
    return ordered[max(0, math.ceil(part * len(ordered)) - 1)] if ordered else None


def _pool(pool: PoolInfo, runs: Sequence[Record], bill: Bill, views: dict[str, StageView]) -> PoolUse:
    newest = runs[-1]
    stages = tuple(stage for stage in newest.started.stages if stage.pool == pool.name)
    billed = next((each for each in bill.pools if each.pool == pool.name), None)
    busy = sum(views[stage.id].busy_seconds for stage in stages if stage.id in views)
    cpu_seconds = sum(views[stage.id].cpu_seconds for stage in stages if stage.id in views)
    cpu = quantile((rate for run in runs for rate in _cpu_rates(run, pool.name)), _CPU_QUANTILE)
    is_mean = cpu is None
    if cpu is None and busy:
        cpu = cpu_seconds / busy or None
    last = newest.last
    devices = [view for view in last.devices if view.id in pool.devices] if last is not None else []
    known = [view for view in devices if view.memory_total]
    peaks = [view.peak_utilization for view in devices if view.peak_utilization is not None]
    return PoolUse(
        pool,
        stages,
        billed,
        peak_ram=max((_peak_ram(run, pool.name, {stage.label for stage in stages}) for run in runs), default=0),
        cpu_per_second=cpu,
        cpu_is_mean=is_mean and cpu is not None,
        busy_seconds=busy,
        cpu_seconds=cpu_seconds,
        busy_fraction=min(1.0, busy / billed.worker_seconds) if billed is not None and billed.worker_seconds else 0.0,
        inference=tuple(view for stage in stages if stage.id in views for view in views[stage.id].inference),
        device_busy=tuple(
            view.mean_utilization if view.mean_utilization is not None else view.busy_fraction for view in devices
        ),
        device_memory=max(
            ((view.peak_memory or view.memory_used or 0) / (view.memory_total or 1) for view in known), default=None
        ),
        device_was_used=any(peaks) if peaks else None,
    )


def _peak_ram(run: Record, pool: str, labels: set[str]) -> int:
    """Return the largest resident memory of a worker: of the pool, or of the same stages in a run with other pools."""
    stages = {stage.id for stage in run.started.stages if stage.label in labels}
    snapshots = _snapshots(run)
    seen = [view.peak_resident for snapshot in snapshots for view in snapshot.workers if view.pool == pool]
    seen += [event.peak_resident for event in run.happenings if isinstance(event, WorkerEnded) and event.pool == pool]
    if run.last is not None:
        seen += [view.peak_resident for view in run.last.stages if view.id in stages]
    return max(seen, default=0)


def _cpu_rates(run: Record, pool: str) -> Iterable[float]:
    """Yield the CPU seconds per second of each worker over a few seconds in which it had work."""
    since: dict[str, tuple[float, float]] = {}  # by worker: the time and its CPU seconds
    for snapshot in _snapshots(run):
        running = {view.worker: view.cpu_seconds for view in snapshot.workers if view.pool == pool and view.running}
        for worker, cpu_seconds in running.items():
            start, before = since.setdefault(worker, (snapshot.seconds, cpu_seconds))
            if (seconds := snapshot.seconds - start) >= _CPU_WINDOW_S:
                yield max(0.0, cpu_seconds - before) / seconds
                since[worker] = snapshot.seconds, cpu_seconds
        since = {worker: found for worker, found in since.items() if worker in running}


def _snapshots(run: Record) -> list[Snapshot]:
    return [*run.snapshots, *([run.last] if run.last is not None else [])]
