"""Phrases about machines and pools that texts and pictures share."""

from __future__ import annotations

from collections import Counter
from collections.abc import Iterable
from dataclasses import replace

from luminosity._shared.text import format_size
from luminosity.engine.resources.machine import Machine
from luminosity.engine.resources.pools import Pool

__all__ = [
    "counted",
    "devices_in_words",
    "machine_in_words",
    "places_in_words",
    "pool_in_words",
    "ranges",
    "share_in_words",
]

_MOST_NODE_NAMES = 8  # with the same number of workers; more are counted
_ID_CHARACTERS = 8  # of a node's id, as Ray's own tools show


def counted(number: float, noun: str) -> str:
    """Return a number with its noun in the singular or plural.

    >>> counted(1, "core"), counted(0.5, "core"), counted(3, "stage")
    ('1 core', '0.5 cores', '3 stages')
    """
    return f"{number:.3g} {noun}" if number == 1 else f"{number:.3g} {noun}s"


def ranges(numbers: Iterable[int]) -> str:
    """Return ascending numbers as a list with ranges.

    >>> ranges([1, 2, 4, 5, 6, 9])
    '1, 2, 4-6, 9'
    """
    runs: list[list[int]] = []
    for number in numbers:
        if runs and number == runs[-1][-1] + 1:
            runs[-1].append(number)
        else:
            runs.append([number])
    return ", ".join(f"{run[0]}-{run[-1]}" if len(run) > 2 else ", ".join(map(str, run)) for run in runs)


def machine_in_words(machine: Machine) -> str:
    """Return the cores, RAM and accelerators of ``machine``."""
    accelerators = counted(len(machine.devices), "accelerator") if machine.devices else "no accelerators"
    nodes = f"{counted(len(machine.nodes), 'node')} of a cluster with " if machine.nodes else ""
    cores = sum(node.cores for node in machine.nodes) if machine.nodes else machine.cores
    return f"{nodes}{counted(cores, 'core')}, {format_size(machine.ram_bytes)} RAM, {accelerators}"


def share_in_words(pool: Pool) -> str:
    """Return the cores and RAM of each worker of ``pool``."""
    return f"{counted(pool.cores_per_worker, 'core')}, {format_size(pool.ram_per_worker)} RAM"


def devices_in_words(pool: Pool) -> str:
    """Return the devices of ``pool``, worker by worker; on a cluster, which chooses them, what each worker asks for."""
    if pool.lease is not None:
        return f"{replace(pool.lease, cpus=0.0, memory=0).words} each"
    return ", ".join("+".join(group) for group in pool.device_groups)


def places_in_words(pool: Pool, machine: Machine) -> str:
    """Return how many workers of ``pool`` fit on which nodes of a cluster.

    >>> from luminosity.engine.resources.nodes import Node
    >>> nodes = tuple(Node(name, f"10.0.0.{name}", 4.0, 1 << 30) for name in "12")
    >>> pool = Pool("cpu", 1.0, 1 << 30, 1, (), 4, (), nodes=("1", "1", "2", ""))
    >>> places_in_words(pool, Machine(8, 2 << 30, (), nodes))
    '2 on 10.0.0.1, 1 on 10.0.0.2, 1 waits for a node'
    """
    fitting = Counter(pool.nodes[: pool.workers])
    waiting = fitting.pop("", 0)
    names = _node_names(machine)
    by_count: dict[int, list[str]] = {}
    for node in machine.nodes:
        if count := fitting[node.id]:
            by_count.setdefault(count, []).append(names[node.id])
    parts: list[str] = []
    for count, on in by_count.items():
        if len(on) > _MOST_NODE_NAMES:
            parts.append(f"{count} on each of {len(on)} nodes")
        else:
            parts += [f"{count} on {name}" for name in on]
    if waiting:
        parts.append(f"{waiting} wait{'s' if waiting == 1 else ''} for a node")
    return ", ".join(parts)


def _node_names(machine: Machine) -> dict[str, str]:
    """Return the address of each node, with the beginning of its id if others have the same address."""
    addresses = Counter(node.address for node in machine.nodes)
    return {
        node.id: node.address if addresses[node.address] == 1 else f"{node.address} ({node.id[:_ID_CHARACTERS]})"
        for node in machine.nodes
    }


def pool_in_words(pool: Pool) -> str:
    """Return the name of ``pool``, its number of workers and their shares."""
    devices = f" with {devices_in_words(pool)}" if pool.device_groups else ""
    each = "each " if pool.workers > 1 else ""
    return f"{pool.name}: {counted(pool.workers, 'worker')}, {each}{share_in_words(pool)}{devices}"
