"""The resource hints that a run follows, which need not be those in the pipeline's code.

``--pools`` chooses them:

- ``hints``: the hints in the code.
- ``uniform``: every worker gets the most that any step asks for, so all steps share one pool. A runner that can't give
  each step its own kind of worker does this.
- ``fitted``: the hints of a file that ``lum advise --write`` or you wrote. Each replaces the same one in the code.

A model that can use an accelerator gets one without a hint. Our own transforms annotate their steps with the
accelerators that their models use. Beam's ``RunInference`` does not: its DoFn is unpickled to look at the handler, but
only if there is a device to give. The request is soft. If the machine has no accelerator of a kind that the model uses,
the pipeline stays as it is, and the step is fused with its neighbours as if it had never asked. A hint always decides.
"""

from __future__ import annotations

import json
import logging
from collections.abc import Iterable, Iterator, Mapping
from dataclasses import dataclass
from typing import Any, cast

from apache_beam.internal import pickler
from apache_beam.portability import common_urns, python_urns
from apache_beam.portability.api import beam_runner_api_pb2

from luminosity._shared.accelerators import accelerators_of, parse_accelerator, read_accelerators
from luminosity._shared.text import did_you_mean, parse_size
from luminosity.core import ACCELERATORS, BUNDLES_PER_DEVICE
from luminosity.engine.options import EngineConfig
from luminosity.engine.resources.hints import (
    REASON_URN,
    Needs,
    asks_about_accelerators,
    python_environment,
    with_accelerator,
)
from luminosity.engine.resources.machine import DECLARED, Machine
from luminosity.engine.resources.pools import Assignment
from luminosity.errors import OptionError

__all__ = ["StepHints", "give_devices", "load_hints", "warn_of_unused", "with_chosen_hints", "with_uniform_hints"]

_LOGGER = logging.getLogger(__name__)

_HINTS = common_urns.StandardResourceHints.Enum
_NAMES = ("min_ram", "cpu_count", "accelerator", "max_active_bundles_per_worker")
_EXAMPLE = '{"steps": {"Prepare": {"min_ram": "6GB", "cpu_count": 2}}}'

_PAR_DO_URN = common_urns.primitives.PAR_DO.urn
_BEAMS_ANNOTATION = "model_handler_type"  # of every RunInference of Beam's


@dataclass(frozen=True)
class StepHints:
    """The hints of one step, as their URNs and encoded values."""

    step: str
    hints: Mapping[str, bytes]


def with_chosen_hints(pipeline: beam_runner_api_pb2.Pipeline, config: EngineConfig) -> beam_runner_api_pb2.Pipeline:
    """Return the pipeline with the hints of ``--hints``, if it is given; ``pipeline`` stays unchanged.

    Raises :class:`OptionError` if the file is wrong, or names a step that the pipeline does not have.
    """
    if config.hints_file is None:
        return pipeline
    chosen = load_hints(config.hints_file)
    transforms = pipeline.components.transforms.values()
    # Also the parts before a slash: the label of a step may have one, and a hint holds for all that starts with it.
    names = {
        name[:end]
        for name in (transform.unique_name for transform in transforms)
        for end in (len(name), *(at for at, letter in enumerate(name) if letter == "/"))
        if end
    }
    for each in chosen:
        if each.step not in names:
            question = did_you_mean(each.step, names)
            raise OptionError(
                f"--hints={config.hints_file}: found the step {each.step!r}, expected steps of the pipeline"
                + (f"; {question}" if question else ""),
                fix="`lum plan` shows the names of its steps",
            )
    changed = beam_runner_api_pb2.Pipeline()
    changed.CopyFrom(pipeline)
    environments = changed.components.environments
    outer_first = sorted(chosen, key=lambda each: each.step.count("/"))
    for transform in changed.components.transforms.values():
        if transform.environment_id not in environments:
            continue  # the runner executes it itself, such as a GroupByKey
        name = transform.unique_name
        given: dict[str, bytes] = {}
        for each in outer_first:  # the hints of an inner step come later and win
            if name == each.step or name.startswith(f"{each.step}/"):
                given |= each.hints
        if given:
            transform.environment_id = _with_hints(changed, transform.environment_id, given)
    _drop_unused(changed)
    return changed


def with_uniform_hints(pipeline: beam_runner_api_pb2.Pipeline) -> beam_runner_api_pb2.Pipeline:
    """Return the pipeline with the same hints for all steps: the most that any of them asks for.

    Steps that run in another Python environment have their own workers in any case; they share among each other.
    """
    changed = beam_runner_api_pb2.Pipeline()
    changed.CopyFrom(pipeline)
    environments = changed.components.environments
    used = {transform.environment_id for transform in changed.components.transforms.values()}
    by_python: dict[str, list[str]] = {}
    for key in sorted(environments):
        by_python.setdefault(python_environment(environments[key]), []).append(key)
    shared: dict[str, str] = {}
    for keys in by_python.values():
        asking = [environments[key] for key in keys if key in used]
        if not asking:
            continue
        merged = _most(asking)
        environments[keys[0]].resource_hints.clear()
        for urn, value in merged.items():
            environments[keys[0]].resource_hints[urn] = value
        shared |= dict.fromkeys(keys, keys[0])
    for transform in changed.components.transforms.values():
        if transform.environment_id in shared:
            transform.environment_id = shared[transform.environment_id]
    for key in environments.keys() - set(shared.values()):
        del environments[key]
    return changed


