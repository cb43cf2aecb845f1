"""Which version of a model a step uses: the new one as soon as it is loaded, the old one until then."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from dataclasses import dataclass
from typing import Any

from apache_beam.ml.inference.base import KeyModelPathMapping, ModelMetadata

from luminosity.inference.adapting.model_set import ModelSet
from luminosity.inference.host.interface import Ahead

__all__ = ["Version", "Versions", "version_of_all", "versions_of_keys"]


@dataclass(frozen=True)
class Version:
    """A model by the path of its files; none: the one that its handler names."""

    path: str = ""
    name: str = ""
    """By which it goes in the metrics."""


class Versions:
    """For one step, each key on its own."""

    def __init__(
        self,
        load_ahead: Callable[[Hashable, Version, Version | None], Ahead],
        take_over: Callable[[Hashable, Version, Version], None],
        may_lag: bool,
    ) -> None:
        """
        Args:
            load_ahead: asks for a version before there is work for it; where there is no room beside the old one,
                in the place of that, if it is named.
            take_over: gives the new version what still waits for the old one.
            may_lag: whether the old version may answer while the new one is loading.
        """
        self._load_ahead = load_ahead
        self._take_over = take_over
        self._may_lag = may_lag
        self._current: dict[tuple[Hashable, Hashable], Version] = {}
        self._wanted: dict[tuple[Hashable, Hashable], Version] = {}

    def current(self, model: Hashable, key: Hashable) -> Version:
        return self._current.get((model, key), Version())

    def next(self, model: Hashable, key: Hashable, wanted: Version) -> Version:
        """For the next examples of this key, which should get the version that is wanted."""
        old = self._current.get((model, key))
        self._wanted[model, key] = wanted
        if old is not None and old == wanted:
            return old
        if old is None or not self._may_lag:
            self._current[model, key] = wanted
        else:
            is_last = not self._is_used_by_others(model, key, old)
            # One that can't be loaded never comes, and the host has said so. One that finds no room beside the old one
            # comes where that goes; but not while other keys need that: then they take turns.
            if self._load_ahead(model, wanted, old if is_last else None) in (Ahead.READY, Ahead.NO_ROOM):
                self._current[model, key] = wanted
                if is_last:
                    self._take_over(model, old, wanted)
        return self._current[model, key]

    def known(self) -> list[tuple[Hashable, Hashable]]:
        """Whatever has a version so far: model and key."""
        return list(self._current)

    def needed(self) -> set[tuple[Hashable, str]]:
        """The models and paths that some key uses, or waits for."""
        both = [*self._current.items(), *self._wanted.items()]
        return {(model, version.path) for (model, _), version in both}

    def _is_used_by_others(self, model: Hashable, key: Hashable, version: Version) -> bool:
        uses = (whose for whose, each in self._current.items() if each.path == version.path)
        return any(whose[0] == model and whose[1] != key for whose in uses)


def version_of_all(metadata: Any) -> Version:
    """What a side input of `ModelMetadata` says, for a model without keys.

    >>> version_of_all("models/v2.pt")
    Traceback (most recent call last):
    TypeError: found 'models/v2.pt' in model_metadata_pcoll; there are no keys, so expected ModelMetadata(path, name)
    """
    if not isinstance(metadata, ModelMetadata):
        raise TypeError(
            f"found {metadata!r} in model_metadata_pcoll; there are no keys, so expected ModelMetadata(path, name)"
        )
    return Version(metadata.model_id, metadata.model_name)


def versions_of_keys(metadata: Any, models: ModelSet) -> Mapping[Hashable, Version]:
    """What a side input of `KeyModelPathMapping`s says, checked: every key has exactly one path."""
    found: dict[Hashable, Version] = {}
    mappings = [metadata] if isinstance(metadata, str | tuple) or not isinstance(metadata, Iterable) else list(metadata)
    for mapping in mappings:
        if mapping is metadata or not isinstance(mapping, KeyModelPathMapping):
            raise TypeError(
                f"found {mapping!r} in model_metadata_pcoll; there are keys, so expected its one element to be a list "
                "of KeyModelPathMapping"
            )
        if not mapping.update_path:
            raise ValueError(f"Invalid model update, path for {mapping.keys} is empty")
        for key in mapping.keys:
            if key in found:
                raise ValueError(f"Invalid model update: {key} appears in multiple update lists")
            models.name_of_key(key)
            found[key] = Version(mapping.update_path, mapping.model_id)
    missing = [key for key in models.keys if key not in found]
    if missing:
        raise ValueError(f"Invalid model update: {missing[0]} is in the original configuration, but not in the update")
    return found
