"""The node agent: a small actor on each node that a run uses. It owns the run's folder there and samples the node."""

from __future__ import annotations

import atexit
import contextlib
import os
import socket
import threading
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any

from luminosity.engine.actors.node_folder import NodeFolder
from luminosity.engine.cluster import packages
from luminosity.engine.monitor.devices import DeviceSampler
from luminosity.extras import require
from luminosity.model_sizes import NODE_FOLDER_VARIABLE

__all__ = ["DeviceSample", "NodeAgent", "NodeSample"]

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


class NodeAgent:
    """Serves one run on one node. The driver makes an actor of it, which Ray ends with the run.

    Its process holds no accelerator and runs no user code.
    """

    def __init__(self, run_id: str, files: Mapping[str, bytes]) -> None:
        """Make the run's folder on this node, with small files that all workers there need."""
        self._node_id = _this_node()
        self._closed = threading.Event()
        self._folder = NodeFolder.open(run_id, files, self._node_id)
        atexit.register(self._folder.remove)
        self._busy: tuple[int, int] | None = None
        self._devices = DeviceSampler(_devices())
        self._resources = contextlib.ExitStack()
        self._resources.enter_context(self._devices.opened())
        atexit.register(self._resources.close)

    def folder(self) -> dict[str, str]:
        """Return ``path`` (the given files lie in it by name), ``memory``, ``node_id`` and ``host``."""
        return {
            "path": self._folder.path,
            "memory": self._folder.memory,
            "node_id": self._node_id,
            "host": socket.gethostname(),
        }

    def install(self) -> str:
        """Install the packages that the run brings along, and return their folder; empty if there are none.

        Call it once, before the node's first worker starts. May take minutes. Raises :class:`WorkerStartFailed`.
        """
        return packages.install(os.getcwd(), os.path.join(self._folder.path, "packages"))

    def environment(self) -> dict[str, str]:
        """Return the variables that a worker of the run on this node needs."""
        return {NODE_FOLDER_VARIABLE: self._folder.memory}

    def ping(self) -> str:
        """Return the node's id; the answer shows that the node is alive."""
        return self._node_id

    def copy(self, block: Any) -> tuple[Any, int]:
        """Return a block, of which Ray then keeps a second copy on this node, and its size, which says that it does."""
        return block, len(block[0])

    def stay(self) -> None:
        """Return when the agent is closed. If the call fails before that, the node is gone."""
        self._closed.wait()

    def sample(self) -> NodeSample:
        """Return the load of the node since the last call, and its memory now."""
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

    def close(self) -> None:
        """Remove the folder. The agent of a run that has ended needs no other call."""
        self._folder.remove()
        self._closed.set()

    def _cpu_utilization(self) -> float | None:
        before, self._busy = self._busy, _cpu_ticks()
        if before is None or self._busy is None or self._busy[1] <= before[1]:
            return None
        return (self._busy[0] - before[0]) / (self._busy[1] - before[1])


def _this_node() -> str:
    ray = require("ray", "ray")
    return str(ray.get_runtime_context().get_node_id())


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
