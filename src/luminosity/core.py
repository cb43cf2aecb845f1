"""Types, names and measurements of the machine that all parts share."""

from __future__ import annotations

import json
import os
import resource
import sys
from collections.abc import Iterator, Mapping
from dataclasses import asdict, dataclass
from pathlib import PurePosixPath
from typing import Any, Final

__all__ = [
    "ACCELERATORS",
    "BUNDLES_PER_DEVICE",
    "ELEMENT_AT_FAULT",
    "LOADS_MODELS",
    "MODELS",
    "MODEL_VERSIONS",
    "OF_BLOCKS",
    "ONLY_UNPACKS",
    "OPENMP_VARIABLES",
    "READS",
    "SORTS_ITS_BUNDLE",
    "TELLS_LAG",
    "TEMPORARY_FOLDER",
    "THREAD_VARIABLES",
    "USER_DATA",
    "WRITES",
    "WRITES_A_FILE_PER_BUNDLE",
    "InferenceMetrics",
    "WorkerShare",
    "machine_ram_bytes",
    "process_began",
    "resident_bytes",
    "usable_cores",
]

_STATM = "/proc/self/statm"
_START_TIME = 19  # its place in /proc/PID/stat, counted from the field after the command's name
_OWN_GROUPS = "/proc/self/cgroup"
_CONTROL_GROUPS = "/sys/fs/cgroup"
_ENVIRONMENT_KEY = "LUMINOSITY_WORKER_SHARE"


@dataclass(frozen=True)
class WorkerShare:
    """The part of the machine that this process may use.

    The engine sets it for each of its workers. In any other process it is the whole machine.

    >>> share = WorkerShare("cpu", cores=1.0, ram_bytes=2**30, devices=(), workers=2)
    >>> WorkerShare.from_environment(share.to_environment()) == share
    True
    """

    pool: str
    cores: float
    ram_bytes: int
    devices: tuple[str, ...]
    workers: int  # that the pool may have at once, with those on cores that other pools lend it

    @classmethod
    def current(cls) -> WorkerShare:
        """Return this process's share."""
        return cls.from_environment(os.environ)

    @classmethod
    def from_environment(cls, environment: Mapping[str, str]) -> WorkerShare:
        """Return the share in ``environment``, or the whole machine if there is none."""
        encoded = environment.get(_ENVIRONMENT_KEY)
        if encoded is None:
            return cls("", float(usable_cores()), machine_ram_bytes(), (), 1)
        fields: dict[str, Any] = json.loads(encoded)
        fields["devices"] = tuple(fields["devices"])
        return cls(**fields)

    def to_environment(self) -> dict[str, str]:
        """Return the environment variables that tell a worker its share."""
        return {_ENVIRONMENT_KEY: json.dumps(asdict(self))}


OPENMP_VARIABLES = (
    "OMP_NUM_THREADS",  # the other libraries read it if their own variable is not set
    "BLIS_NUM_THREADS",
    "MKL_NUM_THREADS",
    "NUMEXPR_NUM_THREADS",
    "OPENBLAS_NUM_THREADS",
    "VECLIB_MAXIMUM_THREADS",
)
THREAD_VARIABLES = (
    *OPENMP_VARIABLES,
    "NPROC",  # the size of JAX's thread pools on the CPU; XLA_FLAGS do not change it
    "RAYON_NUM_THREADS",  # Hugging Face's tokenizers
)
"""Environment variables that tell numerical libraries how many threads to start."""

LOADS_MODELS = "luminosity:loads_models"
"""Annotation of steps whose DoFn has a method ``load_ahead``: a device's worker calls it as soon as it starts."""

ACCELERATORS = "luminosity:accelerators"
"""Annotation of steps that run models: the kinds of accelerators that the models use, such as "gpu" or "gpu,tpu".

"none" if they never use one, "unknown" if their handlers do not say. See ``luminosity/_shared/accelerators.py``."""

BUNDLES_PER_DEVICE = "luminosity:bundles_per_device"
"""Annotation of steps that run models: how many of their bundles a worker with a device runs at once."""

SORTS_ITS_BUNDLE = "luminosity:sorts_its_bundle"
"""Annotation of steps that work better on many elements at once: the engine gives them long bundles."""

MODEL_VERSIONS = "luminosity:model_versions"
"""Annotation of steps that run models of a registry: a JSON list with name, version, path and digest of each."""

TELLS_LAG = "luminosity:tells_lag"
"""Annotation of sources whose ``DoFn`` has the method ``lag_probe``, which returns what asks for ends of partitions."""

