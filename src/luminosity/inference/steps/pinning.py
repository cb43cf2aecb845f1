"""Fixes the versions of registered models when a pipeline is built, so that all workers use the same."""

from __future__ import annotations

import json
import logging
import os
from collections.abc import Hashable, Iterable, Mapping
from copy import deepcopy
from dataclasses import dataclass, field
from typing import Any

import apache_beam as beam
from apache_beam.ml.inference.base import ModelHandler

from luminosity.core import MODEL_VERSIONS, MODELS
from luminosity.errors import InvalidArgument
from luminosity.inference.adapting.adapt import ModelSet
from luminosity.inference.files.local import use_cache
from luminosity.inference.options import ModelCacheConfig, processes_of
from luminosity.inference.registry.resolve import resolve
from luminosity.inference.registry.resolved import RegistryName, ResolvedModel, is_registry_name
from luminosity.inference.steps.versions import RegistryWatch

__all__ = ["PinnedModels", "annotate_models", "annotate_versions", "pin_here", "pin_models", "registry_watch"]

_LOGGER = logging.getLogger(__name__)


@dataclass(frozen=True)
class PinnedModels:
    """A handler whose registered models have paths instead of names, and their versions."""

    handler: ModelHandler[Any, Any, Any]
    registered: Mapping[Hashable, ResolvedModel] = field(default_factory=dict[Hashable, ResolvedModel])
    """By the name of the model in its ``ModelSet``; without models that no registry knows."""


def pin_models(handler: ModelHandler[Any, Any, Any], pipeline: beam.Pipeline) -> PinnedModels:
    """Return the handler with the versions that its models' names stand for now; itself if no model has a name.

    If the workers run on this machine, the files are fetched and their digests checked, before anything runs. Blocks
    meanwhile. Raises ``ModelUnavailable`` for every reason why a worker could not load the model.
    """
    is_here = getattr(pipeline.runner, "runs_on_this_machine", False) or processes_of(pipeline) is not None
    if is_here and _names(handler):
        use_cache(ModelCacheConfig.of(pipeline.options))
    return _pin(handler, is_here)


def pin_here(handler: ModelHandler[Any, Any, Any]) -> PinnedModels:
    """Return the handler with the versions that its models' names stand for now, to be loaded in this process."""
    return _pin(handler, is_here=True)


def registry_watch(
    models: ModelSet, registered: Mapping[Hashable, ResolvedModel], interval: float, until: float
) -> RegistryWatch:
    """Return the watch for models of registries. Raises ``InvalidArgument`` if no name can get a new version."""
    if not registered:
        raise InvalidArgument(
            "found watch_registry=True, but no model is named by a registry",
            fix="pass a handler a name such as 'models:/sentiment@champion' or 'registry://models/sentiment@prod'",
        )
    can_change = {name: each for name, each in registered.items() if not RegistryName.parse(each.name).is_fixed}
    if not can_change:
        fixed = next(iter(registered.values())).name
        raise InvalidArgument(
            f"found watch_registry=True with {fixed!r}, which always stands for the same version",
            fix="name an alias: models:/NAME@ALIAS",
        )
    if not models.is_keyed:
        return RegistryWatch(can_change, interval, until)
    by_key = {key: can_change.get(models.name_of_key(key)) for key in models.keys}
    return RegistryWatch({key: each for key, each in by_key.items() if each is not None}, interval, until)


def annotate_versions(registered: Iterable[ResolvedModel]) -> dict[str, str]:
    """Return the annotation of a step from which a runner records the versions; none without registered models."""
    versions = [each.to_json() for each in registered]
    return {MODEL_VERSIONS: json.dumps(versions)} if versions else {}


def annotate_models(*handlers: ModelHandler[Any, Any, Any]) -> dict[str, str]:
    """Return the annotation of a transform that names the models of its handlers which are in no registry."""
    paths = [path for handler in handlers for path in _paths(handler).values() if not is_registry_name(path)]
    return {MODELS: json.dumps(sorted({*paths}))} if paths else {}


def _names(handler: ModelHandler[Any, Any, Any]) -> dict[Hashable, str]:
    return {name: path for name, path in _paths(handler).items() if is_registry_name(path)}


def _paths(handler: ModelHandler[Any, Any, Any]) -> dict[Hashable, str]:
    paths = {name: each.path_of_model() for name, each in ModelSet(handler).handlers.items()}
    return {name: os.fspath(path) for name, path in paths.items() if path is not None}


def _pin(handler: ModelHandler[Any, Any, Any], is_here: bool) -> PinnedModels:
    names = _names(handler)
    if not names:
        return PinnedModels(handler)
    pinned = deepcopy(handler)
    models = ModelSet(pinned).handlers
    for name in names:
        if not models[name].takes_updates():
            raise InvalidArgument(
                f"found the model {names[name]!r}, but {models[name]} has no update_model_path for its version",
                fix="implement update_model_path in the handler, or pass a path",
            )
    by_name = {text: _resolved(text, is_here) for text in dict.fromkeys(names.values())}
    for name, text in names.items():
        models[name].update_model_path(_path_of(by_name[text], is_here))
    return PinnedModels(pinned, {name: by_name[text] for name, text in names.items()})


def _resolved(text: str, is_here: bool) -> ResolvedModel:
    found = resolve(text)
    if is_here:
        found = found.checked()
    _LOGGER.info("%s is version %s, %s, at %s", text, found.version, found.digest or "digest not known", found.path)
    return found


def _path_of(model: ResolvedModel, is_here: bool) -> str:
    if is_here:
        return model.local_path()
    return f"{model.path}/{model.inside}" if model.inside else model.path
