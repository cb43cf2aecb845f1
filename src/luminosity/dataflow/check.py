"""The checked description of a job: what Dataflow would get, and what is wrong with it, its options first."""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from apache_beam.options.pipeline_options import (
    GoogleCloudOptions,
    PipelineOptions,
    SetupOptions,
    StandardOptions,
)
from apache_beam.options.pipeline_options_validator import PipelineOptionsValidator

from luminosity._shared.flags import RUNNER_FLAGS
from luminosity.dataflow.capture import DATAFLOW_RUNNER, CapturedPipeline
from luminosity.dataflow.hint_checks import check_hints
from luminosity.dataflow.job import describe_job, job_name_of
from luminosity.dataflow.need_checks import check_needs
from luminosity.dataflow.steps import Finding, Step, error, read_steps, warning

__all__ = ["CheckedJob", "check_job"]

_BUCKET_FOLDER = re.compile(r"gs://[a-z0-9][-_a-z0-9.]+[a-z0-9]/.*", re.DOTALL)
_UPLOADED = ("requirements_file", "setup_file", "extra_packages", "files_to_stage")


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
        *_check_options(captured, name, words),
        *check_hints(steps, captured.options),
        *check_needs(steps, captured.places, captured.options),
    ]
    serialized = captured.proto.SerializeToString(deterministic=True)
    job = None
    if _is_describable(captured.options):
        job = describe_job(captured.proto, serialized, captured.options, name)
    is_streaming = bool(captured.options.view_as(StandardOptions).streaming)
    return CheckedJob(name, is_streaming, steps, sorted(findings, key=lambda each: not each.is_error), serialized, job)


def _check_options(captured: CapturedPipeline, name: str, words: Sequence[str]) -> Iterator[Finding]:
    """Yield what is wrong with the options of a pipeline; ``words`` is the command line, ``name`` the job's name."""
    yield from _check_that_they_arrive(captured, words)
    yield from _check_required(captured.options, name)
    yield from _check_without_effect(words)
    yield from _check_uploads(captured.options)
    if captured.became_streaming:
        yield warning(
            "the pipeline has a source that never ends, so Beam makes it a streaming job, without --streaming",
            "add --streaming, or give the source an end",
        )
    if captured.options.view_as(GoogleCloudOptions).update:
        yield warning(
            "--update replaces a running job; Beam asks Dataflow for its id when it sends the job, so the description "
            "does not have it",
            "run the script itself with --update",
        )


def _is_describable(options: PipelineOptions) -> bool:
    """Return whether the options have what the description of a job can't do without."""
    cloud = options.view_as(GoogleCloudOptions)
    return bool(cloud.project and cloud.temp_location)


def _check_that_they_arrive(captured: CapturedPipeline, words: Sequence[str]) -> Iterator[Finding]:
    """Check that the script passes its command line to the pipeline, and leaves the runner to it."""
    cloud = captured.options.view_as(GoogleCloudOptions)
    given = {word.split("=", 1)[0] for word in words}
    lost = [f"--{name}" for name in ("project", "region", "temp_location") if f"--{name}" in given]
    lost = [flag for flag in lost if not getattr(cloud, flag[2:])]
    if lost:
        yield error(
            f"{', '.join(lost)} did not reach the pipeline: the script does not pass its command line on",
            "write beam.Pipeline(options=PipelineOptions())",
        )
    runner = captured.meant_for.rpartition(".")[2]
    if runner != DATAFLOW_RUNNER:
        yield warning(
            f"the script names the runner {runner} itself, so it never sends its pipeline to Dataflow",
            f"leave out runner=…, so that --runner={DATAFLOW_RUNNER} decides",
        )


def _check_required(options: PipelineOptions, name: str) -> Iterator[Finding]:
    cloud = options.view_as(GoogleCloudOptions)
    if not cloud.project:
        yield error("found no --project", "add --project=ID, the id of your project in Google Cloud")
    elif not re.fullmatch(PipelineOptionsValidator.PROJECT_ID_PATTERN, cloud.project):
        yield error(f"--project={cloud.project} is not an id of a project", "use the id, not the number or the title")
    if not cloud.region:
        yield error("found no --region", "add --region=REGION, such as --region=europe-west4")
    for option in ("temp_location", "staging_location"):
        value: str | None = getattr(cloud, option)
        if value is None and option == "temp_location":
            yield error("found no --temp_location", "add --temp_location=gs://BUCKET/FOLDER")
        elif value is not None and not _BUCKET_FOLDER.fullmatch(value):
            yield error(f"--{option}={value} is not a folder in a bucket", f"write --{option}=gs://BUCKET/FOLDER")
    if not re.fullmatch(PipelineOptionsValidator.JOB_PATTERN, name):
        yield error(
            f"--job_name={name} is not a name of a job", "use small letters, digits and dashes; begin with a letter"
        )
    if cloud.flexrs_goal and options.view_as(StandardOptions).streaming:
        yield error("found --flexrs_goal in a streaming job; Dataflow has it for batch jobs", "leave it out")


def _check_without_effect(words: Sequence[str]) -> Iterator[Finding]:
    """Check options of our own runner. Options of models work on every runner."""
    ours = {f"--{flag.name}" for flag in RUNNER_FLAGS if not flag.is_beams}
    found = sorted({word.split("=", 1)[0] for word in words} & ours)
    if found:
        verb = "are options" if len(found) > 1 else "is an option"
        yield warning(f"{', '.join(found)} {verb} of LuminosityRunner, without an effect on Dataflow", "leave it out")


def _check_uploads(options: PipelineOptions) -> Iterator[Finding]:
    """Check options with which Beam uploads packages: the description, made without a network, has none of them."""
    setup = options.view_as(SetupOptions)
    found = [f"--{name}" for name in _UPLOADED if getattr(setup, name)]
    if setup.save_main_session and setup.pickle_library != "cloudpickle":
        found.append("--save_main_session")
    if found:
        yield warning(
            f"{', '.join(found)}: Beam uploads packages when it sends the job, and each worker installs them when it "
            "starts; the description here does not have them",
            "put them into the image: lum image --requirements FILE --wheel FILE",
        )
