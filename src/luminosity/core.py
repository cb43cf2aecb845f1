"""The nouns that all parts share."""

from __future__ import annotations

import json
import os
from collections.abc import Mapping
from dataclasses import asdict, dataclass
from typing import Any, Final

__all__ = ["InferenceMetrics", "WorkerShare"]

_ENVIRONMENT_KEY = "LUMINOSITY_WORKER_SHARE"


@dataclass(frozen=True)
class WorkerShare:
    """What this process may use of the machine.

    The engine sets it for each of its workers; anywhere else it is the whole machine.

    >>> share = WorkerShare("cpu", cores=1.0, ram_bytes=2**30, devices=(), workers=2)
    >>> WorkerShare.from_environment(share.to_environment()) == share
    True
    """

    pool: str
    cores: float
    ram_bytes: int
    devices: tuple[str, ...]
    workers: int

    @classmethod
    def current(cls) -> WorkerShare:
        """This process's share."""
        return cls.from_environment(os.environ)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> WorkerShare:
        encoded = environment.get(_ENVIRONMENT_KEY)
        if encoded is None:
            return cls("", float(usable_cores()), machine_ram_bytes(), (), 1)
        fields: dict[str, Any] = json.loads(encoded)
        fields["devices"] = tuple(fields["devices"])
        return cls(**fields)

    def to_environment(self) -> dict[str, str]:
        """The environment variables by which a worker learns its share."""
        return {_ENVIRONMENT_KEY: json.dumps(asdict(self))}


OPENMP_VARIABLES = (
    "OMP_NUM_THREADS",  # what the others ask for where theirs is not set
    "BLIS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
THREAD_VARIABLES = (
    *OPENMP_VARIABLES,
    "NPROC",  # JAX, whose pools on the CPU are this large; XLA_FLAGS do not change their size
    "RAYON_NUM_THREADS",  # Hugging Face's tokenizers
)
"""By which numerical libraries learn how many threads to start."""

SORTS_ITS_BUNDLE = "luminosity:sorts_its_bundle"
"""An annotation of steps that do better work on more elements at once: they want long bundles."""

WRITES_A_FILE_PER_BUNDLE = "luminosity:writes_a_file_per_bundle"
"""An annotation of steps that do so: they want few bundles."""

TEMPORARY_FOLDER = "luminosity:temporary_folder"
"""An annotation of steps: a folder of theirs that is of no use once the run has failed."""

ELEMENT_AT_FAULT = "luminosity_element"
"""An attribute of exceptions: a few words on the element at fault, where the arguments of user code don't show it."""


class InferenceMetrics:
    """The names of the counters by which a step that runs a model tells how that goes, in any namespace.

    Times are whole microseconds, costs are in the units of the model's handler: tokens, pixels, examples.
    """

    EXAMPLES: Final = "examples"  # of all versions of a model: Beam's num_inferences has a name for each
    BATCHES: Final = "batches"
    USEFUL_COST: Final = "useful_cost"  # summed over examples
    PADDED_COST: Final = "padded_cost"  # summed over batches: the longest example times the number of examples
    BUDGET_COST: Final = "budget_cost"  # what the padded cost could have been, summed over batches
    QUEUE_WAIT: Final = "queue_wait_micro_secs"  # summed over examples: from when it came to when its batch was cut
    PREPARE: Final = "prepare_micro_secs"  # this and what follows: summed over batches
    COLLATE: Final = "collate_micro_secs"
    TRANSFER: Final = "transfer_micro_secs"
    COMPUTE: Final = "compute_micro_secs"
    RETURN: Final = "return_micro_secs"
    DEVICE_BUSY: Final = "device_busy_micro_secs"  # batches that are computed at the same time count once
    OUT_OF_MEMORY: Final = "out_of_memory"  # times that a batch did not fit

    ALL: Final = frozenset(
        {
            EXAMPLES,
            BATCHES,
            USEFUL_COST,
            PADDED_COST,
            BUDGET_COST,
            QUEUE_WAIT,
            PREPARE,
            COLLATE,
            TRANSFER,
            COMPUTE,
            RETURN,
            DEVICE_BUSY,
            OUT_OF_MEMORY,
        }
    )


def usable_cores() -> int:
    """The cores this process may run on: the machine's, or fewer where its affinity or control group says so."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    try:
        with open("/sys/fs/cgroup/cpu.max") as file:
            quota, period = file.read().split()
    except OSError:
        return cores
    return max(1, min(cores, int(quota) // int(period))) if quota.isdigit() else cores


def machine_ram_bytes() -> int:
    """The memory this process can use: the machine's, or its control group's limit where that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for path in ("/sys/fs/cgroup/memory.max", "/sys/fs/cgroup/memory/memory.limit_in_bytes"):
        try:
            with open(path) as file:
                limit = file.read().strip()
        except OSError:
            continue
        if limit.isdigit():
            total = min(total, int(limit))
    return total
