"""What the operating system and the devices' driver say about a run, asked about once a second."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Generator, Iterable, Iterator
from dataclasses import dataclass
from typing import Any

from luminosity.events import ProcessMemory

_EVERY_S = 1.0
_PART_OF_TIME = 0.005  # of a core, at most, for what takes the kernel longer the more memory there is
_STOP_TIMEOUT_S = 5.0


@dataclass(frozen=True)
class DeviceUse:
    """What a device does now."""

    utilization: float
    memory_used: int
    memory_total: int


class Sampler:
    """Asks on a thread of its own: neither the loop nor a view waits for an answer."""

    def __init__(self, devices: Iterable[str]) -> None:
        self.processes = ProcessMemory()
        self.devices: dict[str, DeviceUse] = {}
        self._gpus = [device for device in devices if device.startswith("gpu:")]
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="luminosity-sampler", daemon=True)

    def start(self) -> None:
        self._thread.start()

    def stop(self) -> None:
        self._is_stopped.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_TIMEOUT_S)

    def _sample(self) -> None:
        memory = TreeMemory(os.getpid())
        with _driver(self._gpus) as handles:
            is_stopped = False
            while not is_stopped:
                self.devices = {device: use for device, h in handles.items() if (use := _device_use(h)) is not None}
                used = memory.measure()
                self.processes = ProcessMemory(used, max(used, self.processes.peak))
                is_stopped = self._is_stopped.wait(_EVERY_S)


class TreeMemory:
    """The bytes of a process and all below it, where pages that several of them share count once.

    The kernel takes milliseconds to share them out. So it is asked to now and then, and when processes came or
    went; in between, what each process has is taken, and as much of it as was shared the last time.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._processes: list[int] = []
        self._exact_at = 0.0
        self._own_part = 1.0

    def measure(self) -> int:
        """0 where the system does not tell."""
        processes = sorted(_tree(self._root))
        resident = sum(map(_resident, processes))
        if resident and (processes != self._processes or time.monotonic() >= self._exact_at):
            self._processes = processes
            began_at = time.thread_time()
            self._own_part = sum(map(_own, processes)) / resident
            self._exact_at = time.monotonic() + (time.thread_time() - began_at) / _PART_OF_TIME
        return int(resident * self._own_part)


def _tree(root: int) -> Iterator[int]:
    waiting = [root]
    while waiting:
        process = waiting.pop()
        yield process
        waiting += _children(process)


def _own(pid: int) -> int:
    """Its own pages, and its part of those that it shares."""
    try:
        with open(f"/proc/{pid}/smaps_rollup") as file:
            return next(int(line.split()[1]) << 10 for line in file if line.startswith("Pss:"))
    except (OSError, StopIteration):
        return _resident(pid)


def _resident(pid: int) -> int:
    try:
        with open(f"/proc/{pid}/statm") as file:
            return int(file.read().split()[1]) * os.sysconf("SC_PAGE_SIZE")
    except OSError:
        return 0  # it has just ended, or this system tells nothing


def _children(pid: int) -> Iterator[int]:
    # A process belongs to the thread that started it; threads and processes may end while we look.
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                yield from map(int, file.read().split())


@contextlib.contextmanager
def _driver(gpus: list[str]) -> Generator[dict[str, Any], None, None]:
    """The driver's names for those devices that it knows."""
    if not gpus:
        yield {}
        return
    import pynvml

    try:
        pynvml.nvmlInit()
    except pynvml.NVMLError:
        yield {}
        return
    try:
        handles: dict[str, Any] = {}
        for device in gpus:
            number = device.split(":", 1)[1]
            with contextlib.suppress(pynvml.NVMLError):
                handles[device] = (
                    pynvml.nvmlDeviceGetHandleByIndex(int(number))
                    if number.isdigit()
                    else pynvml.nvmlDeviceGetHandleByUUID(number)
                )
        yield handles
    finally:
        pynvml.nvmlShutdown()


def _device_use(handle: Any) -> DeviceUse | None:
    import pynvml

    try:
        memory = pynvml.nvmlDeviceGetMemoryInfo(handle)
        percent: Any = pynvml.nvmlDeviceGetUtilizationRates(handle).gpu
        return DeviceUse(percent / 100, int(memory.used), int(memory.total))
    except pynvml.NVMLError:
        return None  # a part of a device has no utilization; a device may be gone
