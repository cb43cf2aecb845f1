"""The pipeline options of models: their cache, their memory budget, and the threads of numerical libraries."""

from __future__ import annotations

import math
import os
from dataclasses import dataclass
from typing import Any

import apache_beam as beam
from apache_beam.io.filesystems import FileSystems
from apache_beam.options.pipeline_options import DirectOptions, PipelineOptions

from luminosity._shared.text import parse_size
from luminosity.core import usable_cores
from luminosity.errors import OptionError
from luminosity.runner_options import ModelOptions

__all__ = [
    "ModelCacheConfig",
    "cache_folder",
    "max_cost_of",
    "memory_budget_of",
    "processes_of",
    "shown_prompts_of",
    "threads_of",
]

_DEFAULT_LIMIT = 50_000_000_000  # bytes; several large models
_MOST_SHOWN_PROMPTS = 1000  # nobody reads more
_LEAST_LIMIT = 1_000_000  # bytes; a smaller limit is most likely a missing unit
_RUNNERS_IN_ONE_PROCESS = {"FnApiRunner", "DirectRunner", "SwitchingDirectRunner", "BundleBasedDirectRunner"}
"""Unless their options start processes."""


@dataclass(frozen=True)
class ModelCacheConfig:
    """The folder for fetched models, and its limit in bytes; None stands for the default.

    The machine that fetches a model computes the defaults; it may not be the one that builds the pipeline.

    >>> ModelCacheConfig.of(PipelineOptions(["--model_cache_limit=20GB"]))
    ModelCacheConfig(folder=None, limit=20000000000)
    """

    folder: str | None = None
    limit: int | None = None

    @classmethod
    def of(cls, options: PipelineOptions) -> ModelCacheConfig:
        """Return the checked values of ``--model_cache`` and ``--model_cache_limit``."""
        ours = options.view_as(ModelOptions)
        return cls(folder=_folder(ours.model_cache), limit=_limit(ours.model_cache_limit))

    def local_folder(self) -> str:
        """Return the folder on this machine."""
        if self.folder is not None:
            return os.path.expanduser(self.folder)
        return cache_folder("models")

    def limit_in_bytes(self, free: int, held: int) -> int:
        """Return the limit for a cache that holds ``held`` bytes, on a disk with ``free`` bytes free.

        >>> ModelCacheConfig().limit_in_bytes(free=30_000_000_000, held=10_000_000_000)
        20000000000
        """
        return self.limit if self.limit is not None else min(_DEFAULT_LIMIT, (free + held) // 2)


def cache_folder(name: str) -> str:
    """Return this user's folder of the name for what can be fetched or made again."""
    root = os.environ.get("XDG_CACHE_HOME", "")
    # The XDG standard says that a relative path is ignored.
    root = root if os.path.isabs(root) else os.path.expanduser("~/.cache")
    return os.path.join(root, "luminosity", name)


def threads_of(options: PipelineOptions) -> int | None:
    """Return the checked value of ``--model_threads``, or None.

    >>> threads_of(PipelineOptions(["--model_threads=4"]))
    4
    """
    value = options.view_as(ModelOptions).model_threads
    if value is None:
        return None
    number = int(value) if str(value).isdecimal() else 0
    if number < 1:
        raise OptionError(f"--model_threads={value}: expected a whole number from 1")
    return number


def memory_budget_of(options: PipelineOptions) -> int | None:
    """Return the checked value of ``--model_memory_budget`` in bytes, or None.

    >>> memory_budget_of(PipelineOptions(["--model_memory_budget=8GB"]))
    8000000000
    """
    value = options.view_as(ModelOptions).model_memory_budget
    if value is None:
        return None
    size = parse_size(str(value))
    if not size:
        raise OptionError(f"--model_memory_budget={value}: expected a size, such as 500MB, 8GB or 16GiB")
    return size


def max_cost_of(options: PipelineOptions) -> float | None:
    """Return the checked value of ``--max_cost``, or None.

    >>> max_cost_of(PipelineOptions(["--max_cost=4.50"]))
    4.5
    """
    value = options.view_as(ModelOptions).max_cost
    if value is None:
        return None
    try:
        cost = float(value)
    except ValueError:
        cost = math.nan
    if not 0 < cost < math.inf:
        raise OptionError(f"--max_cost={value}: expected a number above 0, such as 4.50")
    return cost


def shown_prompts_of(options: PipelineOptions) -> int | None:
    """Return the checked value of ``--show_prompts``, or None.

    >>> shown_prompts_of(PipelineOptions(["--show_prompts=5"]))
    5
    """
    value = options.view_as(ModelOptions).show_prompts
    if value is None:
        return None
    number = int(value) if str(value).isdecimal() else 0
    if not 1 <= number <= _MOST_SHOWN_PROMPTS:
        raise OptionError(f"--show_prompts={value}: expected a whole number from 1 to {_MOST_SHOWN_PROMPTS:,}")
    return number


def processes_of(pipeline: beam.Pipeline) -> int | None:
    """Return how many worker processes of one machine run this pipeline, or None if only the workers know.

    >>> processes_of(beam.Pipeline("FnApiRunner"))
    1
    """
    if type(pipeline.runner).__name__ not in _RUNNERS_IN_ONE_PROCESS:
        return None
    direct = pipeline.options.view_as(DirectOptions)
    # 0 means one worker per core.
    return 1 if direct.direct_running_mode != "multi_processing" else direct.direct_num_workers or usable_cores()


def _folder(value: Any) -> str | None:
    if value is None:
        return None
    folder = str(value)
    if not folder or FileSystems.get_scheme(folder) is not None:
        raise OptionError(f"--model_cache={value}: expected a folder on the machine's own disk, such as /mnt/models")
    return folder if folder.startswith("~") else os.path.abspath(folder)


def _limit(value: Any) -> int | None:
    if value is None:
        return None
    size = parse_size(str(value))
    if size is None or size < _LEAST_LIMIT:
        raise OptionError(f"--model_cache_limit={value}: expected a size from 1MB up, such as 500MB, 20GB or 2GiB")
    return size
