"""The checked description of a job: what Dataflow would get, and what is wrong with it."""

from __future__ import annotations

import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

from apache_beam.options.pipeline_options import StandardOptions

from luminosity.dataflow.capture import CapturedPipeline
from luminosity.dataflow.findings import Finding
from luminosity.dataflow.hint_checks import check_hints
from luminosity.dataflow.job import describe_job, job_name_of
from luminosity.dataflow.need_checks import check_needs
from luminosity.dataflow.option_checks import check_options, is_describable
from luminosity.dataflow.steps import Step, read_steps

__all__ = ["CheckedJob", "check_job"]


@dataclass(frozen=True)
class CheckedJob:
    """A job of Dataflow that was described and checked, but not sent."""

    name: str
    is_streaming: bool
    steps: list[Step]
    findings: list[Finding]  # errors first
    pipeline: bytes  # the pipeline as Beam uploads it
    job: dict[str, Any] | None  # the body of the request that creates the job; None if options for it are missing

    @property
    def has_errors(self) -> bool:
        """Whether Dataflow would refuse the job, or the job would fail."""
        return any(finding.is_error for finding in self.findings)


def check_job(captured: CapturedPipeline, script: str, words: Sequence[str] = ()) -> CheckedJob:
    """Describe and check a pipeline; ``words`` is the command line of the script."""
    name = job_name_of(captured.options, os.path.basename(script))
    steps = read_steps(captured.proto)
    findings = [
        *check_options(captured, name, words),
        *check_hints(steps, captured.options),
        *check_needs(steps, captured.places, captured.options),
    ]
    serialized = captured.proto.SerializeToString(deterministic=True)
    job = None
    if is_describable(captured.options):
        job = describe_job(captured.proto, serialized, captured.options, name)
    is_streaming = bool(captured.options.view_as(StandardOptions).streaming)
    return CheckedJob(name, is_streaming, steps, sorted(findings, key=lambda each: not each.is_error), serialized, job)
