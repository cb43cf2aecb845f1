"""What the steps of one RunInference share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from luminosity.inference.files.local import use_cache
from luminosity.inference.host.model import Clock
from luminosity.inference.options import ModelCacheConfig
from luminosity.inference.steps.watch import Watch
from luminosity.inference.threads import limit_threads

__all__ = ["StepSettings"]


@dataclass(frozen=True)
class StepSettings:
    step_id: str
    """Its own for every transform, so that no two of them share batches."""
    model_tag: str
    metrics_namespace: str
    inference_args: dict[str, Any] | None = None
    clock: Clock = time
    load_late: bool = False
    """Load the model with the first batch, not before: its path comes with the data, or a timeout covers the load."""
    caught: tuple[type[BaseException], ...] = ()
    """Failures that go to the dead letters; empty: none do."""
    timeout: float | None = None
    use_subprocess: bool = False

    updates_may_lag: bool = False
    """Whether a new version may go on loading while the old one answers: not where each window names its own."""
    watch: Watch | None = None
    model_cache: ModelCacheConfig = field(default_factory=ModelCacheConfig)
    threads: int | None = None
    memory_budget: int | None = None
    """What `--model_memory_budget` says."""
    workers: int | None = None
    """How many processes of a machine run this step, where that is known when the pipeline is built."""
    run_id: str = ""
    """By which processes of one machine find the host that they share."""

    def set_up_process(self) -> None:
        """What holds for the whole process, before anything heavy is computed."""
        limit_threads(self.threads)
        use_cache(self.model_cache)
