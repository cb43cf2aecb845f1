"""Hardware: the cores, memory and accelerators of this machine, or of the nodes of a cluster and the room on them."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

from luminosity._shared.text import format_size
from luminosity.core import machine_ram_bytes, usable_cores
from luminosity.events import DeviceInfo, MachineInfo, NodeInfo

__all__ = [
    "CLUSTER_DEVICE",
    "DECLARED",
    "LeaseNeeds",
    "Machine",
    "Node",
    "Room",
    "Rooms",
    "detect_accelerators",
    "visibility",
]

_LITTLE = 1e-6  # of a core: sums of fractions are not exact
DECLARED = "declared"  # the kind of a device that only --accelerators has declared: it stands for any kind
CLUSTER_DEVICE = "ray"  # the kind of a placeholder: the cluster gives its worker a device


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


@dataclass(frozen=True)
class Machine:
    """The hardware that the workers of a run share."""

    cores: int
    ram_bytes: int
    devices: tuple[
        str, ...
    ]  # "gpu:0", "tpu:1"; "declared:0" for one that --accelerators declares; "ray:0" of a cluster
    nodes: tuple[Node, ...] = ()  # of a cluster, whose sums the fields above are; empty for this machine
    known_types: tuple[str, ...] = ()  # the types of accelerators that the cluster's software knows, such as "T4"
    names: Mapping[str, str] = field(default_factory=dict[str, str])  # of devices on this machine, as drivers tell them

    @classmethod
    def detect(cls, declared_accelerators: int | None = None) -> Machine:
        """Return this machine, with the accelerators it has or with as many as are declared."""
        if declared_accelerators is None:
            devices = detect_accelerators()
        else:
            found = detect_accelerators()
            devices = found[:declared_accelerators]
            devices += tuple(f"{DECLARED}:{i}" for i in range(len(devices), declared_accelerators))
        names = {info.id: info.name for info in _device_infos(devices) if info.name}
        return cls(usable_cores(), machine_ram_bytes(), devices, names=names)

    @classmethod
    def of_cluster(
        cls, nodes: Sequence[Node], declared_accelerators: int | None = None, known_types: Sequence[str] = ()
    ) -> Machine:
        """Return the sum of a cluster's nodes, with the accelerators that they have or with as many as are declared.

        The devices are placeholders: the cluster decides which worker gets which device.
        """
        count = declared_accelerators
        if count is None:
            count = sum(int(node.accelerators) for node in nodes)
        return cls(
            cores=max(1, int(sum(node.cores for node in nodes))),
            ram_bytes=sum(node.ram_bytes for node in nodes),
            devices=tuple(f"{CLUSTER_DEVICE}:{i}" for i in range(count)),
            nodes=tuple(nodes),
            known_types=tuple(known_types),
        )

    @property
    def kinds(self) -> frozenset[str]:
        """The kinds of the devices: ``gpu``, ``tpu``, or ``declared``, which stands for any kind."""
        if not self.nodes:
            return frozenset(device.partition(":")[0] for device in self.devices)
        if not self.devices:
            return frozenset()
        found = frozenset(node.accelerator_kind for node in self.nodes if node.accelerators)
        has_more = len(self.devices) > sum(int(node.accelerators) for node in self.nodes)
        return found | {DECLARED} if has_more else found

    def info(self) -> MachineInfo:
        """Return what events show of the machine. Asks the devices' driver for their names and memory."""
        if self.nodes:
            infos = tuple(node.info() for node in self.nodes)
            return MachineInfo(self.cores, self.ram_bytes, self._cluster_devices(), infos)
        return MachineInfo(self.cores, self.ram_bytes, _device_infos(self.devices))

    def _cluster_devices(self) -> tuple[DeviceInfo, ...]:
        """Return the devices of the nodes, one after the other, and then those that are only declared."""
        types = [node.accelerator_type for node in self.nodes for _ in range(int(node.accelerators))]
        types += [""] * (len(self.devices) - len(types))
        return tuple(DeviceInfo(f"{CLUSTER_DEVICE}:{i}", kind) for i, kind in enumerate(types))

    def first_devices(self) -> dict[str, int]:
        """Return the number of the first device of each node, by id, and with an empty id that of nodes to come."""
        first, found = 0, dict[str, int]()
        for node in self.nodes:
            found[node.id] = first
            first += int(node.accelerators)
        return {**found, "": first}


def detect_accelerators() -> tuple[str, ...]:
    """Return the ids of NVIDIA devices, found through their driver, or of TPU chips, found by their device files.

    ``CUDA_VISIBLE_DEVICES`` limits the NVIDIA devices.
    """
    return _gpus() or _tpus()


def _gpus() -> tuple[str, ...]:
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        return ()  # there is no driver, so there are no devices
    try:
        indices = [str(i) for i in range(pynvml.nvmlDeviceGetCount())]
    finally:
        pynvml.nvmlShutdown()
    # If only some devices are visible to this process, its workers get no others.
    visible = os.environ.get("CUDA_VISIBLE_DEVICES")
    if visible is not None:
        indices = [v.strip() for v in visible.split(",") if v.strip() not in ("", "-1")]
    return tuple(f"gpu:{i}" for i in indices)


def _device_infos(devices: tuple[str, ...]) -> tuple[DeviceInfo, ...]:
    """Return what the driver of NVIDIA devices knows of these devices; of others only their ids are known."""
    infos = {device: DeviceInfo(device) for device in devices}
    if any(device.startswith("gpu:") for device in devices):
        import pynvml

        with contextlib.suppress(pynvml.NVMLError):
            pynvml.nvmlInit()
            try:
                for device in devices:
                    kind, _, number = device.partition(":")
                    if kind == "gpu":
                        infos[device] = _gpu_info(device, number)
            finally:
                pynvml.nvmlShutdown()
    return tuple(infos.values())


def _gpu_info(device: str, number: str) -> DeviceInfo:
    import pynvml

    try:
        by_index, by_uuid = pynvml.nvmlDeviceGetHandleByIndex, pynvml.nvmlDeviceGetHandleByUUID
        handle = by_index(int(number)) if number.isdigit() else by_uuid(number)
        name: Any = pynvml.nvmlDeviceGetName(handle)
        memory = int(pynvml.nvmlDeviceGetMemoryInfo(handle).total)
    except pynvml.NVMLError:
        return DeviceInfo(device)  # a part of a device may not know its memory
    return DeviceInfo(device, name.decode(errors="replace") if isinstance(name, bytes) else str(name), memory)


def _tpus() -> tuple[str, ...]:
    chips = glob.glob("/dev/accel[0-9]*") or glob.glob("/dev/vfio/[0-9]*")
    return tuple(f"tpu:{i}" for i in range(len(chips)))


def visibility(devices: tuple[str, ...]) -> dict[str, str]:
    """Return the environment variables that make only these devices visible to a process.

    >>> visibility(("gpu:1",))["CUDA_VISIBLE_DEVICES"], visibility(())["CUDA_VISIBLE_DEVICES"]
    ('1', '')
    """
    ids = ",".join(device.split(":", 1)[1] for device in devices)
    if any(device.startswith("tpu:") for device in devices):
        return {"TPU_VISIBLE_CHIPS": ids, "CUDA_VISIBLE_DEVICES": ""}
    # By default JAX takes most of a device's memory for itself, but other models share the device.
    return {"CUDA_VISIBLE_DEVICES": ids, "TPU_VISIBLE_CHIPS": "", "XLA_PYTHON_CLIENT_PREALLOCATE": "false"}
