"""What a check of a job finds: an error, with which the job would fail, or a warning."""

from __future__ import annotations

from collections.abc import Iterable
from dataclasses import dataclass

from luminosity.dataflow.steps import Step

__all__ = ["Finding", "error", "warning"]


@dataclass(frozen=True)
class Finding:
    """One thing that is wrong, or that has no effect, in words."""

    is_error: bool
    message: str  # what was found, and what it means on Dataflow
    fix: str
    steps: tuple[str, ...] = ()  # the full names of the steps it is about; empty for the whole job


def error(message: str, fix: str, steps: Iterable[Step | str] = ()) -> Finding:
    """Return a finding with which Dataflow refuses the job, or the job fails; ``steps`` or their names."""
    return Finding(True, message, fix, _names(steps))


def warning(message: str, fix: str, steps: Iterable[Step | str] = ()) -> Finding:
    """Return a finding about something that has no effect, or probably not the one that is wanted."""
    return Finding(False, message, fix, _names(steps))


def _names(steps: Iterable[Step | str]) -> tuple[str, ...]:
    return tuple(step if isinstance(step, str) else step.name for step in steps)
