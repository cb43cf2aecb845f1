"""Predicted bills: the same work with other hints or another number of workers, on the same machine.

The pools of the prediction come from the code that sizes the pools of a run. A run's time is a fixed part plus the time
of its slowest pool, which is the measured work of its stages divided by its workers, but not less than the measured CPU
seconds divided by the cores. More workers also take time to start. Memory is the measured one where more than the
given one was used.
"""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, replace
from typing import Any

from luminosity._shared.accelerators import parse_accelerator
from luminosity._shared.text import parse_size
from luminosity.engine.options import EngineConfig
from luminosity.engine.resources.hints import Needs
from luminosity.engine.resources.machine import Machine
from luminosity.engine.resources.pools import Assignment, Pool, assign
from luminosity.events import PoolInfo, Resources, StageInfo
from luminosity.operate.advice.measured import PipelineUse, PoolUse
from luminosity.operate.cost.bill import Bill, PoolBill, bill_of_usage, within_machine, worker_usage
from luminosity.operate.cost.prices import NO_USAGE, PriceSheet, Usage

__all__ = [
    "asked_needs",
    "can_predict",
    "cores_for",
    "fixed_seconds",
    "most_workers",
    "needs_with",
    "predict",
    "uniform_needs",
    "workers_for",
]

_HOUR = 3600.0
_SATURATED = 0.8  # of the cores: from here on, workers wait for each other
_MANY_THREADS = 1.05  # CPU seconds in a second: more than one thread computes; the kernel counts in steps of 10 ms
_FEW_BUNDLES = 2  # for each worker: a stage with fewer of them can't use more workers
_RAM_LIMIT = 0.9  # of the machine, for all workers: the runner and the system need some


@dataclass(frozen=True)
class _Stage:
    """What the sizing of pools has to know of a stage."""

    id: str
    label: str
    is_source: bool = False


def can_predict(use: PipelineUse) -> bool:
    """Return whether the record says enough: the machine, the shares of workers, and the work of stages."""
    machine = use.newest.started.machine
    return bool(use.bill.pools and machine.cores and machine.ram and use.busy and sum(use.busy.values()) > 0)


def predict(
    use: PipelineUse,
    needs: Mapping[str, Needs],
    prices: PriceSheet,
    *,
    cpu_workers: int | None = None,
    accelerators: int | None = None,
) -> Bill:
    """Return the bill of the newest run with other needs of its stages, by their ids."""
    started = use.newest.started
    machine = _machine(use, accelerators)
    given = {stage.id: pool for pool in use.pools for stage in pool.stages}
    config = _config(cpu_workers if cpu_workers is not None else _cpu_workers(use))
    assigned = _assigned(use, needs, machine, config)
    pools = {id(each.pool): each.pool for each in assigned.values()}
    members = {key: [s for s in started.stages if id(assigned[s.id].pool) == key] for key in pools}
    workers = {key: _workers(pool, [given[stage.id] for stage in members[key]]) for key, pool in pools.items()}
    usable = _usable_cores(use)
    slowest = max(
        _pool_seconds(use, [(stage, given[stage.id]) for stage in members[key]], workers[key], pool.cores_per_worker)
        for key, pool in pools.items()
    )
    more = max(0, sum(workers.values()) - sum(pool.workers for pool in use.pools))
    starts = more * use.start_cpu / started.machine.cores
    seconds = fixed_seconds(use) + starts + max(slowest, use.cpu_seconds / usable)
    up = max(0.0, seconds - use.first_start)
    lifetimes = {key: workers[key] * up * max(_lived(given[stage.id], use) for stage in members[key]) for key in pools}
    ones = {
        key: worker_usage(
            _info(pool, members[key]),
            started.machine,
            peak=max(given[stage.id].peak_ram for stage in members[key]),
            cores=sum(use.cpu.get(stage.id, 0.0) for stage in members[key]) / max(1e-9, lifetimes[key]),
        )
        for key, pool in pools.items()
    }
    all_used = sum((ones[key].times(lifetimes[key] / _HOUR) for key in pools), Usage())
    all_kept = sum((ones[key].times(workers[key] * seconds / _HOUR) for key in pools), Usage())
    bills: list[PoolBill] = []
    kept = NO_USAGE
    for key, pool in pools.items():
        lifetime = lifetimes[key]
        used = within_machine(ones[key].times(lifetime / _HOUR), all_used, started.machine, seconds)
        whole = within_machine(ones[key].times(workers[key] * seconds / _HOUR), all_kept, started.machine, seconds)
        kept += whole
        costs = prices.costs(used)
        high = max(*costs, *prices.costs(whole))
        bills.append(PoolBill(pool.name, costs[0], min(costs), high, workers[key], workers[key], lifetime, used))
    usage = sum((each.usage for each in bills), Usage())
    return bill_of_usage(usage, prices, tuple(bills), kept, seconds=seconds)


