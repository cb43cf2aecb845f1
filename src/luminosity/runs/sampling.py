"""Sampling of a run's memory and devices: asks the operating system and the devices' driver once a second.

Of devices, it keeps the mean and the peak over the run.
"""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Generator, Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any

from luminosity.events import ProcessMemory
from luminosity.runs.worker_sampling import WorkerSampler

__all__ = ["DeviceSampler", "DeviceUse", "Sampler", "TreeMemory", "folder_size"]


@dataclass(frozen=True)
class DeviceUse:
    """The load and memory of a device at one moment, and over all samples so far."""

    utilization: float | None  # None if the driver does not answer now
    memory_used: int | None
    memory_total: int | None
    mean_utilization: float
    peak_utilization: float
    peak_memory: int


class DeviceSampler:
    """Samples devices. Only one thread calls it; ``uses`` may be read from any thread."""

    def __init__(self, devices: Iterable[str], driver: Any = None) -> None:
        """``driver`` is a module as ``pynvml``, which is used if it is None and there is a GPU among ``devices``."""
        self.uses: dict[str, DeviceUse] = {}
        self._gpus = [device for device in devices if device.startswith("gpu:")]
        self._driver = driver
        self._sums: dict[str, tuple[int, float]] = {}  # samples of each device, and their utilization summed up
        self._handles: dict[str, Any] = {}

    @contextlib.contextmanager
    def opened(self) -> Generator[None]:
        """Open the driver, which is asked only for those devices that it knows."""
        if not self._gpus:
            yield
            return
        if self._driver is None:
            import pynvml

            self._driver = pynvml
        driver = self._driver
        try:
            driver.nvmlInit()
        except driver.NVMLError:
            yield
            return
        try:
            for device in self._gpus:
                number = device.split(":", 1)[1]
                with contextlib.suppress(driver.NVMLError):
                    self._handles[device] = (
                        driver.nvmlDeviceGetHandleByIndex(int(number))
                        if number.isdigit()
                        else driver.nvmlDeviceGetHandleByUUID(number)
                    )
            yield
        finally:
            self._handles = {}
            driver.nvmlShutdown()

    def sample(self) -> None:
        """Ask the driver for all devices, and update ``uses``."""
        self.uses = {**self.uses, **{device: use for device in self._handles if (use := self._use(device)) is not None}}

    def _use(self, device: str) -> DeviceUse | None:
        handle, before = self._handles[device], self.uses.get(device)
        try:
            memory = self._driver.nvmlDeviceGetMemoryInfo(handle)
            percent: Any = self._driver.nvmlDeviceGetUtilizationRates(handle).gpu
        except self._driver.NVMLError:
            # A partition of a device has no utilization, and a device may be gone. What was seen of it stays.
            if before is None:
                return None
            return DeviceUse(None, None, None, before.mean_utilization, before.peak_utilization, before.peak_memory)
        utilization = percent / 100
        count, total = self._sums.get(device, (0, 0.0))
        count, total = self._sums[device] = count + 1, total + utilization
        return DeviceUse(
            utilization,
            int(memory.used),
            int(memory.total),
            mean_utilization=round(total / count, 4),
            peak_utilization=max(utilization, before.peak_utilization if before else 0.0),
            peak_memory=max(int(memory.used), before.peak_memory if before else 0),
        )


_EVERY_S = 1.0  # views show whole seconds
_PART_OF_TIME = 0.002  # of a core, at most, for exact measurements: they take longer the more memory there is
_GROWTH = 1.25  # of resident memory, after which shared pages are counted again
_FOLDER_EVERY_S = 5.0  # the size of a folder changes slowly
_STOP_TIMEOUT_S = 5.0  # a driver that does not answer must not hold up the end of a run


