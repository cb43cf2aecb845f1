"""Sampling of a run's memory and devices: asks the operating system and the devices' driver once a second."""

from __future__ import annotations

import contextlib
import os
import threading
import time
from collections.abc import Iterable, Iterator, Mapping

from luminosity.events import ProcessMemory
from luminosity.runs.devices import DeviceSampler, DeviceUse
from luminosity.runs.worker_sampling import WorkerSampler

__all__ = ["Sampler", "TreeMemory", "folder_size"]


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
