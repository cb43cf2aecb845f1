"""Computes settings and hints of the steps that run models, when the pipeline is built."""

from __future__ import annotations

import uuid
import weakref
from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import replace
from typing import Any, TypeVar

import apache_beam as beam

from luminosity.inference.options import ModelCacheConfig, memory_budget_of, processes_of, threads_of
from luminosity.inference.steps.settings import StepSettings

__all__ = ["by_hints", "in_pipeline", "with_shared_bundles"]

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


def by_hints(hints: Mapping[NameT, dict[str, Any]]) -> Iterator[tuple[dict[str, Any], Sequence[NameT]]]:
    """Yield groups of names with the same resource hints.

    >>> list(by_hints({"a": {}, "b": {"min_ram": "4GB"}, "c": {}}))
    [({}, ['a', 'c']), ({'min_ram': '4GB'}, ['b'])]
    """
    left = dict(hints)
    while left:
        first = next(iter(left.values()))
        same = [name for name, each in left.items() if each == first]
        for name in same:
            del left[name]
        yield first, same


def with_shared_bundles(hints: dict[str, Any]) -> dict[str, Any]:
    """Return the hints with a limit of active bundles: bundles share the model, and batches combine their examples."""
    return {"max_active_bundles_per_worker": str(_BUNDLES_PER_DEVICE), **hints} if hints else hints
