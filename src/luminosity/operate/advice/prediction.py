"""Predicted bills: the same work with other hints or another number of workers, on the same machine.

The pools of the prediction come from the code that sizes the pools of a run. A run's time is a fixed part plus the time
of its slowest pool, which is the measured work of its stages divided by its workers.
"""

from __future__ import annotations

import math
from collections.abc import Mapping
from dataclasses import dataclass

from luminosity._accelerators import parse_accelerator
from luminosity._text import parse_size
from luminosity.engine.options import EngineConfig
from luminosity.engine.resources.hints import Needs
from luminosity.engine.resources.machine import Machine
from luminosity.engine.resources.pools import Assignment, Pool, assign
from luminosity.events import PoolInfo, Resources, StageInfo
from luminosity.operate.advice.measured import PipelineUse, PoolUse
from luminosity.operate.advice.rules import PoolAdvice
from luminosity.operate.cost.bill import Bill, PoolBill, bill_of_usage, within_machine, worker_usage
from luminosity.operate.cost.prices import NO_USAGE, PriceSheet, Usage

__all__ = [
    "advised_needs",
    "can_predict",
    "fewer_workers",
    "fixed_seconds",
    "gives_enough",
    "predict",
    "uniform_needs",
    "workers_for",
]

_HOUR = 3600.0
_SATURATED = 0.8  # of the cores: from here on, workers wait for each other
_WORTH = 1.05  # a run that takes 5% longer with fewer workers is still as good


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
    work = {key: sum(use.busy.get(stage.id, 0.0) for stage in members[key]) for key in pools}
    slowest = max(work[key] / workers[key] for key in pools)
    seconds = fixed_seconds(use) + max(slowest, use.cpu_seconds / _usable_cores(use))
    ones = {key: worker_usage(_info(pool, members[key]), started.machine) for key, pool in pools.items()}
    lifetimes = {
        key: workers[key] * seconds * max(_lived(given[stage.id], use) for stage in members[key]) for key in pools
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


def uniform_needs(use: PipelineUse) -> dict[str, Needs]:
    """Return the needs of all stages if each worker gets the most that any step asks for."""
    every = [_needs(stage.asked) for stage in use.newest.started.stages]
    with_device = max(every, key=lambda needs: needs.accelerator_count)
    most = Needs(
        min_ram_bytes=max(needs.min_ram_bytes for needs in every),
        cpu_count=max(needs.cpu_count for needs in every),
        accelerator_count=with_device.accelerator_count,
        accelerator_type=with_device.accelerator_type,
    )
    return {stage.id: most for stage in use.newest.started.stages}


def advised_needs(advice: tuple[PoolAdvice, ...]) -> dict[str, Needs]:
    """Return the needs of all stages if the advice is followed."""
    found: dict[str, Needs] = {}
    for each in advice:
        for stage in each.use.stages:
            asked = stage.asked
            hints = each.hints
            accelerator = hints.get("accelerator", asked.accelerator)
            found[stage.id] = _needs(
                Resources(
                    ram=(parse_size(hints["min_ram"]) or 0) if "min_ram" in hints else asked.ram,
                    cores=float(hints.get("cpu_count", asked.cores)),
                    accelerator=accelerator or ("count:1" if each.use.info.devices else ""),
                )
            )
    return found


def fixed_seconds(use: PipelineUse) -> float:
    """Return the part of a run's time that more workers don't shorten, such as start-up and model loads."""
    slowest = max((pool.busy_seconds / pool.workers for pool in use.pools), default=0.0)
    return max(0.0, use.seconds - slowest)


def fewer_workers(use: PipelineUse) -> dict[str, int]:
    """Return for each pool the smallest number of workers with which a run takes at most 5% longer."""
    fixed = fixed_seconds(use)
    allowed = (use.seconds * _WORTH) - fixed
    return {pool.name: min(pool.workers, _enough(pool.busy_seconds, allowed)) for pool in use.pools}


def workers_for(use: PipelineUse, deadline_s: float) -> dict[str, int] | None:
    """Return for each pool the number of workers with which a run ends in time; None if no number does."""
    left = deadline_s - fixed_seconds(use)
    if left <= 0:
        return None
    return {pool.name: _enough(pool.busy_seconds, left) for pool in use.pools}


def gives_enough(use: PipelineUse, needs: Mapping[str, Needs], cpu_workers: int, wanted: Mapping[str, int]) -> bool:
    """Return whether ``--cpu_workers`` leaves every pool of the run as many workers as are wanted for it."""
    assigned = _assigned(use, needs, _machine(use, None), _config(cpu_workers))
    return all(assigned[stage.id].pool.workers >= wanted[pool.name] for pool in use.pools for stage in pool.stages)


def _assigned(
    use: PipelineUse, needs: Mapping[str, Needs], machine: Machine, config: EngineConfig
) -> dict[str, Assignment]:
    stages = [(_Stage(stage.id, stage.label), needs[stage.id]) for stage in use.newest.started.stages]
    return assign(stages, machine, config, is_quiet=True)


def _usable_cores(use: PipelineUse) -> float:
    """Return the cores that the run could use: those that it did, if its workers wanted as many as the machine has.

    Other processes take their part of the cores, and more workers don't change that.
    """
    cores = use.newest.started.machine.cores
    wanted = sum(pool.workers * (pool.cpu_per_second or 0.0) for pool in use.pools)
    worked = use.seconds - fixed_seconds(use)
    if wanted < _SATURATED * cores or worked <= 0 or not use.cpu_seconds:
        return cores
    return min(float(cores), use.cpu_seconds / worked)


def _enough(work: float, seconds: float) -> int:
    return max(1, math.ceil(work / seconds - 1e-9)) if seconds > 0 else 1


def _needs(asked: Resources) -> Needs:
    count, kind = (parse_accelerator(asked.accelerator) or (0, "")) if asked.accelerator else (0, "")
    return Needs(asked.ram, int(asked.cores), count, kind)


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
    asked = {stage.id: _needs(stage.asked) for stage in use.newest.started.stages}
    assigned = _assigned(use, asked, _machine(use, None), _config(None))
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
    """Return the part of the run for which a worker of the pool was up, on average."""
    if pool.bill is None or not pool.bill.peak_workers or not use.seconds:
        return 1.0
    return min(1.0, pool.bill.worker_seconds / (pool.bill.peak_workers * use.seconds))


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