class Sampler:
    """Samples memory and devices on a thread of its own, so that neither the loop nor a view waits.

    ``processes`` and ``devices`` hold the newest sample and may be read from any thread. The run that made the sampler
    stops it.
    """

    def __init__(self, devices: Iterable[str], folder: str = "") -> None:
        """Sample these devices, and the size of ``folder``, if it is given."""
        self.folder_bytes = 0
        self._folder = folder
        self.processes = ProcessMemory()
        self.workers = WorkerSampler()
        self._devices = DeviceSampler(devices)
        self._is_stopped = threading.Event()
        self._thread = threading.Thread(target=self._sample, name="luminosity-sampler", daemon=True)

    @property
    def devices(self) -> Mapping[str, DeviceUse]:
        """The newest samples of devices that their driver knows, with mean and peak over the run."""
        return self._devices.uses

    def start(self) -> None:
        """Start the thread."""
        self._thread.start()

    def stop(self) -> None:
        """Stop the thread and wait for it, with a limit. Does nothing if it was not started."""
        self._is_stopped.set()
        if self._thread.ident is not None:
            self._thread.join(_STOP_TIMEOUT_S)

    def _sample(self) -> None:
        memory = TreeMemory(os.getpid())
        folder_at = 0.0
        with self._devices.opened():
            is_stopped = False
            while not is_stopped:
                self._devices.sample()
                used = memory.measure()
                self.processes = ProcessMemory(used, max(used, self.processes.peak))
                self.workers.sample(memory.parents, memory.own)
                if self._folder and time.monotonic() >= folder_at:
                    began_at = time.thread_time()
                    self.folder_bytes = folder_size(self._folder)
                    folder_at = time.monotonic() + max(_FOLDER_EVERY_S, (time.thread_time() - began_at) / _PART_OF_TIME)
                is_stopped = self._is_stopped.wait(_EVERY_S)


def folder_size(folder: str) -> int:
    """Return the bytes that the files below a folder take on the disk. Files may come and go meanwhile."""
    size = 0
    for parent, _, names in os.walk(folder):
        for name in names:
            with contextlib.suppress(OSError):
                size += os.lstat(os.path.join(parent, name)).st_blocks * 512
    return size


class TreeMemory:
    """Measures the memory of a process and its descendants, counting pages that several of them share once.

    The kernel takes milliseconds to count shared pages. So they are counted only now and then, and when processes
    start or end. In between, the sum of resident memory is scaled by the last exact measurement.
    """

    def __init__(self, root: int) -> None:
        self._root = root
        self._processes: list[int] = []
        self._exact_at = 0.0
        self._own_part = 1.0
        self._largest = 0  # resident memory at an exact measurement
        self.parents: dict[int, int] = {}  # of each process below the first one
        self.own: dict[int, int] = {}  # by process, when it was counted last: its own pages and its part of shared ones

    def measure(self) -> int:
        """Return the bytes in use, or 0 if the system does not report them."""
        self.parents = dict(_below(self._root))
        processes = sorted((self._root, *self.parents))
        resident = sum(map(_resident, processes))
        has_grown = resident > _GROWTH * self._largest  # a model was loaded, say: parts of before say little
        if resident and (has_grown or processes != self._processes or time.monotonic() >= self._exact_at):
            self._largest = max(resident, self._largest)
            self._processes = processes
            began_at = time.thread_time()
            self.own = {pid: _own(pid) for pid in processes}
            self._own_part = sum(self.own.values()) / resident
            self._exact_at = time.monotonic() + (time.thread_time() - began_at) / _PART_OF_TIME
        return int(resident * self._own_part)


def _below(root: int) -> Iterator[tuple[int, int]]:
    """Yield every process below ``root``, with its parent."""
    waiting = [root]
    while waiting:
        process = waiting.pop()
        for child in _children(process):
            yield child, process
            waiting.append(child)


def _own(pid: int) -> int:
    """Return the size of its own pages and of its part of shared pages."""
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
        return 0  # it has just ended, or the system does not report it


def _children(pid: int) -> Iterator[int]:
    # The kernel lists children by the thread that started them; threads and processes may end meanwhile.
    with contextlib.suppress(OSError):
        for thread in os.listdir(f"/proc/{pid}/task"):
            with contextlib.suppress(OSError), open(f"/proc/{pid}/task/{thread}/children") as file:
                yield from map(int, file.read().split())
