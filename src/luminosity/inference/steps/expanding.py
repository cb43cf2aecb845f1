"""Computes settings and hints of the steps that run models, when the pipeline is built."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any, TypeVar

import apache_beam as beam

from luminosity._shared.accelerators import accelerators_of, write_accelerators
from luminosity._shared.environment_hint import PYTHON_ENVIRONMENT
from luminosity.core import ACCELERATORS, BUNDLES_PER_DEVICE
from luminosity.errors import InvalidArgument
from luminosity.inference.handler import Handler
from luminosity.inference.options import ModelCacheConfig, memory_budget_of, processes_of, threads_of
from luminosity.inference.steps.settings import StepSettings

__all__ = ["ModelNeeds", "by_needs", "in_pipeline", "split_environment"]

NameT = TypeVar("NameT", bound=Hashable)

_BUNDLES_PER_DEVICE = 8  # enough examples at once to fill batches

_run_ids: weakref.WeakKeyDictionary[beam.Pipeline, str] = weakref.WeakKeyDictionary()


def in_pipeline(settings: StepSettings, pipeline: beam.Pipeline) -> StepSettings:
    """Return the settings completed with the options and the runner of the pipeline."""
    options = pipeline.options
    return replace(
        settings,
        model_cache=ModelCacheConfig.of(options),
        threads=threads_of(options),
        memory_budget=memory_budget_of(options),
        workers=processes_of(pipeline),
        # All transforms of a pipeline share it: their models share the memory of one machine.
        run_id=_run_ids.setdefault(pipeline, uuid.uuid4().hex),
    )


def split_environment(hints: Mapping[str, Any]) -> tuple[dict[str, Any], dict[str, Any]]:
    """Return the hint for all steps of a transform, if it is there, and the hints for the step that runs the model.

    Examples are prepared by the model's own libraries, so all steps need its Python environment.

    >>> split_environment({"python_environment": "/envs/old", "min_ram": "4GB"})
    ({'python_environment': '/envs/old'}, {'min_ram': '4GB'})
    """
    of_all = {name: value for name, value in hints.items() if name == PYTHON_ENVIRONMENT}
    return of_all, {name: value for name, value in hints.items() if name != PYTHON_ENVIRONMENT}


@dataclass(frozen=True)
class ModelNeeds:
    """The resources of a step that runs models: resource hints, and the accelerators that the models use."""

    hints: Mapping[str, Any] = field(default_factory=dict[str, Any])
    accelerators: tuple[str, ...] | None = None  # as Handler.accelerators

    @classmethod
    def of(cls, handler: Handler[Any, Any, Any], overriding: Mapping[str, Any]) -> ModelNeeds:
        """Return what a handler needs; ``overriding`` are the hints of the transform."""
        of_handler = handler.get_resource_hints()
        if PYTHON_ENVIRONMENT in of_handler:
            raise InvalidArgument(
                f"found {PYTHON_ENVIRONMENT} among the resource hints of {handler}, expected it on the transform, "
                "since all its steps run there",
                fix=f"transform.with_resource_hints({PYTHON_ENVIRONMENT}={of_handler[PYTHON_ENVIRONMENT]!r})",
            )
        hints = {**of_handler, **overriding}
        # A hint decides alone, so the handlers need not be told apart.
        return cls(hints, None if "accelerator" in hints else accelerators_of(handler))

    def can_share(self, other: ModelNeeds) -> bool:
        """Return whether models with these needs can run in one step."""
        if not self.accelerators or not other.accelerators:
            return self == other
        return self.hints == other.hints

    def annotations(self) -> dict[str, str]:
        """Return the annotations of the step, which tell the engine if it can use an accelerator."""
        found = write_accelerators(self.accelerators)
        return {ACCELERATORS: found, BUNDLES_PER_DEVICE: str(_BUNDLES_PER_DEVICE)}

    def shared_hints(self) -> dict[str, Any]:
        """Return the hints with a limit of active bundles: bundles share the model, and batches combine them."""
        limit = {"max_active_bundles_per_worker": str(_BUNDLES_PER_DEVICE)}
        return {**limit, **self.hints} if self.hints else {}


def by_needs(needs: Mapping[NameT, ModelNeeds]) -> Iterator[tuple[ModelNeeds, Sequence[NameT]]]:
    """Yield groups of names that can share a step: with the same hints, on a device or not.

    Models that use different kinds of accelerators stay together, so that the host can choose among their work.

    >>> large = ModelNeeds({"min_ram": "4GB"})
    >>> [names for _, names in by_needs({"a": ModelNeeds(), "b": large, "c": ModelNeeds()})]
    [['a', 'c'], ['b']]
    >>> list(by_needs({"a": ModelNeeds({}, ("gpu",)), "b": ModelNeeds({}, ("tpu",)), "c": ModelNeeds({}, ())}))
    [(ModelNeeds(hints={}, accelerators=('gpu', 'tpu')), ['a', 'b']), (ModelNeeds(hints={}, accelerators=()), ['c'])]
    """
    left = dict(needs)
    while left:
        first = next(iter(left.values()))
        same = {name: each for name, each in left.items() if each.can_share(first)}
        for name in same:
            del left[name]
        kinds = sorted({kind for each in same.values() for kind in each.accelerators or ()})
        yield replace(first, accelerators=tuple(kinds) or first.accelerators), list(same)
