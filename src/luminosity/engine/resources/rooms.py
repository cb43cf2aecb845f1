"""Room on the nodes of a cluster: which workers fit on which node."""

from __future__ import annotations

from collections.abc import Sequence
from dataclasses import dataclass, replace

from luminosity.engine.resources.nodes import LeaseNeeds, Node

__all__ = ["Room", "Rooms"]

_LITTLE = 1e-6  # of a core: sums of fractions are not exact


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