def load_hints(path: str) -> list[StepHints]:
    """Read a file of hints. Raises :class:`OptionError` that says what is wrong with it."""
    try:
        with open(path, encoding="utf-8") as file:
            content: Any = json.load(file)
    except OSError as error:
        raise OptionError(
            f"--hints={path}: can't read it: {error.strerror}", fix="write one with `lum advise RUN --write FILE`"
        ) from error
    except (ValueError, RecursionError) as error:
        raise OptionError(f"--hints={path}: found no JSON ({error}), expected such as {_EXAMPLE}") from error
    steps = cast("dict[str, Any]", content).get("steps") if isinstance(content, dict) else None
    if not isinstance(steps, dict) or not all(
        isinstance(each, dict) for each in cast("dict[str, Any]", steps).values()
    ):
        raise OptionError(f"--hints={path}: found no hints under 'steps', expected such as {_EXAMPLE}")
    return [
        StepHints(step, dict(_encoded(path, step, name, value) for name, value in hints.items()))
        for step, hints in cast("dict[str, dict[str, Any]]", steps).items()
    ]


def _encoded(path: str, step: str, name: str, value: Any) -> tuple[str, bytes]:
    """Return the URN and the encoded value of a hint."""
    where = f"--hints={path}: step {step!r}: {name}"
    if name == "min_ram":
        size = parse_size(value) if isinstance(value, str) else None
        if not size:
            raise OptionError(f"{where}: found {value!r}, expected a size such as '6GB'")
        return _HINTS.MIN_RAM_BYTES.urn, str(size).encode()
    if name in ("cpu_count", "max_active_bundles_per_worker"):
        if isinstance(value, bool) or not isinstance(value, int) or value < 1:
            raise OptionError(f"{where}: found {value!r}, expected a whole number from 1")
        known = _HINTS.CPU_COUNT if name == "cpu_count" else _HINTS.MAX_ACTIVE_BUNDLES_PER_WORKER
        return known.urn, str(value).encode()
    if name == "accelerator":
        if not isinstance(value, str) or parse_accelerator(value) is None:
            raise OptionError(f"{where}: found {value!r}, expected such as 'type:nvidia-tesla-t4;count:1'")
        return _HINTS.ACCELERATOR.urn, value.encode()
    question = did_you_mean(name, _NAMES)
    expected = f"expected one of {', '.join(_NAMES)}"
    raise OptionError(f"{where}: no such hint, {expected}" + (f"; {question}" if question else ""))


def _with_hints(pipeline: beam_runner_api_pb2.Pipeline, environment_id: str, given: Mapping[str, bytes]) -> str:
    """Return the id of an environment like the given one but with these hints; add it if there is none."""
    environments = pipeline.components.environments
    told = ", ".join(f"{urn}={value.decode()}" for urn, value in sorted(given.items()))
    new_id = f"{environment_id} with {told}"
    if new_id not in environments:
        environments[new_id].CopyFrom(environments[environment_id])
        for urn, value in given.items():
            environments[new_id].resource_hints[urn] = value
    return new_id


def _drop_unused(pipeline: beam_runner_api_pb2.Pipeline) -> None:
    """Remove the environments of no step: the planner would give one to stages that only move data, in another pool."""
    transforms = pipeline.components.transforms.values()
    used = {transform.environment_id for transform in transforms if not transform.subtransforms}
    environments = pipeline.components.environments
    if not used & environments.keys():
        return
    for key in environments.keys() - used:
        del environments[key]
    for transform in transforms:
        if transform.environment_id not in environments:
            transform.environment_id = ""  # a composite: only its parts run


def _most(environments: list[beam_runner_api_pb2.Environment]) -> dict[str, bytes]:
    """Return the hints that satisfy all of the environments: the largest of each resource.

    The bundles of a worker are a limit, so the smallest one counts.
    """
    merged: dict[str, bytes] = {}
    for environment in environments:
        for urn, value in environment.resource_hints.items():
            merged.setdefault(urn, value)  # hints that only the user knows
    needs = [Needs.of(each) for each in environments]
    for urn, numbers in (
        (_HINTS.MIN_RAM_BYTES.urn, [each.min_ram_bytes for each in needs]),
        (_HINTS.CPU_COUNT.urn, [each.cpu_count for each in needs]),
    ):
        if any(numbers):
            merged[urn] = str(max(numbers)).encode()
    if limits := [each.max_active_bundles for each in needs if each.max_active_bundles]:
        merged[_HINTS.MAX_ACTIVE_BUNDLES_PER_WORKER.urn] = str(min(limits)).encode()
    if any(each.accelerator_count for each in needs):
        most = max(range(len(needs)), key=lambda i: (needs[i].accelerator_count, bool(needs[i].accelerator_type)))
        merged[_HINTS.ACCELERATOR.urn] = environments[most].resource_hints[_HINTS.ACCELERATOR.urn]
        merged.pop(REASON_URN, None)
        if reason := environments[most].resource_hints.get(REASON_URN):
            merged[REASON_URN] = reason
    return merged


