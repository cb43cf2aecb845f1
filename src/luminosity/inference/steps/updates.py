"""Where new versions of a transform's models come from while it runs, checked when the pipeline is built."""

from __future__ import annotations

import logging
from dataclasses import dataclass
from typing import Any

from apache_beam.utils.timestamp import MAX_TIMESTAMP, Timestamp

from luminosity.errors import InvalidArgument
from luminosity.inference.adapting.adapt import ModelSet
from luminosity.inference.steps.pinning import PinnedModels, registry_watch
from luminosity.inference.steps.versions import RegistryWatch, Watch

__all__ = ["Updates", "warn_without_updates"]

_LOGGER = logging.getLogger(__name__)
_LOOK_EVERY_S = 360.0  # as often as Beam's WatchFilePattern


@dataclass(frozen=True)
class Updates:
    """Where new versions of the model come from, and when to look for them."""

    metadata: Any = None
    """The side input ``model_metadata_pcoll`` of RunInference."""
    pattern: str | None = None
    registry: bool = False
    interval: float | None = None
    until: Any = None

    def __post_init__(self) -> None:
        """Raise ``InvalidArgument`` if new versions come from two places, or times are given without a place."""
        given = {
            "model_metadata_pcoll": self.metadata is not None,
            "watch_model_pattern": self.pattern is not None,
            "watch_registry": self.registry,
        }
        found = [name for name, is_given in given.items() if is_given]
        if len(found) > 1:
            raise InvalidArgument(f"found {' and '.join(found)}, expected one of them")
        if (self.interval, self.until) != (None, None) and not (self.pattern or self.registry):
            raise InvalidArgument(
                "found interval or stop_timestamp without watch_model_pattern or watch_registry",
                fix="pass watch_model_pattern or watch_registry, too",
            )

    def watch(self, models: ModelSet, pinned: PinnedModels) -> Watch | RegistryWatch | None:
        """Return what workers watch, if anything."""
        until = float(MAX_TIMESTAMP if self.until is None else Timestamp.of(self.until))
        interval = _LOOK_EVERY_S if self.interval is None else float(self.interval)
        if self.registry:
            return registry_watch(models, pinned.registered, interval, until)
        if self.pattern is None:
            return None
        watch = Watch(self.pattern, interval, until)
        if watch.is_per_key != models.is_keyed:
            wanted = (
                "{key} in it, because each key has its own model"
                if models.is_keyed
                else "no {key}, as there are no keys"
            )
            raise InvalidArgument(f"found watch_model_pattern={watch.pattern!r}, expected {wanted}")
        return watch


def warn_without_updates(models: ModelSet) -> None:
    """Log the handlers that can't load a new version of their model, although versions are watched."""
    for name in models.without_updates():
        _LOGGER.warning("%s has no update_model_path: new versions of its model will change nothing.", name)