def asked_needs(use: PipelineUse) -> dict[str, Needs]:
    """Return the needs of all stages as the newest run had them."""
    return {stage.id: _asked(stage, pool) for pool in use.pools for stage in pool.stages}


def uniform_needs(use: PipelineUse) -> dict[str, Needs]:
    """Return the needs of all stages if each worker gets the most that any step asks for."""
    every = list(asked_needs(use).values())
    with_device = max(every, key=lambda needs: needs.accelerator_count)
    most = Needs(
        min_ram_bytes=max(needs.min_ram_bytes for needs in every),
        cpu_count=max(needs.cpu_count for needs in every),
        accelerator_count=with_device.accelerator_count,
        accelerator_type=with_device.accelerator_type,
    )
    return {stage.id: most for stage in use.newest.started.stages}


def needs_with(use: PipelineUse, hints: Mapping[str, Mapping[str, Any]]) -> dict[str, Needs]:
    """Return the needs of all stages with other hints, by the names of their pools."""
    found: dict[str, Needs] = {}
    for pool in use.pools:
        changed = hints.get(pool.name, {})
        for stage in pool.stages:
            needs = _asked(stage, pool)
            if "min_ram" in changed:
                needs = replace(needs, min_ram_bytes=parse_size(changed["min_ram"]) or 0)
            if "cpu_count" in changed:
                needs = replace(needs, cpu_count=int(changed["cpu_count"]))
            if "accelerator" in changed:
                count, kind = parse_accelerator(changed["accelerator"]) or (0, "")
                needs = replace(needs, accelerator_count=count, accelerator_type=kind)
            found[stage.id] = needs
    return found


def fixed_seconds(use: PipelineUse) -> float:
    """Return the part of a run's time that more workers don't shorten, such as start-up and model loads."""
    slowest = max((_as_run_seconds(use, pool) for pool in use.pools), default=0.0)
    return max(0.0, use.seconds - slowest)


def most_workers(use: PipelineUse, a_core: int) -> int:
    """Return how many CPU workers the machine may run: some for each core, within its memory."""
    machine = use.newest.started.machine
    cpu = [pool for pool in use.pools if not pool.info.devices]
    beside = sum(pool.workers * pool.peak_ram for pool in use.pools if pool.info.devices)
    largest = max((pool.peak_ram for pool in cpu), default=0)
    if not largest:
        return 0
    return max(0, min(a_core * machine.cores, int((_RAM_LIMIT * machine.ram - beside) / largest)))


def workers_for(use: PipelineUse, deadline_s: float) -> dict[str, int] | None:
    """Return for each pool the number of workers with which a run ends in time; None if no number does."""
    left = deadline_s - fixed_seconds(use)
    if left <= 0:
        return None
    return {pool.name: _enough(pool.busy_seconds, left) for pool in use.pools}


def cores_for(use: PipelineUse, deadline_s: float) -> int:
    """Return how many cores the measured CPU seconds need to end in time."""
    return _enough(use.cpu_seconds, deadline_s - fixed_seconds(use))


def _pool_seconds(
    use: PipelineUse, stages: Sequence[tuple[StageInfo, PoolUse]], workers: int, cores_each: float
) -> float:
    """Return how long the stages of a pool take with so many workers.

    A stage that ran in a few bundles can't use more workers than it had bundles. A stage whose workers computed in
    several threads, and waited for cores, takes less time in a worker with more cores.
    """
    total = longest = 0.0
    for stage, pool in stages:
        busy = use.busy.get(stage.id, 0.0)
        if (pool.cpu_per_second or 0.0) > _MANY_THREADS and _is_saturated(use):
            computed = use.cpu.get(stage.id, 0.0)
            threads = math.ceil((pool.cpu_per_second or 1.0) - _MANY_THREADS + 1.0)
            busy = min(busy, computed / max(1e-9, min(cores_each, threads)))
        total += busy
        bundles = use.bundles.get(stage.id, 0)
        is_serial = 0 < bundles < _FEW_BUNDLES * pool.workers
        longest = max(longest, busy / min(workers, bundles) if is_serial else 0.0)
    return max(longest, total / workers)


