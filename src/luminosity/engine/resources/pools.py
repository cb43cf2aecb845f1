"""Worker pools: how many workers there are, what each may use, and which stage runs in which pool.

Device pools come first: for each ``count:N`` that steps ask for, one worker per group of N devices runs all those
steps, whatever their other hints, unless they ask for different types of devices. CPU steps with the same needs share
a pool. Cores and RAM, summed over all pools, stay within the machine. On a cluster, ``cluster_pools.py`` decides
instead.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Mapping
from dataclasses import dataclass, replace

from luminosity._shared.text import format_size
from luminosity.engine.options import EngineConfig
from luminosity.engine.plan.graph import Stage
from luminosity.engine.resources.cluster_pools import limited_to_nodes, size_on_cluster
from luminosity.engine.resources.drafts import Draft, Missing, Pool, StageToPlace
from luminosity.engine.resources.hints import DevicesByType, Needs
from luminosity.engine.resources.machine import Machine
from luminosity.engine.resources.python_environments import PythonEnvironment
from luminosity.errors import ResourcesExceeded

__all__ = ["SOURCE_SLOTS", "Assignment", "Pool", "StageToPlace", "assign", "assign_to_this_process"]


_LOGGER = logging.getLogger(__name__)

# Bundles of sources of streams that a worker runs besides its others. Each has a copy of the steps behind its source.
SOURCE_SLOTS = 4


@dataclass(frozen=True)
class Assignment:
    """The pool of a stage, and how many of its bundles one worker runs at once."""

    pool: Pool
    max_active_bundles: int


def assign(
    stages: Iterable[tuple[StageToPlace, Needs]],
    machine: Machine,
    config: EngineConfig,
    environments: Mapping[str, PythonEnvironment] | None = None,
    *,
    is_quiet: bool = False,
) -> dict[str, Assignment]:
    """Return the pool of every stage, by the stage's id.

    ``environments`` are the Python environments that steps ask for, by path. Each has pools of its own.

    If steps ask for more than the machine has, they get what there is, with one warning unless ``is_quiet``;
    or this raises :class:`ResourcesExceeded`, if ``config`` says so.
    """
    drafts: dict[tuple[object, ...], Draft] = {}
    chosen: dict[str, tuple[tuple[object, ...], int]] = {}
    missing: list[Missing] = []
    stages = list(stages)
    asking = [(each.accelerator_type, count) for _, each in stages if (count := each.accelerator_count)]
    of_types = DevicesByType.share_out(asking, machine.devices, machine.names)
    for stage, wanted in stages:
        devices = machine.devices
        if machine.nodes:
            needs = limited_to_nodes(stage, wanted, machine, missing)
        else:
            needs, devices = _limited(stage, wanted, machine, of_types, missing)
        key, draft = _draft_for(needs, machine, devices, config)
        if needs.python_environment:
            draft.python = (environments or {})[needs.python_environment]
            draft.name += f" python={draft.python.name}"
            key = (*key, needs.python_environment)
        draft.labels.append(stage.label)
        if key in drafts:
            drafts[key].join(draft)
        else:
            drafts[key] = draft
        is_limited = needs.max_active_bundles or draft.groups or not stage.is_source
        chosen[stage.id] = key, draft.slots if is_limited else SOURCE_SLOTS
    sized: list[Pool] | None = None
    if machine.nodes:
        sized = size_on_cluster(list(drafts.values()), machine, config, missing)
    else:
        _fit_ram(list(drafts.values()), machine, missing)
    if missing and config.missing_resources == "fail":
        raise ResourcesExceeded(
            "\n".join(each.what for each in missing), fix="drop --missing_resources=fail to run it with what there is"
        )
    if sized is None:
        sized = _size(list(drafts.values()), machine, config, missing)
    if missing and not is_quiet:
        _LOGGER.warning("%s", "\n".join(f"{each.what}: {each.consequence}" for each in missing))
    pools = dict(zip(drafts, sized, strict=True))
    return {stage_id: Assignment(pools[key], slots) for stage_id, (key, slots) in chosen.items()}


def assign_to_this_process(stages: Iterable[Stage], machine: Machine) -> dict[str, Assignment]:
    """Return one pool with one worker that runs one bundle at a time, whatever the steps ask for."""
    stages = list(stages)
    pool = Pool("debug", machine.cores, machine.ram_bytes, 1, (), 1, tuple(stage.label for stage in stages))
    return {stage.id: Assignment(pool, 1) for stage in stages}


def _limited(
    stage: StageToPlace, needs: Needs, machine: Machine, of_types: DevicesByType, missing: list[Missing]
) -> tuple[Needs, tuple[str, ...]]:
    """Return the needs, limited to what the machine has, and the devices for them; add to ``missing`` what is not."""
    asks = f"step {stage.label!r} asks for"
    devices = of_types.of(needs.accelerator_type)
    if (count := needs.accelerator_count) > len(devices):
        kind = f" of type {needs.accelerator_type}" if needs.accelerator_type else ""
        what = f"{asks} {count} accelerator(s){kind}; this machine has "
        if count > len(machine.devices):
            missing.append(Missing(f"{what}{len(machine.devices)}", "it runs on the CPU"))
            needs = replace(needs, accelerator_count=0, accelerator_type="")
        else:
            shared = of_types.of("")  # with the steps that have devices, rather than in one more process on each
            devices = shared if len(shared) >= count else machine.devices
            missing.append(Missing(what + of_types.describe(), "it runs on what there is"))
    if needs.min_ram_bytes > machine.ram_bytes:
        has = format_size(machine.ram_bytes)
        what = f"{asks} min_ram={format_size(needs.min_ram_bytes)}; this machine has {has}"
        missing.append(Missing(what, "it runs in one worker with less RAM", is_ram=True))
        needs = replace(needs, min_ram_bytes=machine.ram_bytes)
    if needs.cpu_count > machine.cores:
        what = f"{asks} cpu_count={needs.cpu_count}; this machine has {machine.cores} cores"
        missing.append(Missing(what, "it runs in one worker with fewer cores"))
        needs = replace(needs, cpu_count=machine.cores)
    return needs, devices


def _fit_ram(drafts: list[Draft], machine: Machine, missing: list[Missing]) -> None:
    """Scale the RAM down that pools ask for, if one worker of each pool would need more than the machine has."""
    asked = sum(draft.ram for draft in drafts)
    if asked > machine.ram_bytes:
        wishes = ", ".join(f"{d.labels[0]!r} {format_size(d.ram)}" for d in drafts if d.ram)
        what = (
            f"one worker for each kind of step needs more RAM than this machine's "
            f"{format_size(machine.ram_bytes)} ({wishes})"
        )
        missing.append(Missing(what, "each worker gets less", is_ram=True))
    if not any(each.is_ram for each in missing):
        return
    others = _least_part(sum(not draft.ram for draft in drafts))
    scale = min(1.0, machine.ram_bytes * (1.0 - others) / asked)
    for draft in drafts:
        draft.ram = int(draft.ram * scale)


def _least_part(workers: int) -> float:
    """Return the part of the machine that is kept for workers whose steps ask for nothing."""
    return min(0.1 * workers, 0.5)


def _draft_for(
    needs: Needs, machine: Machine, devices: tuple[str, ...], config: EngineConfig
) -> tuple[tuple[object, ...], Draft]:
    cores = float(needs.cpu_count or 1)
    if count := needs.accelerator_count:
        # One bundle at a time: a DoFn that loads its model in setup() then holds it once.
        slots = needs.max_active_bundles or 1
        whole = len(devices) // count * count
        groups = [devices[i : i + count] for i in range(0, whole, count)]
        name = "device" if count == 1 else f"device x{count}"
        if devices != machine.devices:
            name += f" {needs.accelerator_type or 'any'}"
        draft = Draft(name, [], cores, needs.min_ram_bytes, slots, groups, len(groups), needs.cpu_count > 0)
        draft.device_type = needs.accelerator_type if machine.nodes else ""
        return ("device", count, draft.device_type, devices), draft
    slots = needs.max_active_bundles or config.threads_per_worker
    name = "cpu"
    if needs.min_ram_bytes:
        name += f" ram={format_size(needs.min_ram_bytes)}"
    if needs.cpu_count:
        name += f" cores={needs.cpu_count}"
    if needs.max_active_bundles:
        name += f" bundles={slots}"
    draft = Draft(name, [], cores, needs.min_ram_bytes, slots, [], 1, needs.cpu_count > 0)
    return ("cpu", needs.min_ram_bytes, needs.cpu_count, slots), draft


def _size(drafts: list[Draft], machine: Machine, config: EngineConfig, missing: list[Missing]) -> list[Pool]:
    """Give every pool one worker. Then add workers to device pools, then to CPU pools in turn, while there is room."""
    devices = [d for d in drafts if d.groups]
    cpus = [d for d in drafts if not d.groups]
    wanted = {id(d): len(d.groups) for d in devices}
    for draft in drafts:
        draft.workers = 1
    ram_left = machine.ram_bytes - sum(d.ram for d in drafts)
    cores_left = machine.cores - sum(d.workers * d.cores for d in drafts)
    for draft in devices:
        # A device worker may share its core with others, unless a step asked for cores.
        while (
            draft.workers < wanted[id(draft)]
            and draft.ram <= ram_left
            and (not draft.cores_are_asked_for or draft.cores <= max(1.0, cores_left))
        ):
            draft.workers += 1
            ram_left -= draft.ram
            cores_left -= draft.cores
    cpu_workers_left = (config.cpu_workers or machine.cores) - len(cpus)
    growing = list(cpus)
    while growing and cpu_workers_left > 0:
        for draft in list(growing):
            # --cpu_workers may start more workers than cores, which share them; but not cores that a step asked for.
            is_free = config.cpu_workers is not None and not draft.cores_are_asked_for
            fits_cores = is_free or draft.cores <= cores_left
            if cpu_workers_left <= 0 or draft.ram > ram_left or not fits_cores:
                growing.remove(draft)
                continue
            draft.workers += 1
            ram_left -= draft.ram
            cores_left -= draft.cores
            cpu_workers_left -= 1
    return _shared_out(drafts, machine, missing)


def _shared_out(drafts: list[Draft], machine: Machine, missing: list[Missing]) -> list[Pool]:
    """Return the pools with each worker's share: what steps asked for, as far as it fits; the rest for the others."""
    asked = sum(d.workers * d.cores for d in drafts if d.cores_are_asked_for)
    unasked = sum(d.workers * d.cores for d in drafts if not d.cores_are_asked_for)
    least = min(0.1 * sum(d.workers for d in drafts if not d.cores_are_asked_for), 0.5 * machine.cores)
    asked_scale = min(1.0, (machine.cores - least) / asked) if asked else 1.0
    unasked_scale = min(1.0, (machine.cores - asked * asked_scale) / unasked) if unasked else 1.0
    if asked_scale < 1.0:
        names = ", ".join(repr(d.labels[0]) for d in drafts if d.cores_are_asked_for)
        what = (
            f"cpu_count of {names} adds up to {asked:g} cores; together with the other steps, that is more than this "
            f"machine's {machine.cores}"
        )
        missing.append(Missing(what, "each worker gets less"))
    cores = {id(d): d.cores * (asked_scale if d.cores_are_asked_for else unasked_scale) for d in drafts}
    # Workers get the RAM that their steps asked for; the others share the rest.
    asked_ram = sum(d.workers * d.ram for d in drafts)
    borrowed = [_borrowed(d, drafts, cores, machine.ram_bytes - asked_ram) for d in drafts]
    sharing = sum(d.workers + more for d, more in zip(drafts, borrowed, strict=True) if not d.ram)
    asked_ram += sum(more * d.ram for d, more in zip(drafts, borrowed, strict=True))
    spare_ram = (machine.ram_bytes - asked_ram) // max(1, sharing)
    return [
        Pool(
            name=d.name,
            cores_per_worker=cores[id(d)],
            ram_per_worker=d.ram or spare_ram,
            slots=d.slots,
            device_groups=tuple(d.groups[: d.workers]),
            workers=d.workers,
            labels=tuple(d.labels),
            borrowed=more,
            python=d.python,
        )
        for d, more in zip(drafts, borrowed, strict=True)
    ]


def _borrowed(draft: Draft, drafts: list[Draft], cores: dict[int, float], ram_left: int) -> int:
    """Return how many more workers a CPU pool could use if all other CPU pools were idle, within the RAM."""
    if draft.groups:
        return 0
    all_cores = sum(d.workers * cores[id(d)] for d in drafts if not d.groups)
    # A worker with less than a core uses a whole one as soon as it is idle: more workers than cores gain nothing.
    workers = max(0, int(all_cores / max(1.0, cores[id(draft)]) + 1e-6) - draft.workers)
    if not draft.ram:
        return workers
    asking = sum(bool(d.ram) for d in drafts if not d.groups)  # all of these may borrow at once
    return min(workers, ram_left // 2 // (asking * draft.ram))  # the other half is for workers that asked for no RAM
