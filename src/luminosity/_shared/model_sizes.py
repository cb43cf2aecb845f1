"""The sizes of models, known to all workers of a run: small models are loaded by each worker, large ones once."""

from __future__ import annotations

import contextlib
import ctypes
import gc
import os
import threading
from collections.abc import Callable, Generator, Hashable
from typing import TypeVar

from luminosity._shared.shared_files import locked, text_digest
from luminosity.core import WorkerShare, machine_ram_bytes

__all__ = [
    "NODE_FOLDER_VARIABLE",
    "RUN_FOLDER_VARIABLE",
    "SENT_FOLDER_VARIABLE",
    "LocalShare",
    "ModelSizes",
    "models_ram_bytes",
    "return_free_memory",
]

RUN_FOLDER_VARIABLE = "LUMINOSITY_RUN_FOLDER"
"""The environment variable that names a folder to the workers of a run; the engine removes it with the run."""

NODE_FOLDER_VARIABLE = "LUMINOSITY_NODE_FOLDER"
"""The environment variable that names a run's folder on this node to its workers, if they are on a cluster.

In it they find the shared model host. Several nodes may be one machine, with one temporary folder.
"""

SENT_FOLDER_VARIABLE = "LUMINOSITY_SENT_FOLDER"
"""The environment variable with the driver's working folder and its copy on this node, as a JSON list."""

Loaded = TypeVar("Loaded")

_SHARE_OF_RAM = 0.5  # for models; the rest is for the data, and for other programs
_SHARE_OF_SMALL = 0.5  # of the memory for models; the rest is for models that the workers share
_LONGEST_LOAD_S = 600.0  # a model that another worker loads for longer than this is not small
_POLL_S = 0.001  # a small model loads in a few milliseconds
_ALIKE_AFTER = 4  # models of a kind that were small; the next ones are taken for small, too
_MANY_FIT = 64  # a model is certainly small if this many fit into a worker's share


def models_ram_bytes() -> int:
    """Return the part of the machine's memory that models may take, in all workers together."""
    return int(machine_ram_bytes() * _SHARE_OF_RAM)


def return_free_memory() -> None:
    """Return the memory of dropped models to the system: otherwise the next model reuses it and seems to need none."""
    gc.collect()
    trim = getattr(ctypes.CDLL(None), "malloc_trim", None)  # only glibc has it, and only glibc needs it
    if trim is not None:
        trim(0)


