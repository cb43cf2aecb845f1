"""The settings that the steps of one transform share."""

from __future__ import annotations

import time
from collections.abc import Hashable, Mapping
from dataclasses import dataclass, field
from typing import Any

from luminosity.inference.files.local import use_cache
from luminosity.inference.host.interface import Clock
from luminosity.inference.options import ModelCacheConfig
from luminosity.inference.registry.resolved import ResolvedModel
from luminosity.inference.steps.versions import RegistryWatch, Watch
from luminosity.inference.threads import limit_threads

__all__ = ["StepSettings"]


@dataclass(frozen=True)
class StepSettings:
    """How the steps of one transform run its models; pickled with them."""

    step_id: str
    """Unique for each transform, so that no two share batches."""
    model_tag: str
    """Transforms with the same tag share models."""
    metrics_namespace: str
    inference_args: dict[str, Any] | None = None
    clock: Clock = time
    load_late: bool = False
    """Load the model with the first batch, because its path comes with the data, or a timeout covers the load."""
    caught: tuple[type[BaseException], ...] = ()
    """Errors that become dead letters."""
    timeout: float | None = None
    use_subprocess: bool = False

    updates_may_lag: bool = False
    """Whether the old version is used while a new one is loading; False if each window names its version."""
    watch: Watch | RegistryWatch | None = None
    registered: Mapping[Hashable, ResolvedModel] = field(default_factory=dict[Hashable, ResolvedModel])
    """The versions that models of a registry start with, by the name of the model in its ``ModelSet``."""
    is_stream: bool = False
    """Whether the input may never end, so that examples must not wait for others."""
    model_cache: ModelCacheConfig = field(default_factory=ModelCacheConfig)
    threads: int | None = None
    memory_budget: int | None = None
    """The value of ``--model_memory_budget``, in bytes."""
    workers: int | None = None
    """How many processes of a machine run this step, if that is known when the pipeline is built."""
    run_id: str = ""
    """Names the run; processes of one machine find their shared host by it."""

    def set_up_process(self) -> None:
        """Limit the threads of this process and choose its model cache; call it before anything is computed."""
        limit_threads(self.threads)
        use_cache(self.model_cache)
