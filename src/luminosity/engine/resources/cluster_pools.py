"""The sizes of pools on a cluster: how many workers fit on its nodes, and what each of them asks for.

The cluster gives each worker what it asks for and lets it wait while there is no room. So the needs of all pools
together have to fit: a pool whose first worker would wait for another pool's workers would never run.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace

from luminosity._shared.text import format_size
from luminosity.engine.options import EngineConfig, of_pool
from luminosity.engine.resources.drafts import Draft, Missing, Pool, StageToPlace
from luminosity.engine.resources.growth import Growing, check_pools, grow
from luminosity.engine.resources.hints import Needs, cluster_type, types_of
from luminosity.engine.resources.machine import CLUSTER_DEVICE, LeaseNeeds, Machine, Node, Room, Rooms

__all__ = ["limited_to_nodes", "size_on_cluster"]


def limited_to_nodes(stage: StageToPlace, needs: Needs, machine: Machine, missing: list[Missing]) -> Needs:
    """Return the needs, limited to what the largest node has that could run the stage, with the cluster's type.

    Adds what is missing to ``missing``. Raises :class:`ResourcesExceeded` for an unknown type of accelerators.
    """
    asks = f"step {stage.label!r} asks for"
    nodes: Sequence[Node] = machine.nodes
    if count := needs.accelerator_count:
        kind = cluster_type(stage.label, needs.accelerator_type, nodes, machine.known_types)
        having = [node for node in _of_kind(nodes, kind) if node.accelerators >= count]
        if count > len(machine.devices) or not (having or _declares_more(machine)):
            what = (
                f"{asks} {count} accelerator(s){f' of type {kind}' if kind else ''}; {_largest(machine, kind, count)}"
            )
            missing.append(Missing(what, "it runs on the CPU"))
            needs = replace(needs, accelerator_count=0, accelerator_type="")
        else:
            needs = replace(needs, accelerator_type=kind)
            nodes = having
            if not nodes:
                return needs  # --accelerators promises nodes of which nothing is known
    elif _has_no_workers_yet(machine):
        return needs
    beside = f" with {needs.accelerator_count} accelerator(s)" if needs.accelerator_count else ""
    most_ram = max((node.ram_bytes for node in nodes), default=0)
    if needs.min_ram_bytes > most_ram:
        has = format_size(most_ram)
        what = f"{asks} min_ram={format_size(needs.min_ram_bytes)}; the largest node{beside} has {has}"
        missing.append(Missing(what, "its workers get that much", is_ram=True))
        needs = replace(needs, min_ram_bytes=most_ram)
    nodes = [node for node in nodes if node.ram_bytes >= needs.min_ram_bytes]
    most_cores = int(max((node.cores for node in nodes), default=0.0))
    if needs.cpu_count > most_cores:
        beside += f" and {format_size(needs.min_ram_bytes)} RAM" if needs.min_ram_bytes and beside else ""
        beside = beside or (f" with {format_size(needs.min_ram_bytes)} RAM" if needs.min_ram_bytes else "")
        what = f"{asks} cpu_count={needs.cpu_count}; the largest node{beside} has {most_cores} cores"
        missing.append(Missing(what, "its workers get that many"))
        needs = replace(needs, cpu_count=most_cores)
    return needs


def _of_kind(nodes: Sequence[Node], accelerator_type: str) -> list[Node]:
    """Return the nodes with accelerators of a type. If any type will do, and there are GPUs and TPUs, those with GPUs.

    A worker asks for GPUs or for TPUs, not for either.
    """
    found = [node for node in nodes if node.accelerators and node.is_of(accelerator_type)]
    return [node for node in found if node.accelerator_kind == "gpu"] or found


def _kind_of(accelerator_type: str) -> str:
    """Return the kind of accelerators of a type that no node has yet, such as ``TPU-V5E`` or ``T4``."""
    return "tpu" if accelerator_type.upper().startswith("TPU") else "gpu"


def _has_no_workers_yet(machine: Machine) -> bool:
    """Return whether no node takes workers without an accelerator yet: only a head without cores is there."""
    return not any(node.cores for node in machine.nodes)


def _declares_more(machine: Machine) -> bool:
    """Return whether ``--accelerators`` promises more than the nodes have now."""
    return len(machine.devices) > sum(int(node.accelerators) for node in machine.nodes)


def _largest(machine: Machine, kind: str, count: int) -> str:
    """Return in words why no node has the accelerators."""
    fitting = _of_kind(machine.nodes, kind)
    if fitting and count <= max(node.accelerators for node in fitting):
        return f"--accelerators={len(machine.devices)} allows fewer"
    if fitting:
        most = max(fitting, key=lambda node: node.accelerators)
        return f"the largest node{' with that type' if kind else ''} has {most.accelerators:g}"
    types = types_of(machine.nodes)
    having = [node for node in machine.nodes if node.accelerators]
    if not having:
        return "no node of the cluster has an accelerator"
    return f"no node of the cluster has one; it has {', '.join(types) or 'accelerators without a type'}"


@dataclass(eq=False)
class _Placed(Growing):
    """The workers of a draft."""

    draft: Draft = field(kw_only=True)


def size_on_cluster(drafts: list[Draft], machine: Machine, config: EngineConfig, missing: list[Missing]) -> list[Pool]:
    """Return the pool of each draft; drafts that have to share workers get the same pool.

    Every pool gets one worker. Then device pools get more in turn, then CPU pools, while there is room.
    ``--cpu_workers`` and ``--accelerators`` may allow workers beyond that, for nodes to come. Adds to ``missing`` what
    the first workers of all pools together lack.
    """
    rooms = Rooms(machine.nodes)
    joined = _open_types_joined(drafts, machine.nodes)
    placed: list[_Placed] = []
    # What can run in the fewest places comes first.
    order = sorted(drafts, key=lambda d: (not d.groups, not d.device_type, -d.devices_per_worker, -d.ram, -d.cores))
    for draft in order:
        if id(draft) not in joined:
            _place_first(draft, rooms, placed, joined, machine, config, missing)
    names = [_name(each) for each in placed]
    check_pools("min_workers", config.min_workers, names)
    check_pools("max_workers", config.max_workers, names)
    for each, name in zip(placed, names, strict=True):
        each.most = of_pool(config.max_workers, name)
    devices = [each for each in placed if each.needs.gpus]
    cpus = [each for each in placed if not each.needs.gpus]
    cpu_workers = config.cpu_workers
    grow(devices, len(machine.devices), rooms)
    grow(cpus, cpu_workers if cpu_workers is not None else machine.cores, rooms)
    if _declares_more(machine):
        grow(devices, len(machine.devices), None)
    if cpu_workers is not None:
        grow(cpus, cpu_workers, None)
    pools = _pools(placed, rooms, machine, config)
    return [pools[id(_last(draft, joined))] for draft in drafts]


def _last(draft: Draft, joined: dict[int, Draft]) -> Draft:
    """Return the draft in whose workers the steps of a draft run, which may have joined another one itself."""
    while id(draft) in joined:
        draft = joined[id(draft)]
    return draft


def _open_types_joined(drafts: list[Draft], nodes: Sequence[Node]) -> dict[int, Draft]:
    """Join device pools of any type with the one of the only type there is; return the drafts that took them, by id."""
    joined: dict[int, Draft] = {}
    for draft in drafts:
        if not draft.groups or draft.device_type:
            continue
        types = {node.accelerator_type for node in nodes if node.accelerators >= draft.devices_per_worker}
        for other in drafts:
            is_same = other.groups and other.devices_per_worker == draft.devices_per_worker
            if is_same and {other.device_type} == types and other is not draft:
                other.join(draft)
                joined[id(draft)] = other
    return joined


def _place_first(
    draft: Draft,
    rooms: Rooms,
    placed: list[_Placed],
    joined: dict[int, Draft],
    machine: Machine,
    config: EngineConfig,
    missing: list[Missing],
) -> None:
    """Place the first worker of a pool, beside those of the pools that were placed before."""
    has_own_cores = draft.cores_are_asked_for or not draft.groups
    having = _of_kind(machine.nodes, draft.device_type)
    needs = LeaseNeeds(
        cpus=draft.cores if has_own_cores else 0.0,
        memory=draft.ram,
        gpus=draft.devices_per_worker,
        accelerator_type=draft.device_type,
        accelerator_kind=having[0].accelerator_kind if having else _kind_of(draft.device_type),
    )
    node = rooms.place(needs)
    lacks_devices = not node and needs.gpus and rooms.largest(needs) is None
    if lacks_devices and _join(draft, needs, rooms, placed, joined, missing):
        return
    if not node and not draft.cores_are_asked_for and any(each.cores for each in machine.nodes):
        lighter = replace(needs, cpus=0.0)  # it shares the cores of others
        node = rooms.place(lighter)
        needs = lighter if node else needs
    waits = not needs.gpus and _has_no_workers_yet(machine)  # for nodes to come, whatever the head has
    is_special = draft.ram or draft.cores_are_asked_for
    if not node and not waits and is_special and (room := rooms.largest(needs)) is not None:
        less = _limited(needs, room)
        if not draft.cores_are_asked_for:
            less = replace(less, cpus=0.0)
        missing.append(_too_much(draft, needs, less))
        needs, node = less, rooms.place(less)
    elif not node:
        what = f"step {draft.labels[0]!r} needs {needs.words}, and no node of the cluster has it now"
        missing.append(Missing(what, "it waits until a node joins"))
    placed.append(_Placed(needs, [node], draft=draft))


def _join(
    draft: Draft,
    needs: LeaseNeeds,
    rooms: Rooms,
    placed: list[_Placed],
    joined: dict[int, Draft],
    missing: list[Missing],
) -> bool:
    """Let a device pool share the workers of others, of as few as possible; return whether there is room for that."""
    for is_exact in (True, False):
        for kind, sharing in _partners(needs, placed):
            together = [needs, *(each.needs for each in sharing)]
            both = replace(
                needs,
                cpus=max(each.cpus for each in together),
                memory=max(each.memory for each in together),
                gpus=max(each.gpus for each in together),
                accelerator_type=kind,
            )
            for each in sharing:
                rooms.leave(each.nodes[0], each.needs)
            node = rooms.place(both)
            if not node and not is_exact and (room := rooms.largest(both)) is not None:
                less = _limited(both, room)
                missing.append(_too_much(draft, both, less))
                both, node = less, rooms.place(less)
            if not node:
                for each in sharing:
                    rooms.enter(each.nodes[0], each.needs)
                continue
            first, *rest = sharing
            for other in (draft, *(each.draft for each in rest)):
                first.draft.join(other)
                joined[id(other)] = first.draft
            first.draft.device_type = kind
            first.needs, first.nodes = both, [node]
            placed[:] = [each for each in placed if each not in rest]
            return True
    return False


def _partners(needs: LeaseNeeds, placed: list[_Placed]) -> Iterator[tuple[str, list[_Placed]]]:
    """Yield the device pools that one with these needs may join, and the type of accelerators that they would have."""
    devices = sorted((each for each in placed if each.needs.gpus and each.nodes[0]), key=lambda each: -each.needs.gpus)
    types = [needs.accelerator_type] if needs.accelerator_type else [each.needs.accelerator_type for each in devices]
    for kind in dict.fromkeys(types):
        fitting = [each for each in devices if each.needs.accelerator_type in (kind, "")]
        for each in fitting:
            yield kind, [each]
        for count in range(2, len(fitting) + 1):
            yield kind, fitting[:count]


def _limited(needs: LeaseNeeds, room: Room) -> LeaseNeeds:
    return replace(needs, cpus=min(needs.cpus, max(0.0, room.cores)), memory=min(needs.memory, max(0, room.ram)))


def _too_much(draft: Draft, needs: LeaseNeeds, less: LeaseNeeds) -> Missing:
    asks = f"step {draft.labels[0]!r} asks for {needs.words}"
    return Missing(
        f"{asks}; beside the other steps, the cluster's nodes have {less.words}", "its workers get that much"
    )


def _pools(placed: list[_Placed], rooms: Rooms, machine: Machine, config: EngineConfig) -> dict[int, Pool]:
    """Return the finished pools, by the ids of their drafts."""
    borrowed = {id(each): _borrowed(each, placed, rooms) for each in placed}
    spare = _spare_ram(placed, borrowed, rooms, machine)
    pools: dict[int, Pool] = {}
    free = machine.first_devices()
    for each in placed:
        count = each.needs.gpus
        groups: list[tuple[str, ...]] = []
        for node in each.nodes:
            groups.append(tuple(f"{CLUSTER_DEVICE}:{free[node] + i}" for i in range(count)))
            free[node] += count
        pools[id(each.draft)] = Pool(
            name=_name(each),
            cores_per_worker=each.needs.cpus or each.draft.cores,
            ram_per_worker=each.needs.memory or spare[id(each)],
            slots=each.draft.slots,
            device_groups=tuple(groups) if count else (),
            workers=len(each.nodes),
            labels=tuple(each.draft.labels),
            borrowed=len(borrowed[id(each)]),
            lease=each.needs,
            nodes=(*each.nodes, *borrowed[id(each)]),
            least=of_pool(config.min_workers, _name(each)) or 0,
            most=each.most,
        )
    return pools


def _name(placed: _Placed) -> str:
    if not placed.needs.gpus:
        return placed.draft.name
    several = f" x{placed.needs.gpus}" if placed.needs.gpus > 1 else ""
    return " ".join(filter(None, [f"device{several}", placed.needs.accelerator_type]))


def _borrowed(placed: _Placed, all_placed: list[_Placed], rooms: Rooms) -> list[str]:
    """Return the nodes of the further workers that a CPU pool could use if all other CPU pools were idle."""
    if placed.needs.gpus or not placed.needs.cpus:
        return []
    others = [each for each in all_placed if each is not placed and not each.needs.gpus]
    idle = [(node, each.needs.cpus) for each in others for node in each.nodes if node]
    # A worker with less than a core uses a whole one as soon as it is idle: more workers than cores gain nothing.
    count = int(sum(cores for _, cores in idle) / max(1.0, placed.needs.cpus) + 1e-6)
    if placed.needs.memory:
        asking = 1 + sum(bool(each.needs.memory) for each in others)  # all of these may borrow at once
        left = sum(max(0, room.ram) for room in rooms.all)
        count = min(count, left // 2 // (asking * placed.needs.memory))  # the other half is for those that ask for none
    return [idle[i % len(idle)][0] for i in range(count)] if idle else []


def _spare_ram(placed: list[_Placed], borrowed: dict[int, list[str]], rooms: Rooms, machine: Machine) -> dict[int, int]:
    """Return the RAM for each worker of pools that ask for none: an equal part of what is left of its node."""
    workers = {id(each): [*each.nodes, *borrowed[id(each)]] for each in placed}
    asking_none = [node for each in placed if not each.needs.memory for node in workers[id(each)] if node]
    parts = {room.node.id: max(0, room.ram) // max(1, asking_none.count(room.node.id)) for room in rooms.all}
    on_average = machine.ram_bytes // max(1, sum(map(len, workers.values())))
    return {key: min((parts[node] for node in nodes if node), default=on_average) for key, nodes in workers.items()}
