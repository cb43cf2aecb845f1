"""Options of a pipeline that every process with a model must know, workers and the shared host of a machine."""

from __future__ import annotations

from dataclasses import dataclass

from apache_beam.options.pipeline_options import PipelineOptions

from luminosity._shared.shown_prompts import use_shown_prompts
from luminosity.inference.handlers.http.batches.journal import use_checkpoint
from luminosity.inference.handlers.http.limits import use_run_budget
from luminosity.inference.options import max_cost_of, shown_prompts_of

__all__ = ["RunSettings"]


@dataclass(frozen=True)
class RunSettings:
    """The checked values of options; None where nothing is given."""

    max_cost: float | None = None
    checkpoint_dir: str | None = None
    shown_prompts: int | None = None

    @classmethod
    def of(cls, options: PipelineOptions) -> RunSettings:
        """Return the values of ``--max_cost``, ``--checkpoint_dir`` and ``--show_prompts``."""
        checkpoint_dir = options.get_all_options().get("checkpoint_dir")
        return cls(max_cost_of(options), checkpoint_dir, shown_prompts_of(options))

    def use(self) -> None:
        """Set them for the models that this process loads from now on."""
        use_run_budget(self.max_cost)
        use_checkpoint(self.checkpoint_dir)
        use_shown_prompts(self.shown_prompts)
