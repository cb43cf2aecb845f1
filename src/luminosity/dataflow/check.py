"""The checked description of a job: what Dataflow would get, and what is wrong with its options, hints and steps.

About hints: https://cloud.google.com/dataflow/docs/guides/right-fitting and
https://cloud.google.com/dataflow/docs/gpu/use-gpus.
"""

from __future__ import annotations

import os
import re
from collections.abc import Iterator, Sequence
from dataclasses import dataclass
from typing import Any

from apache_beam.options.pipeline_options import (
    DebugOptions,
    GoogleCloudOptions,
    PipelineOptions,
    SetupOptions,
    StandardOptions,
    WorkerOptions,
)
from apache_beam.options.pipeline_options_validator import PipelineOptionsValidator
from apache_beam.portability import common_urns

from luminosity._shared.environment_hint import PYTHON_ENVIRONMENT, PYTHON_ENVIRONMENT_URN
from luminosity._shared.flags import RUNNER_FLAGS
from luminosity._shared.text import did_you_mean
from luminosity.core import BUNDLES_PER_DEVICE
from luminosity.dataflow.job import DATAFLOW_RUNNER, CapturedPipeline, describe_job, job_name_of
from luminosity.dataflow.need_checks import check_needs
from luminosity.dataflow.steps import Finding, Step, error, read_steps, warning

__all__ = ["CheckedJob", "check_hints", "check_job"]

_HINTS: Any = common_urns.StandardResourceHints.Enum
_ACCELERATOR, _MIN_RAM = _HINTS.ACCELERATOR.urn, _HINTS.MIN_RAM_BYTES.urn
_DRIVER = "install-nvidia-driver"
_EXAMPLE = f"type:nvidia-l4;count:1;{_DRIVER}"
_WORKER_ACCELERATOR = "worker_accelerator="
_ONE_PROCESS = "no_use_multiple_sdk_containers"
# The machines that can have each type. Types that are not here may be new: they only get a warning.
_MACHINES = {
    "nvidia-l4": ("g2-",),
    "nvidia-tesla-t4": ("n1-",),
    "nvidia-tesla-p4": ("n1-",),
    "nvidia-tesla-p100": ("n1-",),
    "nvidia-tesla-v100": ("n1-",),
    "nvidia-tesla-a100": ("a2-",),
    "nvidia-a100-80gb": ("a2-",),
    "nvidia-h100-80gb": ("a3-",),
    "nvidia-h100-mega-80gb": ("a3-",),
}
_NO_DRIVER = ("tpu",)  # prefixes of types that need no driver of NVIDIA
# Hints that Dataflow does not list among those it reads.
_WITHOUT_EFFECT = {
    _HINTS.CPU_COUNT.urn: ("cpu_count", "choose --machine_type for the whole job"),
    _HINTS.MAX_ACTIVE_BUNDLES_PER_WORKER.urn: (
        "max_active_bundles_per_worker",
        "choose --number_of_worker_harness_threads for the whole job",
    ),
}


def check_hints(steps: Sequence[Step], options: PipelineOptions) -> Iterator[Finding]:
    """Yield what is wrong with the hints of steps and the accelerators of the job."""
    yield from _check_accelerators(steps, options)
    yield from _check_other_hints(steps)
    yield from _check_together(steps, options)
    yield from _check_models(steps, options)


def _worker_accelerators(options: PipelineOptions) -> list[str]:
    """Return the accelerators that options give to all workers.

    >>> _worker_accelerators(PipelineOptions(["--dataflow_service_options=worker_accelerator=type:nvidia-l4;count:1"]))
    ['type:nvidia-l4;count:1']
    """
    given = [
        *(options.view_as(GoogleCloudOptions).dataflow_service_options or []),
        *(options.view_as(DebugOptions).experiments or []),
    ]
    return [word.removeprefix(_WORKER_ACCELERATOR) for word in given if word.startswith(_WORKER_ACCELERATOR)]


def _check_accelerators(steps: Sequence[Step], options: PipelineOptions) -> Iterator[Finding]:
    machine = options.view_as(WorkerOptions).machine_type or ""
    by_value: dict[str, list[Step]] = {}
    for step in steps:
        if value := step.hints.get(_ACCELERATOR, b"").decode():
            by_value.setdefault(value, []).append(step)
    for value, some in by_value.items():
        yield from _check_accelerator(value, f"the hint accelerator={value!r}", machine, some)
    for value in _worker_accelerators(options):
        yield from _check_accelerator(value, f"{_WORKER_ACCELERATOR}{value}", machine, ())


