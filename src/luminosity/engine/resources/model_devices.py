"""Devices for steps that run models: a model that can use an accelerator gets one without a resource hint.

Our own transforms annotate their steps with the accelerators that their models use. Beam's ``RunInference`` does not:
its DoFn is unpickled to look at the handler, but only if there is a device to give.

The request is soft. If the machine has no accelerator of a kind that the model uses, the pipeline stays as it is, and
the step is fused with its neighbours as if it had never asked. A resource hint always decides.
"""

from __future__ import annotations

import logging
from collections.abc import Iterable, Iterator
from typing import Any

from apache_beam.internal import pickler
from apache_beam.portability import common_urns, python_urns
from apache_beam.portability.api import beam_runner_api_pb2

from luminosity._shared.accelerators import accelerators_of, read_accelerators
from luminosity.core import ACCELERATORS, BUNDLES_PER_DEVICE
from luminosity.engine.options import EngineConfig
from luminosity.engine.resources.hints import asks_about_accelerators, with_accelerator
from luminosity.engine.resources.machine import DECLARED, Machine
from luminosity.engine.resources.pools import Assignment

__all__ = ["give_devices", "warn_of_unused"]

_LOGGER = logging.getLogger(__name__)
_PAR_DO_URN = common_urns.primitives.PAR_DO.urn
_BEAMS_ANNOTATION = "model_handler_type"  # of every RunInference of Beam's


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
