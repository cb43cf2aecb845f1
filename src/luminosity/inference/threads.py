"""Limits the threads of numerical libraries to this process's share of the cores.

Without a limit, each worker process would start one thread per core of the machine in each library.
"""

from __future__ import annotations

import os
import sys
import threading

from luminosity.core import OPENMP_VARIABLES, THREAD_VARIABLES, WorkerShare, usable_cores

__all__ = ["limit_threads", "variables_set_here"]

FORK_SAFE_IMPORTS = ("threadpoolctl",)
"""Libraries that each worker with a model needs: the engine imports them once, before it forks workers."""

_OPENMP = "OMP_NUM_THREADS"
_VARIABLE_OF_LOADED = {
    "blis": "BLIS_NUM_THREADS",
    "mkl": "MKL_NUM_THREADS",
    "openblas": "OPENBLAS_NUM_THREADS",
    "openmp": _OPENMP,
}
_SDK_WORKER = b"apache_beam.runners.worker.sdk_worker_main"

_lock = threading.Lock()
"""Protects the two variables below."""
_limited_to: int | None = None
_set_here: set[str] = set()


def limit_threads(threads: int | None = None) -> int:
    """Limit the threads of numerical libraries, imported or not, to this process's share of the cores.

    Returns the limit. Without ``threads``, variables that you have set, such as ``OMP_NUM_THREADS``, stay; with it,
    they are replaced. After the first call, calls without ``threads`` change nothing, so a number that your code sets
    later, such as with ``torch.set_num_threads``, stays.

    Call this before JAX computes for the first time: its thread pools never change their size. An OpenMP library that
    was loaded before the call applies the limit only in the calling thread; torch applies it in all threads.
    """
    global _limited_to
    with _lock:
        if _limited_to is None or threads not in (None, _limited_to):
            _limited_to = threads or share_of_cores()
            if threads is None and _limited_to == usable_cores():
                # Libraries use all cores by default. Variables would be inherited by workers with a smaller share.
                return _limited_to
            _limit_later_libraries(_limited_to, replace=threads is not None)
            _limit_loaded_libraries()
        return _limited_to


def variables_set_here() -> frozenset[str]:
    """Return the environment variables that this module has set, and not the user."""
    return frozenset(_set_here)


def share_of_cores() -> int:
    """Return this process's whole cores: its share by the engine, or an equal part among Beam's workers here."""
    return max(1, int(WorkerShare.current().cores / _workers_here()))


def _workers_here() -> int:
    """Return how many processes divide ``WorkerShare``: the Beam SDK workers that this process can see.

    The engine's workers each have their own share and are not SDK workers.
    """
    if not _is_sdk_worker("self"):
        return 1
    return max(1, sum(_is_sdk_worker(name) for name in os.listdir("/proc") if name.isdecimal()))


def _is_sdk_worker(process: str) -> bool:
    try:
        with open(f"/proc/{process}/cmdline", "rb") as file:
            return _SDK_WORKER in file.read().split(b"\0")
    except OSError:
        return False  # The process has ended, or this system has no /proc.


def _limit_later_libraries(threads: int, replace: bool) -> None:
    def set_variable(name: str, value: str) -> None:
        if replace or name not in os.environ:
            os.environ[name] = value
            _set_here.add(name)

    set_variable(_OPENMP, str(threads))
    openmp = _number_in(_OPENMP) or threads
    for variable in THREAD_VARIABLES:
        set_variable(variable, str(openmp if variable in OPENMP_VARIABLES else threads))
    if threads == 1:
        # One thread gains nothing, and tokenizers would log a warning when the process forks.
        os.environ.setdefault("TOKENIZERS_PARALLELISM", "false")


def _limit_loaded_libraries() -> None:
    """Limit loaded libraries, which no longer read the environment; a forked process has its parent's libraries."""
    from threadpoolctl import ThreadpoolController

    # OpenMP comes last: a BLAS library that uses it changes its number, too.
    for library in sorted(ThreadpoolController().lib_controllers, key=lambda library: library.internal_api == "openmp"):
        variable = _VARIABLE_OF_LOADED.get(library.internal_api)
        if variable and (number := _number_in(variable)):
            library.set_num_threads(number)
    # Torch keeps its own number, and applies it in each computing thread.
    torch = sys.modules.get("torch")
    if torch is not None and (number := _number_in(_OPENMP)):
        torch.set_num_threads(number)


def _number_in(variable: str) -> int | None:
    """Return the number in a variable; OpenMP allows a list for nested loops, of which the first counts."""
    value = os.environ[variable].partition(",")[0].strip()
    return int(value) if value.isdecimal() and int(value) > 0 else None