ONLY_UNPACKS = "luminosity_only_unpacks"
"""A true attribute of a ``DoFn`` of ours that can't fail: its outputs are taken one by one, so that it knows which."""

READS = "luminosity:reads"
"""Annotation of steps: a JSON list of what they read, each with its path, and kind and name if it is in a store."""

WRITES = "luminosity:writes"
"""Annotation of steps: what they write, like :data:`READS`."""

MODELS = "luminosity:models"
"""Annotation of steps that run models: a JSON list of the paths, addresses or names of their models."""

OF_BLOCKS = "blocks"
"""The value of :data:`SORTS_ITS_BUNDLE` if elements are blocks of rows, of which a few are a bundle already."""

WRITES_A_FILE_PER_BUNDLE = "luminosity:writes_a_file_per_bundle"
"""Annotation of steps that write a file for each bundle: the engine gives them few bundles."""

TEMPORARY_FOLDER = "luminosity:temporary_folder"
"""Annotation of steps: a folder that the engine removes if the run fails."""

ELEMENT_AT_FAULT = "luminosity_element"
"""Attribute of exceptions: a description of the element at fault, if the arguments of user code don't show it."""

USER_DATA = "luminosity_user_data"
"""A method of objects that carry elements between steps: returns the user's data in them, for error messages."""

REMEDY = "luminosity_fix"
"""An attribute of exceptions that user code raises: a ``Fix``, which the run's error passes on."""


class InferenceMetrics:
    """The names of the counters with which a step that runs a model reports its progress, in any namespace.

    Times are whole microseconds. Costs are in the units of the model's handler: tokens, pixels, examples.
    """

    EXAMPLES: Final = "examples"  # of all versions of a model; Beam's num_inferences counts each version apart
    BATCHES: Final = "batches"
    USEFUL_COST: Final = "useful_cost"  # summed over examples
    PADDED_COST: Final = "padded_cost"  # summed over batches: the longest example times the number of examples
    BUDGET_COST: Final = "budget_cost"  # the greatest padded cost allowed, summed over batches
    QUEUE_WAIT: Final = "queue_wait_micro_secs"  # summed over examples: from arrival to the start of its batch
    PREPARE: Final = "prepare_micro_secs"  # this and the following: summed over batches
    COLLATE: Final = "collate_micro_secs"
    TRANSFER: Final = "transfer_micro_secs"
    COMPUTE: Final = "compute_micro_secs"
    RETURN: Final = "return_micro_secs"
    DEVICE_BUSY: Final = "device_busy_micro_secs"  # batches that run at the same time count once
    OUT_OF_MEMORY: Final = "out_of_memory"  # how often a batch did not fit into memory
    PACKED: Final = "packed_rows"  # texts that were computed without padding around them, in one of these ways:
    BY_KERNELS: Final = "kernel_rows"  # by our own kernels
    BY_TORCH: Final = "varlen_rows"  # with torch's attention for rows of different lengths
    PADDED_INSIDE: Final = "attention_padded_rows"  # padded inside of attention only
    INT8: Final = "int8_rows"  # in 8 bits
    IN_SLOTS: Final = "slot_rows"  # prompts that were answered in slots, each of which goes on to the next by itself
    BY_TRANSFORMERS: Final = "transformers_rows"  # texts that were padded, and computed by transformers
    PROMPT_TOKENS: Final = "prompt_tokens"  # tokens of the prompts that a model has read
    NEW_TOKENS: Final = "new_tokens"  # tokens that a model has written
    CUT_TEXTS: Final = "cut_texts"  # texts that end because the model may not write more tokens
    REQUESTS: Final = "server_requests"  # that were sent to a model's server, also again
    RETRIES: Final = "server_retries"  # requests that were sent again
    HEDGES: Final = "server_hedges"  # requests that were sent a second time because their answer took long
    THROTTLED: Final = "server_throttled"  # responses that ask to send less: 429, or 503 with Retry-After
    RETRY_WAIT: Final = "server_wait_micro_secs"  # summed over retries: the wait before the request was sent again
    LIMIT_WAIT: Final = "limit_wait_micro_secs"  # summed over requests: the wait for limits that the user has set
    CACHED_TOKENS: Final = "cached_prompt_tokens"  # prompt tokens that a server had in its own cache
    COST: Final = "cost_nanos"  # of the tokens, by the prices that the user gave: billionths of their currency
    CACHED_ANSWERS: Final = "cached_answers"  # answers from the cache of an earlier prompt, without the model
    REPEATED_ROWS: Final = (
        "repeated_rows"  # rows of a table that got the prediction of an equal one; among the examples
    )
    REPEATED_PROMPTS: Final = "repeated_prompts"  # prompts that got the answer of an equal one in the same run
    LOADS: Final = "loads"  # how often a model was loaded
    LOAD: Final = "load_micro_secs"  # this and the following: summed over loads
    MODEL_BYTES: Final = "model_bytes"  # of one copy of the model
    # Sums over batches for the line that fits their times, without the first ones of each worker, which take longer.
    # Squares and products exceed what a counter holds, so that each has two: multiples of 2**32, and the rest.
    LINE_BATCHES: Final = "line_batches"
    LINE_COST: Final = "line_cost"  # padded cost
    LINE_SECONDS: Final = "line_micro_secs"  # of the device
    LINE_COST_SQUARED: Final = "line_cost_squared"
    LINE_PRODUCT: Final = "line_cost_micro_secs"
    HIGH: Final = "_high"  # how the names of counters of multiples end
    LATENCY: Final = (
        "batch_ms"  # how the names of counters of batches by their time begin, see luminosity._shared.kafka_metrics
    )
    FIRST_TOKEN: Final = "first_token_ms"  # likewise: answers by the time from the request to their first token

    ALL: Final = frozenset[str](
        value for name, value in vars().items() if name.isupper() and name not in ("HIGH", "LATENCY", "FIRST_TOKEN")
    ) | {LINE_COST_SQUARED + HIGH, LINE_PRODUCT + HIGH}


