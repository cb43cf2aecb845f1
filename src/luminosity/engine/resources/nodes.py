"""The nodes of a cluster and what a worker asks of them, as plain data."""

from __future__ import annotations

from dataclasses import dataclass

from luminosity._shared.text import format_size
from luminosity.events import NodeInfo

__all__ = ["LeaseNeeds", "Node"]


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