def _check_accelerator(value: str, named: str, machine: str, steps: Sequence[Step]) -> Iterator[Finding]:
    """Check one accelerator: type, count, driver and machine."""
    words = [word.strip().partition(":") for word in value.split(";") if word.strip()]
    parts = {name: setting for name, _, setting in words}
    kind, count = parts.get("type", ""), parts.get("count", "")
    if count == "0":
        yield warning(
            f"{named} keeps a model on the CPU here; Dataflow reads it as a request for an accelerator",
            "leave out the hint for Dataflow",
            steps,
        )
        return
    if not kind or kind == "any":
        yield error(
            f"{named} has no type of accelerator, and Dataflow chooses none by itself",
            f"name one, such as accelerator={_EXAMPLE!r}",
            steps,
        )
    if not count.isdigit():
        yield error(f"{named} has no count, a whole number", f"write it as {_EXAMPLE!r}", steps)
    if kind and _DRIVER not in parts and not kind.startswith(_NO_DRIVER):
        yield error(
            f"{named} does not ask for NVIDIA's driver, so that programs on the worker find no accelerator",
            f"add ;{_DRIVER}",
            steps,
        )
    if kind and kind not in ("any", *_MACHINES) and not kind.startswith(_NO_DRIVER):
        yield warning(
            f"{named} has a type that is not among those known here",
            did_you_mean(kind, _MACHINES) or "compare it with Google's list of GPUs for Dataflow",
            steps,
        )
    of_hint = parts.get("machine_type", "") or machine
    families = _MACHINES.get(kind, ())
    if of_hint and families and not of_hint.startswith(families):
        yield error(
            f"{named} does not fit the machine type {of_hint}: {kind} is on machines whose names begin with "
            f"{' or '.join(families)}",
            f"choose --machine_type={families[0]}… or another type of accelerator",
            steps,
        )


def _check_other_hints(steps: Sequence[Step]) -> Iterator[Finding]:
    """Check hints that Dataflow does not read. Our own steps set a limit of bundles that nobody asked for."""
    for urn, (name, instead) in _WITHOUT_EFFECT.items():
        some = [step for step in steps if urn in step.hints and not _is_of_a_model(step, urn)]
        if some:
            values = sorted({step.hints[urn].decode() for step in some})
            yield warning(
                f"the hint {name}={', '.join(values)} has no effect on Dataflow, which reads min_ram and accelerator",
                instead,
                some,
            )
    some = [step for step in steps if PYTHON_ENVIRONMENT_URN in step.hints]
    for path in sorted({step.hints[PYTHON_ENVIRONMENT_URN].decode(errors="replace") for step in some}):
        yield error(
            f"the hint {PYTHON_ENVIRONMENT}={path} names a folder of this machine; on Dataflow, the step runs with the "
            "libraries of the container",
            "leave out the hint, and install one version that suits all steps into the image (lum image)",
            [step for step in some if step.hints[PYTHON_ENVIRONMENT_URN].decode(errors="replace") == path],
        )


def _is_of_a_model(step: Step, urn: str) -> bool:
    return urn == _HINTS.MAX_ACTIVE_BUNDLES_PER_WORKER.urn and BUNDLES_PER_DEVICE in step.annotations


def _check_together(steps: Sequence[Step], options: PipelineOptions) -> Iterator[Finding]:
    """Check hints against options that Dataflow does not allow beside them."""
    fitted = [step for step in steps if {_ACCELERATOR, _MIN_RAM} & set(step.hints)]
    if not fitted:
        return
    if _worker_accelerators(options):
        yield error(
            "found steps with the hints accelerator or min_ram, and the service option worker_accelerator; Dataflow "
            "wants one or the other",
            "leave out worker_accelerator, or the hints",
            fitted,
        )
    if options.view_as(GoogleCloudOptions).flexrs_goal:
        yield error(
            "found steps with resource hints in a job with --flexrs_goal; Dataflow does not support both",
            "leave out --flexrs_goal, or the hints",
            fitted,
        )
    is_streaming = options.view_as(StandardOptions).streaming
    if is_streaming and options.view_as(WorkerOptions).autoscaling_algorithm == "NONE":
        yield error(
            "found resource hints in a streaming job without autoscaling; Dataflow fits workers to steps of streams "
            "only if it may change their number",
            "leave out --autoscaling_algorithm=NONE, or the hints",
            fitted,
        )


def _check_models(steps: Sequence[Step], options: PipelineOptions) -> Iterator[Finding]:
    """Check steps with models: the engine gives them accelerators without a hint, Dataflow does not."""
    everywhere = bool(_worker_accelerators(options))
    models = [step for step in steps if BUNDLES_PER_DEVICE in step.annotations]
    could = [step for step in models if step.accelerators and _ACCELERATOR not in step.hints]
    if could and not everywhere:
        yield warning(
            "the models of these steps can use an accelerator; LuminosityRunner gives them one without a hint, on "
            "Dataflow they run on the CPU",
            f".with_resource_hints(accelerator={_EXAMPLE!r}) for the steps, or "
            f"'--dataflow_service_options={_WORKER_ACCELERATOR}{_EXAMPLE}' for all workers",
            could,
        )
    on_devices = models if everywhere else [step for step in models if _ACCELERATOR in step.hints]
    if on_devices and not options.view_as(DebugOptions).lookup_experiment(_ONE_PROCESS):
        yield warning(
            "Dataflow starts a Python process for each core of a worker, and each loads these models onto the "
            "accelerator, unless the model is shared",
            f"share the model (large_model=True), or add --experiments={_ONE_PROCESS} for one process on each worker",
            on_devices,
        )


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
