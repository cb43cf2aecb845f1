"""As many threads as this process has cores, in libraries that would else start one per core of the machine."""

from __future__ import annotations

import os
import sys
import threading

from luminosity.core import OPENMP_VARIABLES, THREAD_VARIABLES, WorkerShare, usable_cores

__all__ = ["limit_threads", "variables_set_here"]

_OPENMP = "OMP_NUM_THREADS"
_VARIABLE_OF_LOADED = {
    "blis": "BLIS_NUM_THREADS",
    "mkl": "MKL_NUM_THREADS",
    "openblas": "OPENBLAS_NUM_THREADS",
    "openmp": _OPENMP,
}
_SDK_WORKER = b"apache_beam.runners.worker.sdk_worker_main"

_lock = threading.Lock()
_limited_to: int | None = None
_set_here: set[str] = set()


def limit_threads(threads: int | None = None) -> int:
    """Keep numerical libraries, loaded or yet to be loaded, to this process's share of the cores.

    Without a number, what the environment says for a library stays (``OMP_NUM_THREADS`` and the like). With one, it
    replaces that. The first call counts, and later calls without a number change nothing, so that a number that your
    code sets after it, as with ``torch.set_num_threads``, stays. Returns the number.

    Call it before JAX computes for the first time: its pools never change their size. An OpenMP library that was loaded
    before the call takes the number in the calling thread alone; torch takes it everywhere.
    """
    global _limited_to
    with _lock:
        if _limited_to is None or threads not in (None, _limited_to):
            _limited_to = threads or share_of_cores()
            if threads is None and _limited_to == usable_cores():
                # All of them, as libraries take by themselves. Variables would be inherited by workers with less.
                return _limited_to
            _tell_later_libraries(_limited_to, replace=threads is not None)
            _tell_loaded_libraries()
        return _limited_to


def variables_set_here() -> frozenset[str]:
    """What says in the environment how many threads this process takes, and came from no user."""
    return frozenset(_set_here)


def share_of_cores() -> int:
    """The whole cores of this process: the engine says how many; elsewhere Beam's workers here share them equally."""
    return max(1, int(WorkerShare.current().cores / _workers_here()))


def _workers_here() -> int:
    """How many processes share what `WorkerShare` says: other Beam workers count that this process can see.

    The engine's workers each have their own share, and are not started by that name.
    """
    if not _is_sdk_worker("self"):
        return 1
    return max(1, sum(_is_sdk_worker(name) for name in os.listdir("/proc") if name.isdecimal()))


def _is_sdk_worker(process: str) -> bool:
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            return _SDK_WORKER in file.read().split(b"\0")
    except OSError:
        return False  # it has ended, or this system has no such files


def _tell_later_libraries(threads: int, replace: bool) -> None:
    def set_variable(name: str, value: str) -> None:
        if replace or name not in os.environ:
            os.environ[name] = value
            _set_here.add(name)

    set_variable(_OPENMP, str(threads))
    openmp = _number_in(_OPENMP) or threads
    for variable in THREAD_VARIABLES:
        set_variable(variable, str(openmp if variable in OPENMP_VARIABLES else threads))
    if threads == 1:
        # A pool of one thread is no help, and tokenizers would warn of it when the process forks.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _tell_loaded_libraries() -> None:
    """They have read the environment, perhaps before it was set: a forked process has its parent's libraries."""
    from threadpoolctl import ThreadpoolController

    # OpenMP's last: a BLAS that stands on it changes its number, too.
    for library in sorted(ThreadpoolController().lib_controllers, key=lambda library: library.internal_api == "openmp"):
        variable = _VARIABLE_OF_LOADED.get(library.internal_api)
        if variable and (number := _number_in(variable)):
            library.set_num_threads(number)
    # Torch keeps a number of its own, and applies it in each thread that computes.
    torch = sys.modules.get("torch")
    if torch is not None and (number := _number_in(_OPENMP)):
        torch.set_num_threads(number)


def _number_in(variable: str) -> int | None:
    """Of a list, as OpenMP takes it for loops within loops, the first."""
    value = os.environ[variable].partition(",")[0].strip()
    return int(value) if value.isdecimal() and int(value) > 0 else None
