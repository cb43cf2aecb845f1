"""Steps for transforms of Beam's that have none on this runner, or whose steps do less than they promise.

The parts that have the steps stand above the runner. So the package names them here when it is imported, each with a
function that imports its part; that happens when a pipeline first uses the transform.
"""

from __future__ import annotations

from collections.abc import Callable
from typing import Any, Final

__all__ = ["STAND_INS", "Expand", "stand_in_for"]

Expand = Callable[[Any, Any], Any]
"""Gets a transform and its input, and returns what the transform returns."""

STAND_INS: Final[dict[str, Callable[[], Expand]]] = {}
"""What loads the steps of a transform, by the full name of its class or, for Beam's ``Read``, of its source."""


def stand_in_for(transform: Any) -> Expand | None:
    """Return what expands a transform in place of its own ``expand``; None for nearly all transforms.

    >>> import apache_beam as beam
    >>> stand_in_for(beam.Map(str)) is None
    True
    """
    load = STAND_INS.get(_name(transform))
    if load is None and _name(transform) == "apache_beam.io.iobase.Read":
        load = STAND_INS.get(_name(transform.source))
    return None if load is None else load()


def _name(value: Any) -> str:
    kind: Any = type(value)
    return f"{kind.__module__}.{kind.__qualname__}"