class ModelSizes:
    """A file in the run's folder with the size of each model that any worker has loaded.

    No process knows the size of a model before it has loaded it. So models of unknown size are loaded one at a time on
    a machine: two workers that load the same large model at once might exceed the memory. After some models of a kind
    were small, others of that kind are loaded without waiting. Methods may be called from any thread.
    """

    def __init__(self, folder: str) -> None:
        flags = os.O_RDWR | os.O_CREAT | os.O_APPEND | os.O_CLOEXEC
        self._file = os.open(os.path.join(folder, "model-sizes"), flags, 0o600)
        self._lock = threading.Lock()
        """Threads of a process hold the file's lock one after another."""
        self._reading = threading.Lock()
        """Protects what was read so far."""
        self._read_to = 0
        self._known: dict[str, int] = {}
        self._of_kinds: dict[str, tuple[int, int]] = {}
        """How many models of each kind are known, and the bytes of the largest."""

    @classmethod
    def of_run(cls) -> ModelSizes | None:
        """Return the sizes of this worker's run; None if this process is not a worker of the engine."""
        folder = os.environ.get(RUN_FOLDER_VARIABLE)
        with _lock:
            if folder is None or not os.path.isdir(folder):
                return None
            key = os.getpid(), folder
            if key not in _of_runs:
                _of_runs.clear()  # A forked process has its own, and a process serves one run at a time.
                _of_runs[key] = cls(folder)
            return _of_runs[key]

    def get(self, name: Hashable) -> int | None:
        """Return the bytes of a model, or None if no worker has loaded it."""
        digest = _digest(name)
        if digest not in self._known:
            self._read()
        return self._known.get(digest)

    def add(self, name: Hashable, kind: str, size: int) -> None:
        """Tell all workers the size of a model. ``kind``: the class of its handler."""
        os.write(self._file, f"{_digest(name)} {_digest(kind)} {size}\n".encode())
        self._read()

    def load_if_small(
        self,
        name: Hashable,
        kind: str,
        share: LocalShare,
        *,
        load: Callable[[], Loaded],
        measure: Callable[[], Loaded | None],
    ) -> Loaded | None:
        """Load a model in this process if the share has room for it; return None if it has not.

        ``load`` loads a model whose size is known. ``measure`` loads one to find its size and calls :meth:`add`. If the
        model is not small, it drops the model and returns None. Waits while another worker measures.
        """
        size = self.get(name)
        if size is None:
            try:
                with self.measuring(kind, share):
                    size = self.get(name)  # Another worker may have loaded it meanwhile.
                    if size is None:
                        return measure()
            except TimeoutError:
                return None
        return load() if share.take(name, size) else None

    @contextlib.contextmanager
    def measuring(self, kind: str, share: LocalShare) -> Generator[None]:
        """Hold the lock of the machine while a model of unknown size is loaded, unless such models are small.

        Raises ``TimeoutError`` if other workers load for too long.
        """
        count, largest = self._of_kinds.get(_digest(kind), (0, 0))
        if count >= _ALIKE_AFTER and _MANY_FIT * largest <= share.limit:
            yield
            return
        if not self._lock.acquire(timeout=_LONGEST_LOAD_S):
            raise TimeoutError(f"waited {_LONGEST_LOAD_S:.0f} s for another thread to load a model")
        try:
            with locked(self._file, _LONGEST_LOAD_S, _POLL_S):
                yield
        finally:
            self._lock.release()

    def _read(self) -> None:
        with self._reading:
            new = os.pread(self._file, max(os.fstat(self._file).st_size - self._read_to, 0), self._read_to)
            whole = new[: new.rfind(b"\n") + 1]
            self._read_to += len(whole)
            for line in whole.decode().splitlines():
                digest, kind, size = line.split()
                self._known[digest] = int(size)
                count, largest = self._of_kinds.get(kind, (0, 0))
                self._of_kinds[kind] = count + 1, max(largest, int(size))


class LocalShare:
    """The memory for small models in this worker process. Methods may be called from any thread."""

    def __init__(self, requested: int | None) -> None:
        """``requested``: the bytes for the models of all workers together, unless it is None."""
        total = models_ram_bytes() if requested is None else requested
        self.limit = int(total * _SHARE_OF_SMALL) // max(WorkerShare.current().workers, 1)
        self._lock = threading.Lock()
        self._taken: dict[Hashable, tuple[int, int]] = {}
        """The bytes of each model, and how often it was taken."""
        self._total = 0

    @classmethod
    def of_process(cls, requested: int | None) -> LocalShare:
        """Return the one share of this process for a memory budget."""
        with _lock:
            key = os.getpid(), requested
            if key not in _shares:
                for old in [each for each in _shares if each[0] != os.getpid()]:
                    del _shares[old]
                _shares[key] = cls(requested)
            return _shares[key]

    def take(self, name: Hashable, size: int) -> bool:
        """Take memory for a model; return whether there is enough. Call :meth:`give_back` once for each success."""
        with self._lock:
            known, users = self._taken.get(name, (size, 0))
            if not users and self._total + size > self.limit:
                return False
            self._total += 0 if users else size
            self._taken[name] = known, users + 1
            return True

    def give_back(self, name: Hashable) -> None:
        """Return the memory of a model that is no longer used."""
        with self._lock:
            size, users = self._taken.pop(name)
            if users > 1:
                self._taken[name] = size, users - 1
            else:
                self._total -= size


_lock = threading.Lock()
"""Protects ``_of_runs`` and ``_shares``."""
_of_runs: dict[tuple[int, str], ModelSizes] = {}
_shares: dict[tuple[int, int | None], LocalShare] = {}


def _digest(name: Hashable) -> str:
    return text_digest(repr(name), digits=32)
