"""Chooses the version of a model that a step uses: the old one until the new one is loaded."""

from __future__ import annotations

from collections.abc import Callable, Hashable, Iterable, Mapping
from typing import Any

from apache_beam.ml.inference.base import KeyModelPathMapping, ModelMetadata

from luminosity.errors import InvalidArgument, InvalidType
from luminosity.inference.adapting.model_set import ModelSet
from luminosity.inference.host.interface import Ahead
from luminosity.inference.steps.watch import Version

__all__ = ["Versions", "version_of_all", "versions_of_keys"]


class Versions:
    """Tracks the version of each key of one step."""

    def __init__(
        self,
        load_ahead: Callable[[Hashable, Version, Version | None], Ahead],
        take_over: Callable[[Hashable, Version, Version], None],
        may_lag: bool,
    ) -> None:
        """
        Args:
            load_ahead: requests a version before there is work for it; if it does not fit beside the others, it
                replaces the version given last, if that is not None.
            take_over: moves the waiting examples of the old version to the new one.
            may_lag: whether the old version may be used while the new one is loading.
        """
        self._load_ahead = load_ahead
        self._take_over = take_over
        self._may_lag = may_lag
        self._current: dict[tuple[Hashable, Hashable], Version] = {}
        self._wanted: dict[tuple[Hashable, Hashable], Version] = {}

    def current(self, model: Hashable, key: Hashable) -> Version:
        """Return the version that a key uses now."""
        return self._current.get((model, key), Version())

    def next(self, model: Hashable, key: Hashable, wanted: Version) -> Version:
        """Return the version for the next examples of this key: the wanted one, or the old one until that is loaded."""
        old = self._current.get((model, key))
        self._wanted[model, key] = wanted
        if old is not None and old == wanted:
            return old
        if old is None or not self._may_lag:
            self._current[model, key] = wanted
        else:
            is_last = not self._is_used_by_others(model, key, old)
            # A version that can't be loaded is never used; the host has logged why. A version that does not fit beside
            # the old one replaces it; while other keys need the old one, the two take turns instead.
            if self._load_ahead(model, wanted, old if is_last else None) in (Ahead.READY, Ahead.NO_ROOM):
                self._current[model, key] = wanted
                if is_last:
                    self._take_over(model, old, wanted)
        return self._current[model, key]

    def known(self) -> list[tuple[Hashable, Hashable]]:
        """Return the pairs of model and key that have a version."""
        return list(self._current)

    def needed(self) -> set[tuple[Hashable, str]]:
        """Return the models and paths that any key uses or waits for."""
        both = [*self._current.items(), *self._wanted.items()]
        return {(model, version.path) for (model, _), version in both}

    def _is_used_by_others(self, model: Hashable, key: Hashable, version: Version) -> bool:
        uses = (whose for whose, each in self._current.items() if each.path == version.path)
        return any(whose[0] == model and whose[1] != key for whose in uses)


def version_of_all(metadata: Any) -> Version:
    """Return the version that a side input names for a model without keys.

    >>> version_of_all("models/v2.pt")
    Traceback (most recent call last):
    luminosity.errors.InvalidType: found 'models/v2.pt' in model_metadata_pcoll, expected ModelMetadata(path, name), \
because there are no keys
    """
    if not isinstance(metadata, ModelMetadata):
        raise InvalidType(
            f"found {metadata!r} in model_metadata_pcoll, expected ModelMetadata(path, name), because there are no keys"
        )
    return Version(metadata.model_id, metadata.model_name)


def versions_of_keys(metadata: Any, models: ModelSet) -> Mapping[Hashable, Version]:
    """Return the version that a side input names for each key. Raises if a key has no path, or several."""
    found: dict[Hashable, Version] = {}
    mappings = [metadata] if isinstance(metadata, str | tuple) or not isinstance(metadata, Iterable) else list(metadata)
    for mapping in mappings:
        if mapping is metadata or not isinstance(mapping, KeyModelPathMapping):
            raise InvalidType(
                f"found {mapping!r} in model_metadata_pcoll, expected one element that is a list of "
                "KeyModelPathMapping, because there are keys"
            )
        if not mapping.update_path:
            raise InvalidArgument(f"found an empty path for the keys {mapping.keys} in a model update, expected a path")
        for key in mapping.keys:
            if key in found:
                raise InvalidArgument(
                    f"found the key {key!r} in several mappings of a model update, expected it in one"
                )
            models.name_of_key(key)
            found[key] = Version(mapping.update_path, mapping.model_id)
    missing = [key for key in models.keys if key not in found]
    if missing:
        raise InvalidArgument(
            f"found no path for the key {missing[0]!r} in a model update, expected one for every key of the handler"
        )
    return found
