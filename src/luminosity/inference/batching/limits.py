"""The limits of batches that a handler's author has set."""

from __future__ import annotations

import logging
import math
from collections.abc import Callable, Mapping
from dataclasses import dataclass, replace
from typing import Any

from luminosity.errors import InvalidArgument

__all__ = ["Limits", "warn_of_settings_without_meaning"]

_LOGGER = logging.getLogger(__name__)

_MAX_COUNT = 10_000  # as in Beam's BatchElements
_BUCKETS = (16, 32, 64, 128, 256, 512)  # as in Beam, if lengths are given and boundaries are not
_HEEDED = {
    "min_batch_size",
    "max_batch_size",
    "max_batch_duration_secs",
    "target_batch_duration_secs",
    "target_batch_overhead",
    "max_batch_weight",
    "element_size_fn",
    "length_fn",
    "bucket_boundaries",
}
_WITHOUT_MEANING = {
    "clock": "the host has one clock for all batches",
    "record_metrics": "the host always records them",
    "target_batch_duration_secs_including_fixed_cost": "use target_batch_duration_secs, which includes it here",
    "variance": "batches differ in cost by themselves, and the host learns from that",
}


@dataclass(frozen=True)
class Limits:
    """The limits of batches, from Beam's ``batch_elements_kwargs``."""

    min_count: int = 1
    max_count: int = _MAX_COUNT
    max_wait: float | None = None
    """How long an example may wait for others (``max_batch_duration_secs``)."""
    max_seconds: float | None = None
    """How long one batch should take at most (``target_batch_duration_secs``)."""
    overhead_share: float = 0.05
    """Batches grow until their fixed costs take at most this share of their time (``target_batch_overhead``)."""
    max_weight: float = math.inf
    weigh: Callable[[Any], float] | None = None
    length: Callable[[Any], float] | None = None
    boundaries: tuple[float, ...] = ()
    """Examples whose lengths lie on two sides of a boundary never share a batch."""

    @classmethod
    def from_beam(cls, settings: Mapping[str, Any]) -> Limits:
        """Return the limits that these settings of Beam mean.

        >>> Limits.from_beam({"min_batch_size": 4, "max_batch_size": 8}).max_count
        8
        """
        length = settings.get("length_fn")
        boundaries = settings.get("bucket_boundaries")
        if boundaries is not None and length is None:
            raise InvalidArgument(
                "found batch_bucket_boundaries without batch_length_fn",
                fix="pass batch_length_fn, the length of an example",
            )
        weigh, max_weight = settings.get("element_size_fn"), settings.get("max_batch_weight")
        if max_weight is not None and weigh is None:
            raise InvalidArgument(
                "found max_batch_weight without element_size_fn", fix="pass element_size_fn, the weight of an example"
            )
        limits = cls(
            min_count=settings.get("min_batch_size") or 1,
            max_count=settings.get("max_batch_size") or _MAX_COUNT,
            max_wait=settings.get("max_batch_duration_secs"),
            max_seconds=settings.get("target_batch_duration_secs"),
            overhead_share=settings.get("target_batch_overhead") or cls.overhead_share,
            max_weight=math.inf if max_weight is None else max_weight,
            weigh=weigh,
            length=length,
            boundaries=tuple(_BUCKETS if boundaries is None else boundaries) if length is not None else (),
        )
        if limits.min_count <= limits.max_count:
            return limits
        if settings.get("max_batch_size") is not None:
            raise InvalidArgument(
                f"found min_batch_size={limits.min_count}, expected at most max_batch_size={limits.max_count}"
            )
        return replace(limits, max_count=limits.min_count)


def warn_of_settings_without_meaning(settings: Mapping[str, Any]) -> None:
    """Log a warning for each setting of a handler that has no effect here."""
    for name, value in settings.items():
        if value is not None and name not in _HEEDED:
            reason = _WITHOUT_MEANING.get(name, "it is not one of Beam's")
            _LOGGER.warning("The batch setting %s=%r has no effect: %s.", name, value, reason)
