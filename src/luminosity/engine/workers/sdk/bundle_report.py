"""What a bundle does now: its step, its element and its stack, as the worker tells the runner when a bundle takes long.

Nothing is measured for it. Beam's state sampler counts how often a bundle goes from step to step, which it does with
each element, and knows for how long it has not.
"""

from __future__ import annotations

import json
import time
from dataclasses import asdict, dataclass, field
from typing import TYPE_CHECKING, Literal

from luminosity._shared.hangs import Wait, frames_of, stack_text, wait_of
from luminosity.engine.workers.failure import element_of, from_users_code_on, location_of

if TYPE_CHECKING:
    from apache_beam.runners.worker.sdk_worker import BundleProcessorCache

__all__ = ["BundleReport", "Phase", "report_of"]

Phase = Literal["ended", "setup", "start", "process", "finish"]

_PHASES: dict[str, Phase] = {"start": "start", "finish": "finish"}
_NANOSECONDS = 1e9
_QUICK_S = 0.2  # a bundle that has moved since then needs no stack, which takes a millisecond


@dataclass(frozen=True)
class BundleReport:
    """What a bundle does at one moment. ``ended``: it has ended, or has not begun."""

    phase: Phase
    step: str = ""
    moves: int = 0  # from step to step, so far
    seconds: float = 0.0  # since the last move, or since the setup began
    indexes: dict[str, int] = field(default_factory=dict[str, int])  # by read id: the place of the element in progress
    element: str = ""  # what the step has got, shortened
    location: str = ""  # file and line of the user's code
    stack: str = ""
    wait: Wait | None = None  # what the bundle's thread waits for

    def to_json(self) -> str:
        """Return the report as JSON."""
        return json.dumps(asdict(self))

    @classmethod
    def from_json(cls, data: str | bytes) -> BundleReport:
        """Read what :meth:`to_json` returned."""
        fields = json.loads(data)
        wait = fields.pop("wait")
        return cls(**fields, wait=Wait(**wait) if wait else None)


def report_of(processors: BundleProcessorCache, instruction_id: str) -> BundleReport:
    """Return what a bundle of this process does. Call it on any thread but the bundle's."""
    setting_up = processors.processors_being_created.get(instruction_id)
    if setting_up is not None:
        _, thread, since = setting_up
        return _told("setup", "", 0, time.time() - since, {}, thread.ident or 0)
    active = processors.active_bundle_processors.get(instruction_id)
    if active is None:
        return BundleReport("ended")
    processor = active[1]
    info = processor.state_sampler.get_info()
    name = info.state_name
    indexes = {
        transform_id: operation.index
        for transform_id, operation in processor.ops.items()
        if isinstance(getattr(operation, "index", None), int)
    }
    return _told(
        _PHASES.get(name.name.partition("-")[0], "process"),
        name.step_name or "",
        info.transition_count,
        info.time_since_transition / _NANOSECONDS,
        indexes,
        info.tracked_thread.ident or 0 if info.tracked_thread is not None else 0,
    )


def _told(phase: Phase, step: str, moves: int, seconds: float, indexes: dict[str, int], thread: int) -> BundleReport:
    if seconds < _QUICK_S:
        return BundleReport(phase, step, moves, seconds, indexes)
    frames, wait = frames_of(thread), wait_of(thread)
    location = location_of(frames)
    # A bundle that waits for a model is in our own code: the model's stack says more.
    shown = [] if wait is not None and wait.stack and not location else from_users_code_on(frames)
    return BundleReport(
        phase,
        step,
        moves,
        seconds,
        indexes,
        element=element_of(frames) if phase == "process" else "",
        location=location or (wait.location if wait is not None else ""),
        stack=stack_text(shown),
        wait=wait,
    )
