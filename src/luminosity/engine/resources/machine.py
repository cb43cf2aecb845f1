"""The machine's hardware: cores, memory, accelerators."""

from __future__ import annotations

import contextlib
import glob
import os
from collections.abc import Mapping, Sequence
from dataclasses import dataclass, field
from typing import Any

from luminosity.core import machine_ram_bytes, usable_cores
from luminosity.engine.resources.nodes import Node
from luminosity.events import DeviceInfo, MachineInfo

__all__ = ["CLUSTER_DEVICE", "DECLARED", "Machine", "detect_accelerators", "visibility"]

DECLARED = "declared"  # the kind of a device that only --accelerators has declared: it stands for any kind
CLUSTER_DEVICE = "ray"  # the kind of a placeholder: the cluster gives its worker a device


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
