"""Where the time of workers goes, step by step: Beam takes samples of what the worker's thread does."""

from __future__ import annotations

from dataclasses import dataclass

from luminosity.events import RunStarted, Snapshot
from luminosity.runs.views.words import duration, percent

__all__ = ["StepTime", "slowest", "step_times"]

_LEAST_S = 0.1  # of all steps together; in less time, samples say nothing
_LEAST_SHARE = 0.2  # of the time of all steps: a step with less is not to blame


@dataclass(frozen=True)
class StepTime:
    """The time that workers spent in one step of a run."""

    step: str  # its whole name
    stage: str  # the label of the stage in which it runs
    seconds: float
    elements: int  # that it has put out; 0 if that is not known
    share: float  # of the time of all steps


def step_times(run: RunStarted, last: Snapshot | None) -> list[StepTime]:
    """Return the steps that took time, the slowest first. Empty for records of older versions.

    >>> from luminosity.events import StageInfo, StageView
    >>> stage = StageInfo("s1", "Read + Embed", "cpu", steps=("Read", "Embed"))
    >>> run = RunStarted("r", 0.0, "p.py", 0.0, (stage,), (), 0)
    >>> view = StageView("s1", "busy", step_seconds=(1.0, 3.0), step_elements=(50, 40))
    >>> for each in step_times(run, Snapshot("r", 5.0, (view,), ())):
    ...     print(each.step, each.seconds, each.elements, each.share)
    Embed 3.0 40 0.75
    Read 1.0 50 0.25
    """
    views = {view.id: view for view in last.stages} if last is not None else {}
    found = [
        (step, stage.label, seconds, view.step_elements[place] if place < len(view.step_elements) else 0)
        for stage in run.stages
        if (view := views.get(stage.id)) is not None
        for place, (step, seconds) in enumerate(zip(stage.steps, view.step_seconds, strict=False))
        if seconds
    ]
    total = sum(seconds for _, _, seconds, _ in found)
    times = [StepTime(step, stage, seconds, count, seconds / total) for step, stage, seconds, count in found]
    return sorted(times, key=lambda each: -each.seconds)


def slowest(run: RunStarted, last: Snapshot | None) -> str:
    """Return a sentence about the step that takes most of the time, or an empty text if none stands out.

    >>> from luminosity.events import StageInfo, StageView
    >>> stage = StageInfo("s1", "Read + Embed", "cpu", steps=("Read", "Embed"))
    >>> run = RunStarted("r", 0.0, "p.py", 0.0, (stage,), (), 0)
    >>> slowest(run, Snapshot("r", 5.0, (StageView("s1", "busy", step_seconds=(1.0, 3.0)),), ()))
    "Step 'Embed' takes 75% of the time of all steps: 3.0 s, in stage 'Read + Embed'."
    """
    times = step_times(run, last)
    if not times or sum(each.seconds for each in times) < _LEAST_S or times[0].share < _LEAST_SHARE:
        return ""
    first = times[0]
    took = f"{percent(first.share)} of the time of all steps: {duration(first.seconds)}"
    return f"Step {first.step!r} takes {took}, in stage {first.stage!r}."
