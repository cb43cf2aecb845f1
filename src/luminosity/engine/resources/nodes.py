"""The nodes of a cluster, what a worker asks of them, and the room that is left on them."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from luminosity._shared.text import format_size
from luminosity.events import NodeInfo

__all__ = ["LeaseNeeds", "Node", "Room", "Rooms"]

_LITTLE = 1e-6  # of a core: sums of fractions are not exact


@dataclass(frozen=True)
class Node:
    """A node of a cluster and what it has for workers, whether or not some of it is in use."""

    id: str
    address: str
    cores: float
    ram_bytes: int
    accelerators: float = 0.0
    accelerator_type: str = ""  # as the cluster names it, such as "T4"; empty if it has none or does not say
    object_store_bytes: int = 0
    is_driver: bool = False  # whether this process runs there
    accelerator_kind: str = "gpu"  # or "tpu"
    more_types: tuple[str, ...] = ()  # further names of the type, such as "A100-80G" beside "A100"

    @property
    def types(self) -> tuple[str, ...]:
        """All names of the type of its accelerators."""
        return (self.accelerator_type, *self.more_types) if self.accelerator_type else ()

    def is_of(self, accelerator_type: str) -> bool:
        """Return whether its accelerators are of a type; the empty one stands for any."""
        return not accelerator_type or accelerator_type in self.types

    def info(self) -> NodeInfo:
        """Return what events show of the node."""
        return NodeInfo(
            self.id,
            self.address,
            self.cores,
            self.ram_bytes,
            self.accelerators,
            self.accelerator_type,
            self.object_store_bytes,
            self.is_driver,
        )


@dataclass(frozen=True)
class LeaseNeeds:
    """What a worker on a cluster asks for. The cluster places it on a node that has all of it free.

    >>> LeaseNeeds(cpus=1.0, memory=2 << 30, gpus=2, accelerator_type="L4").words
    '1 core, 2GiB RAM, 2 GPUs L4'
    """

    cpus: float
    memory: int  # bytes; 0 asks for none
    gpus: int  # accelerators: GPUs, or chips of TPUs
    accelerator_type: str = ""
    accelerator_kind: str = "gpu"  # or "tpu"
    node: str = ""  # the id of the node where the plan has room for it, if any; the cluster may choose another one

    @property
    def words(self) -> str:
        """The needs in words."""
        parts: list[str] = []
        if self.cpus:
            parts.append(f"{self.cpus:g} core{'' if self.cpus == 1 else 's'}")
        if self.memory:
            parts.append(f"{format_size(self.memory)} RAM")
        if self.gpus:
            kind = f" {self.accelerator_type}" if self.accelerator_type else ""
            parts.append(f"{self.gpus} {self.accelerator_kind.upper()}{'' if self.gpus == 1 else 's'}{kind}")
        return ", ".join(parts) or "nothing"


@dataclass
class Room:
    """What is left of a node."""

    node: Node
    cores: float
    ram: int
    accelerators: int

    def has(self, needs: LeaseNeeds) -> bool:
        """Return whether a worker with these needs fits."""
        return (
            needs.cpus <= self.cores + _LITTLE
            and needs.memory <= self.ram
            and needs.gpus <= self.accelerators
            and (not needs.gpus or self._has_type(needs))
        )

    def _has_type(self, needs: LeaseNeeds) -> bool:
        return self.node.accelerator_kind == needs.accelerator_kind and self.node.is_of(needs.accelerator_type)

    def add(self, needs: LeaseNeeds, workers: int) -> None:
        """Take the needs of some workers away, or give them back with a negative number."""
        self.cores -= needs.cpus * workers
        self.ram -= needs.memory * workers
        self.accelerators -= needs.gpus * workers


class Rooms:
    """What is left of all nodes. Starts with everything that they have, whether or not others use it now."""

    def __init__(self, nodes: Sequence[Node]) -> None:
        self.all = [Room(node, node.cores, node.ram_bytes, int(node.accelerators)) for node in nodes]
        self._by_id = {room.node.id: room for room in self.all}

    def place(self, needs: LeaseNeeds) -> str:
        """Take the room for a worker and return the id of its node, or an empty string if no node has room.

        Workers on accelerators fill one node after the other. The others spread over the nodes with the most free
        cores, first over those without accelerators.
        """
        found = [room for room in self.all if room.has(needs)]
        if not found:
            return ""
        if needs.gpus:
            best = min(found, key=lambda room: (room.accelerators, -room.cores))
        else:
            best = min(found, key=lambda room: (room.accelerators > 0, -room.cores, -room.node.cores))
        best.add(needs, 1)
        return best.node.id

    def enter(self, node_id: str, needs: LeaseNeeds) -> None:
        """Take the room for a worker on a node that has it."""
        self._by_id[node_id].add(needs, 1)

    def leave(self, node_id: str, needs: LeaseNeeds) -> None:
        """Give the room of a worker back."""
        self._by_id[node_id].add(needs, -1)

    def largest(self, needs: LeaseNeeds) -> Room | None:
        """Return the room with the most RAM and cores among those with the accelerators; None if there is none."""
        devices = replace(needs, cpus=0.0, memory=0)
        found = [room for room in self.all if room.has(devices)]
        return max(found, key=lambda room: (min(room.ram, needs.memory), room.cores), default=None)
