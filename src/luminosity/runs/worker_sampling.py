"""Sampling of worker processes: CPU time and memory of each, and of the processes that they start."""

from __future__ import annotations

import os
import threading
from collections.abc import Iterator, Mapping
from dataclasses import dataclass, replace

from luminosity.events import WorkerView

__all__ = ["MOST_VIEWS", "ProcessUse", "WorkerSampler", "process_use"]

MOST_VIEWS = 100  # workers in a snapshot: five times a second, more would cost too much
_MOST_AT_ONCE = 50  # processes in one sample; with more workers, each is sampled less often. One takes 0.1 ms
_MOST_KNOWN = 1000  # workers that are remembered, also those that have ended
_MOST_CHILDREN = 20  # processes of workers that are shown
_TICKS_PER_S = os.sysconf("SC_CLK_TCK")
_MODEL_HOST = b"luminosity.inference.ipc"  # in the command of the process that holds models for several workers


@dataclass(frozen=True)
class ProcessUse:
    """What a process has used; 0 where the system does not report it."""

    cpu_seconds: float = 0.0
    resident: int = 0
    peak_resident: int = 0


def process_use(pid: int) -> ProcessUse | None:
    """Return what a process has used, or None if it has ended or the system does not report it."""
    try:
        with open(f"/proc/{pid}/stat", "rb", buffering=0) as file:
            # The name of the command stands in parentheses and may contain any character.
            fields = file.read().rpartition(b")")[2].split()
        with open(f"/proc/{pid}/status", "rb", buffering=0) as file:
            lines = file.read().splitlines()
    except OSError:
        return None
    sizes = {line.partition(b":")[0]: line for line in lines if line.startswith((b"VmHWM:", b"VmRSS:"))}
    return ProcessUse(
        round((int(fields[11]) + int(fields[12])) / _TICKS_PER_S, 2),
        _kilobytes(sizes.get(b"VmRSS")),
        _kilobytes(sizes.get(b"VmHWM")),
    )


def _kilobytes(line: bytes | None) -> int:
    return int(line.split()[1]) << 10 if line else 0


class WorkerSampler:
    """Keeps the newest sample of each worker process, and of processes that workers have started.

    One thread calls :meth:`sample`, the loop's thread everything else. A process that a worker has started, such as
    the host of a large model, is a worker of its own in the views, in the pool of the worker that started it.
    """

    def __init__(self) -> None:
        self._lock = threading.Lock()
        self._known: dict[str, WorkerView] = {}
        self._watched: dict[str, int] = {}  # workers that are up, and their process ids
        self._children: dict[int, WorkerView] = {}
        self._next = 0  # the place in the list of workers from which the next sample goes on

    def watch(self, worker: str, pool: str, pid: int, node: str = "") -> None:
        """Sample a worker that has started, from now on. ``pid`` is 0 for one on another machine."""
        with self._lock:
            while len(self._known) >= _MOST_KNOWN:
                del self._known[next(iter(self._known))]
            self._known[worker] = WorkerView(worker, pool, pid, node=node)
            if pid:
                self._watched[worker] = pid

    def reported(self, worker: str, cpu_seconds: float, resident: int, pid: int) -> None:
        """Note what a worker on another machine has said itself. ``pid`` is 0 before it has said something."""
        with self._lock:
            if (before := self._known.get(worker)) is not None:
                use = ProcessUse(round(cpu_seconds, 2), resident, resident)
                self._known[worker] = replace(_updated(before, use, resident), pid=pid)

    def look(self, worker: str) -> None:
        """Sample a worker now, because it will end soon."""
        with self._lock:
            pid = self._watched.get(worker)
        if pid is not None:
            self._take(worker, pid, {})

    def ended(self, worker: str) -> WorkerView | None:
        """Stop sampling a worker. Returns its last sample, or None if it was not watched."""
        with self._lock:
            self._watched.pop(worker, None)
            return self._known.get(worker)

    def sample(self, parents: Mapping[int, int], own: Mapping[int, int]) -> None:
        """Sample all workers, or some of them if there are many.

        ``parents`` has the parent of each process below this one, ``own`` the memory of its own pages and its part of
        shared ones.
        """
        with self._lock:
            watched = list(self._watched.items())
        first = self._next if self._next < len(watched) else 0
        for worker, pid in watched[first : first + _MOST_AT_ONCE]:
            self._take(worker, pid, own)
        self._next = first + _MOST_AT_ONCE
        self._sample_children({pid: worker for worker, pid in watched if pid != os.getpid()}, parents, own)

    def views(self, running: Mapping[str, tuple[str, ...]] | None) -> tuple[WorkerView, ...]:
        """Return the newest samples of the workers in ``running``, with the stages that run there.

        None: the run has ended; then all workers that are known. Of very many workers, some are left out evenly.
        """
        with self._lock:
            known, children = dict(self._known), list(self._children.values())
        if running is None:
            views = list(known.values())
        else:
            views = [replace(known[worker], running=stages) for worker, stages in running.items() if worker in known]
        step = -(-len(views) // MOST_VIEWS) or 1
        return (*views[::step], *children)

    def _take(self, worker: str, pid: int, own: Mapping[int, int]) -> None:
        if (use := process_use(pid)) is None:
            return
        with self._lock:
            if (before := self._known.get(worker)) is not None:
                self._known[worker] = _updated(before, use, own.get(pid, before.own))

    def _sample_children(self, workers: Mapping[int, str], parents: Mapping[int, int], own: Mapping[int, int]) -> None:
        """Sample the processes below workers. Those that have ended stay as they were last."""
        found = {pid: worker for pid in parents if pid not in workers and (worker := _owner(pid, workers, parents))}
        for pid, worker in found.items():
            before = self._children.get(pid)
            if (use := process_use(pid)) is None or (before is None and not self._has_room(found)):
                continue
            with self._lock:
                if before is None:
                    pool = self._known[worker].pool if worker in self._known else ""
                    before = WorkerView(f"{worker} {_kind(pid)} {pid}", pool, pid)
                self._children[pid] = _updated(before, use, own.get(pid, before.own))

    def _has_room(self, found: Mapping[int, str]) -> bool:
        """Return whether one more child can be remembered. Forgets one that has ended, with the least CPU time."""
        gone = [pid for pid in self._children if pid not in found]
        if len(self._children) >= _MOST_CHILDREN and gone:
            with self._lock:
                del self._children[min(gone, key=lambda pid: self._children[pid].cpu_seconds)]
        return len(self._children) < _MOST_CHILDREN


def _updated(before: WorkerView, use: ProcessUse, own: int) -> WorkerView:
    return replace(
        before,
        cpu_seconds=max(use.cpu_seconds, before.cpu_seconds),
        resident=use.resident,
        peak_resident=max(use.peak_resident, use.resident, before.peak_resident),
        own=own,
    )


def _owner(pid: int, workers: Mapping[int, str], parents: Mapping[int, int]) -> str:
    """Return the worker that started a process, itself or through others; empty if no worker did."""
    return next((workers[above] for above in _above(pid, parents) if above in workers), "")


def _above(pid: int, parents: Mapping[int, int]) -> Iterator[int]:
    while (above := parents.get(pid)) is not None:
        yield above
        pid = above


def _kind(pid: int) -> str:
    try:
        with open(f"/proc/{pid}/cmdline", "rb", buffering=0) as file:
            return "model host" if _MODEL_HOST in file.read() else "child"
    except OSError:
        return "child"
