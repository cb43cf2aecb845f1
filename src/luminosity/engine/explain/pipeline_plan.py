"""The plan of a pipeline in Python: what ``lum plan`` shows for a script."""

from __future__ import annotations

import base64
import io
from dataclasses import dataclass
from typing import Any

from apache_beam import Pipeline
from apache_beam.options.pipeline_options import PipelineOptions
from rich.console import Console

from luminosity.engine.explain.drawing.svg import svg
from luminosity.engine.explain.drawing.text import print_plan
from luminosity.engine.explain.dryrun import DryRun, DryRunner
from luminosity.engine.explain.explain import explain
from luminosity.engine.explain.explanation import Explanation

__all__ = ["PipelinePlan", "plan_pipeline"]

_WIDTH = 120  # characters of a line of text


@dataclass(frozen=True, repr=False)
class PipelinePlan:
    """The plan of a pipeline: pools, stages, and the reason of every break. ``print`` it, or let a notebook draw it."""

    explanation: Explanation
    title: str = "plan"

    def svg(self) -> str:
        """Return the picture of the plan, as ``lum plan --svg`` draws it."""
        return svg({self.title: self.explanation})

    def __str__(self) -> str:
        printed = io.StringIO()
        console = Console(file=printed, width=_WIDTH, highlight=False, force_terminal=False, force_jupyter=False)
        print_plan(console, self.explanation, self.title)
        return "\n".join(line.rstrip() for line in printed.getvalue().splitlines())

    __repr__ = __str__

    def _repr_html_(self) -> str:
        # An image of its own: the style sheet of an SVG inside the page would apply to the whole notebook.
        data = base64.b64encode(self.svg().encode()).decode()
        return f'<img alt="{self.title}" style="max-width: 100%" src="data:image/svg+xml;base64,{data}">'


def plan_pipeline(pipeline: Pipeline, options: PipelineOptions | None = None) -> PipelinePlan:
    """Return how ``LuminosityRunner`` would run a pipeline on this machine, without running it.

    ``options`` are those of the pipeline by default. Raises the errors that a run would raise before it starts.

    >>> import apache_beam as beam
    >>> pipeline = beam.Pipeline()
    >>> _ = pipeline | beam.Create([1, 2, 3]) | beam.Map(print)
    >>> print(plan_pipeline(pipeline))
    plan: 2 stages...
    """
    runs: list[DryRun] = []
    runner: Any = pipeline.runner
    DryRunner(runs, runner).run_pipeline(pipeline, pipeline.options if options is None else options)
    (found,) = runs
    return PipelinePlan(explain(found.prepared, found.pipeline))
