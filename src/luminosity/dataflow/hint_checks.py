"""Checks of resource hints and accelerators: what Dataflow reads, and how it wants it written.

Sources: https://cloud.google.com/dataflow/docs/guides/right-fitting and
https://cloud.google.com/dataflow/docs/gpu/use-gpus.
"""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

from apache_beam.options.pipeline_options import (
    DebugOptions,
    GoogleCloudOptions,
    PipelineOptions,
    StandardOptions,
    WorkerOptions,
)
from apache_beam.portability import common_urns

from luminosity._shared.environment_hint import PYTHON_ENVIRONMENT, PYTHON_ENVIRONMENT_URN
from luminosity._shared.text import did_you_mean
from luminosity.core import BUNDLES_PER_DEVICE
from luminosity.dataflow.steps import Finding, Step, error, warning

__all__ = ["check_hints", "worker_accelerators"]

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


def worker_accelerators(options: PipelineOptions) -> list[str]:
    """Return the accelerators that options give to all workers.

    >>> worker_accelerators(PipelineOptions(["--dataflow_service_options=worker_accelerator=type:nvidia-l4;count:1"]))
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
    for value in worker_accelerators(options):
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
    if worker_accelerators(options):
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
    everywhere = bool(worker_accelerators(options))
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
