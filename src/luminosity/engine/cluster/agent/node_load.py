"""How busy a node is: its cores, memory and accelerators."""

from __future__ import annotations

import contextlib
import os
import socket
from dataclasses import asdict, dataclass
from typing import Any

from luminosity.runs.sampling import DeviceSampler

__all__ = ["DeviceSample", "NodeLoad", "NodeSample"]

_STAT = "/proc/stat"
_MEMINFO = "/proc/meminfo"


@dataclass(frozen=True)
class DeviceSample:
    """The load and memory of one accelerator of a node; None where the driver does not answer."""

    utilization: float | None  # between 0 and 1
    memory_used: int | None
    memory_total: int | None


@dataclass(frozen=True)
class NodeSample:
    """The load of a node since the last sample, and its memory now."""

    node_id: str
    host: str
    cpu_utilization: float | None  # of all cores, between 0 and 1; None for the first sample
    ram_used: int
    ram_total: int
    devices: dict[str, DeviceSample]

    def to_json(self) -> dict[str, Any]:
        """Return the sample as values that JSON knows."""
        return asdict(self)


class NodeLoad:
    """Samples the node of this process."""

    def __init__(self, node_id: str) -> None:
        self._node_id = node_id
        self._busy: tuple[int, int] | None = None
        self._devices = DeviceSampler(_devices())
        self._resources = contextlib.ExitStack()
        self._resources.enter_context(self._devices.opened())

    def close(self) -> None:
        """Let go of the devices."""
        self._resources.close()

    def sample(self) -> NodeSample:
        """Return the load since the last call, and the memory now."""
        self._devices.sample()
        used, total = _ram()
        return NodeSample(
            self._node_id,
            socket.gethostname(),
            self._cpu_utilization(),
            used,
            total,
            {
                name: DeviceSample(use.utilization, use.memory_used, use.memory_total)
                for name, use in self._devices.uses.items()
            },
        )

    def _cpu_utilization(self) -> float | None:
        before, self._busy = self._busy, _cpu_ticks()
        if before is None or self._busy is None or self._busy[1] <= before[1]:
            return None
        return (self._busy[0] - before[0]) / (self._busy[1] - before[1])


def _devices() -> list[str]:
    """Return the accelerators of the node. Ray hides them from an actor that asks for none, but not from the driver."""
    return [f"gpu:{number}" for number in range(64) if os.path.exists(f"/dev/nvidia{number}")]


def _cpu_ticks() -> tuple[int, int] | None:
    """Return the time that all cores were busy, and all their time, since the machine started. None if unknown."""
    try:
        with open(_STAT) as file:
            ticks = [int(each) for each in file.readline().split()[1:9]]  # guests are counted in user time already
    except OSError:
        return None
    idle = ticks[3] + ticks[4]  # idle, and waiting for a disk
    return sum(ticks) - idle, sum(ticks)


def _ram() -> tuple[int, int]:
    """Return the bytes in use and all bytes of the node's memory; zeros if the system does not say."""
    try:
        with open(_MEMINFO) as file:
            sizes = {name: int(rest.split()[0]) << 10 for name, _, rest in (line.partition(":") for line in file)}
    except OSError:
        return 0, 0
    return sizes["MemTotal"] - sizes["MemAvailable"], sizes["MemTotal"]