_WAYS = {
    InferenceMetrics.BY_KERNELS: "without padding (Luminosity's kernels)",
    InferenceMetrics.BY_TORCH: "without padding (torch's attention)",
    InferenceMetrics.PADDED_INSIDE: "padded in attention only",
    InferenceMetrics.BY_TRANSFORMERS: "padded (transformers)",
    InferenceMetrics.INT8: "in 8 bits, by ONNX Runtime",
    InferenceMetrics.IN_SLOTS: "in slots",
}


def computed_by(counters: Mapping[str, int]) -> str:
    """Return how a model of texts ran, by the counters of a step; empty for other models.

    >>> computed_by({"packed_rows": 8, "kernel_rows": 8})
    "without padding (Luminosity's kernels)"
    """
    return " and ".join(words for name, words in _WAYS.items() if counters.get(name))


def usable_cores() -> int:
    """Return the number of cores that this process may use: the machine's, or fewer by affinity or control group."""
    cores = len(os.sched_getaffinity(0)) if hasattr(os, "sched_getaffinity") else os.cpu_count() or 1
    for limit in _limits("cpu.max"):
        quota, period = limit.split()
        if quota.isdigit():
            cores = min(cores, int(quota) // int(period))
    return max(1, cores)


def machine_ram_bytes() -> int:
    """Return the memory that this process may use: the machine's, or its control group's limit if that is less."""
    total = os.sysconf("SC_PAGE_SIZE") * os.sysconf("SC_PHYS_PAGES")
    for name in ("memory.max", "memory.high", "memory/memory.limit_in_bytes"):
        total = min([total, *(int(limit) for limit in _limits(name) if limit.isdigit())])
    return total


def _limits(name: str) -> Iterator[str]:
    """Yield what a file says in each control group that this process is in: a service's own, and those around it.

    In a container, the path of the own group may be the one outside of it. Then only the root has files.
    """
    try:
        with open(_OWN_GROUPS) as file:
            paths = [line.rstrip("\n").split(":", 2)[2] for line in file if line.startswith("0::")]
    except OSError:
        paths = []
    own = PurePosixPath(paths[0] if paths else "/")
    for group in (own, *own.parents):
        try:
            with open(f"{_CONTROL_GROUPS}/{str(group).lstrip('/')}/{name}") as file:
                yield file.read().strip()
        except OSError:
            continue


def resident_bytes() -> int:
    """Return the resident memory of this process; on systems without ``/proc``, its peak."""
    try:
        with open(_STATM, "rb", buffering=0) as file:
            return int(file.read().split()[1]) * resource.getpagesize()
    except FileNotFoundError:
        peak = resource.getrusage(resource.RUSAGE_SELF).ru_maxrss
        return peak if sys.platform == "darwin" else peak * 1024


def process_began(pid: int) -> int | None:
    """Return when a process started, in clock ticks; None if it does not run, or if the system does not tell.

    The time tells a process from a later one that the kernel has given the same number. A process that has ended, but
    whose parent has not noticed that, does not run.
    """
    try:
        with open(f"/proc/{pid}/stat", "rb") as file:
            fields = file.read().rpartition(b")")[2].split()
    except OSError:
        return None
    return None if fields[0] in (b"Z", b"X") else int(fields[_START_TIME])