def _as_run_seconds(use: PipelineUse, pool: PoolUse) -> float:
    return _pool_seconds(use, [(stage, pool) for stage in pool.stages], pool.workers, pool.info.cores_per_worker)


def _assigned(
    use: PipelineUse, needs: Mapping[str, Needs], machine: Machine, config: EngineConfig
) -> dict[str, Assignment]:
    stages = [(_Stage(stage.id, stage.label), needs[stage.id]) for stage in use.newest.started.stages]
    return assign(stages, machine, config, is_quiet=True)


def _is_saturated(use: PipelineUse) -> bool:
    """Return whether the workers wanted as many cores as the machine has."""
    wanted = sum(pool.workers * (pool.cpu_per_second or 0.0) for pool in use.pools)
    return wanted >= _SATURATED * use.newest.started.machine.cores


def _usable_cores(use: PipelineUse) -> float:
    """Return the cores that the run could use: those that it did, if its workers wanted as many as the machine has.

    Other processes take their part of the cores, and more workers don't change that.
    """
    cores = use.newest.started.machine.cores
    worked = use.seconds - fixed_seconds(use)
    if not _is_saturated(use) or worked <= 0 or not use.cpu_seconds:
        return cores
    return min(float(cores), use.cpu_seconds / worked)


def _enough(work: float, seconds: float) -> int:
    return max(1, math.ceil(work / seconds - 1e-9)) if seconds > 0 else 1


def _asked(stage: StageInfo, pool: PoolUse) -> Needs:
    """Return what a stage got: what it asked for, an accelerator that it ran on, and the bundles of a worker."""
    asked = stage.asked
    accelerator = asked.accelerator or ("count:1" if pool.info.devices else "")
    count, kind = (parse_accelerator(accelerator) or (0, "")) if accelerator else (0, "")
    bundles = pool.info.slots if pool.info.slots > 1 else 0
    return Needs(asked.ram, int(asked.cores), count, kind, bundles)


def _machine(use: PipelineUse, accelerators: int | None) -> Machine:
    machine = use.newest.started.machine
    ids = tuple(
        dict.fromkeys([device.id for device in machine.devices] + [d for p in use.pools for d in p.info.devices])
    )
    return Machine(machine.cores, machine.ram, ids if accelerators is None else ids[:accelerators])


def _config(cpu_workers: int | None) -> EngineConfig:
    return EngineConfig(
        cpu_workers=cpu_workers,
        accelerators=None,
        missing_resources="warn",
        progress="off",
        worker_start="auto",
        threads_per_worker=1,
        memory_budget=0,
    )


def _cpu_workers(use: PipelineUse) -> int | None:
    """Return ``--cpu_workers`` of the run: None if its pools are those that it gets without the option."""
    assigned = _assigned(use, asked_needs(use), _machine(use, None), _config(None))
    usual = {id(each.pool): each.pool for each in assigned.values() if not each.pool.device_groups}
    found = [pool.info.workers for pool in use.pools if not pool.info.devices]
    return None if sorted(found) == sorted(pool.workers for pool in usual.values()) else sum(found) or None


def _workers(pool: Pool, given: list[PoolUse]) -> int:
    """Return how many workers a predicted pool starts: all that it may, unless its stages have never used them all."""
    most = max((each.workers for each in given), default=1)
    were_enough = all(each.workers < each.info.workers for each in given)
    if were_enough:
        return max(1, min(pool.workers, most))
    return max(1, pool.workers, min(pool.workers + pool.borrowed, most))


def _lived(pool: PoolUse, use: PipelineUse) -> float:
    """Return the part of the time since the first start for which a worker of the pool was up, on average."""
    up = use.seconds - use.first_start
    if pool.bill is None or not pool.bill.peak_workers or up <= 0:
        return 1.0
    return min(1.0, pool.bill.worker_seconds / (pool.bill.peak_workers * up))


def _info(pool: Pool, stages: list[StageInfo]) -> PoolInfo:
    asked = next((stage.asked for stage in stages if stage.asked.accelerator), Resources())
    devices = tuple(device for group in pool.device_groups for device in group)
    return PoolInfo(
        pool.name,
        pool.workers,
        pool.slots,
        devices,
        cores_per_worker=pool.cores_per_worker,
        ram_per_worker=pool.ram_per_worker,
        asked=asked,
    )