def give_devices(
    pipeline: beam_runner_api_pb2.Pipeline, machine: Machine, config: EngineConfig
) -> beam_runner_api_pb2.Pipeline:
    """Return the pipeline with an accelerator for each step whose model uses one; ``pipeline`` stays unchanged.

    With ``worker_accelerator`` in the options, every model gets one, unless it is known to use none.
    """
    if not machine.devices and not config.worker_accelerator:
        return pipeline
    changed = beam_runner_api_pb2.Pipeline()
    changed.CopyFrom(pipeline)
    transforms, environments = changed.components.transforms, changed.components.environments
    inside_beams = set(_inside_run_inference(changed))
    for transform_id, transform in transforms.items():
        environment = environments.get(transform.environment_id)
        if transform.spec.urn != _PAR_DO_URN or environment is None or asks_about_accelerators(environment):
            continue
        if ACCELERATORS in transform.annotations:
            kinds = read_accelerators(transform.annotations[ACCELERATORS])
            bundles = int(transform.annotations.get(BUNDLES_PER_DEVICE, b"0"))
        elif transform_id in inside_beams and (handler := _beams_handler(transform)) is not None:
            kinds, bundles = accelerators_of(handler), 0
        else:
            continue
        hint, reason = _choose(kinds, machine, config)
        if not hint:
            continue
        new_id = f"{transform.environment_id} {hint} ({reason}) x{bundles}"
        if new_id not in environments:
            environments[new_id].CopyFrom(with_accelerator(environment, hint, reason, bundles))
        transform.environment_id = new_id
    return changed


def warn_of_unused(machine: Machine, assignments: Iterable[Assignment]) -> None:
    """Log one line if the machine has accelerators and no step runs on one."""
    if not machine.devices or any(assignment.pool.device_groups for assignment in assignments):
        return
    _LOGGER.warning(
        "no step uses %s accelerators (%s): a model does if its handler's device allows it, any other step "
        'with .with_resource_hints(accelerator="count:1"); --accelerators=0 hides this line',
        "the cluster's" if machine.nodes else "this machine's",
        len(machine.devices) if machine.nodes else ", ".join(machine.devices),
    )


def _choose(kinds: tuple[str, ...] | None, machine: Machine, config: EngineConfig) -> tuple[str, str]:
    """Return the hint for a model that uses these kinds of accelerators, and the reason; empty if it gets none."""
    if kinds == ():
        return "", ""
    if config.worker_accelerator:
        return config.worker_accelerator, "the option worker_accelerator gives it to models"
    if kinds and (DECLARED in machine.kinds or machine.kinds & set(kinds)):
        return "count:1", f"its model can use a {' or '.join(kind.upper() for kind in kinds)}"
    return "", ""


def _inside_run_inference(pipeline: beam_runner_api_pb2.Pipeline) -> Iterator[str]:
    """Yield the ids of all transforms inside Beam's ``RunInference``."""
    transforms = pipeline.components.transforms
    waiting = [id for t in transforms.values() if _BEAMS_ANNOTATION in t.annotations for id in t.subtransforms]
    while waiting:
        transform_id = waiting.pop()
        yield transform_id
        waiting += transforms[transform_id].subtransforms


def _beams_handler(transform: beam_runner_api_pb2.PTransform) -> Any:
    """Return the handler of the ParDo in which Beam's ``RunInference`` runs its model; None for any other ParDo."""
    from apache_beam.ml.inference import base  # imported already: the pipeline has a RunInference

    do_fn = beam_runner_api_pb2.ParDoPayload.FromString(transform.spec.payload).do_fn
    if do_fn.urn != python_urns.PICKLED_DOFN_INFO:
        return None
    try:
        found: Any = pickler.loads(do_fn.payload)[0]
    except Exception as error:  # The worker unpickles it, too, and reports the error with the step.
        _LOGGER.debug("can't look at the model of %s: %r", transform.unique_name, error)
        return None
    while found is not None and not isinstance(found, base._RunInferenceDoFn):  # pyright: ignore[reportPrivateUsage]
        found = vars(found).get("_fn")  # with_exception_handling wraps it
    return None if found is None else vars(found)["_model_handler"]
