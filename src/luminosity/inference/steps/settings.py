"""What the steps of one RunInference share."""

from __future__ import annotations

import time
from dataclasses import dataclass, field
from typing import Any

from luminosity.inference.files.local import use_cache
from luminosity.inference.host.models import Clock
from luminosity.inference.options import ModelCacheConfig
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

    model_cache: ModelCacheConfig = field(default_factory=ModelCacheConfig)
    threads: int | None = None

    def set_up_process(self) -> None:
        """What holds for the whole process, before anything heavy is computed."""
        limit_threads(self.threads)
        use_cache(self.model_cache)
