"""Types that the user registered with Beam, registered in workers, too.

A row's coder refers to its type by an id, and to a logical type by a URN; registries of the process map them to
classes. A worker without those would make up a class for the row, without the user's methods, and fail on the logical
type.
"""

from __future__ import annotations

import logging
import sys
from typing import Any

from apache_beam.internal import cloudpickle_pickler
from apache_beam.typehints.schema_registry import SCHEMA_REGISTRY
from apache_beam.typehints.schemas import LogicalType

__all__ = ["define", "pickle_each", "pickled", "unpickle"]


_LOGGER = logging.getLogger(__name__)

_LOGICAL_TYPES: Any = getattr(LogicalType, "_known_logical_types")  # noqa: B009  # Beam's saved sessions use it, too


class RowTypes(dict[str, tuple[type, Any]]):
    """Row types by id. The user's types are unpickled when they are first looked up, since that may import much."""

    def __init__(self, known: dict[str, tuple[type, Any]], pickled: dict[str, bytes]) -> None:
        super().__init__(known)
        self._pickled = pickled

    def __contains__(self, schema_id: object) -> bool:
        return self.get(str(schema_id)) is not None

    def __getitem__(self, schema_id: str) -> tuple[type, Any]:
        self._define(schema_id)
        return super().__getitem__(schema_id)

    def get(self, schema_id: str, default: Any = None) -> Any:
        """Return a type and its schema, unpickled if needed."""
        self._define(schema_id)
        return super().get(schema_id, default)

    def _define(self, schema_id: str) -> None:
        if schema_id in self._pickled and not super().__contains__(schema_id):
            row_type: Any = unpickle(schema_id, self._pickled[schema_id])
            if row_type is not None:
                self[schema_id] = row_type, None


def pickled() -> dict[str, dict[str, bytes]]:
    """Return the registered types, for :func:`define` in a worker."""
    # Copied in one step: another thread may be building a pipeline.
    row_types: list[tuple[str, tuple[type, Any]]] = list(SCHEMA_REGISTRY.by_id.items())
    urns: list[str] = list(_LOGICAL_TYPES._custom_urns)
    return {
        "row types": pickle_each({i: t for i, (t, _) in row_types if not _is_made_up(t) and not _is_replaced(t)}),
        "logical types": pickle_each({urn: _LOGICAL_TYPES.by_urn[urn] for urn in urns}),
    }


def define(types: dict[str, dict[str, bytes]]) -> None:
    """Register the types that :func:`pickled` returned in another process."""
    registry: Any = SCHEMA_REGISTRY
    registry.by_id = RowTypes(registry.by_id, types["row types"])
    for urn, data in types["logical types"].items():
        logical_type: Any = unpickle(urn, data)
        if logical_type is not None:
            _LOGICAL_TYPES.add(urn, logical_type)


def pickle_each(values: dict[str, Any]) -> dict[str, bytes]:
    """Pickle each value, and leave out those that can't be: if one is needed, the worker's own error names it."""
    found: dict[str, bytes] = {}
    for name, value in values.items():
        try:
            found[name] = cloudpickle_pickler.dumps(value)
        except Exception as error:
            _LOGGER.debug("%s can't be sent to workers: %s", name, error)
    return found


def unpickle(name: str, data: bytes) -> Any:
    """Return the value, or None if it can't be unpickled here."""
    try:
        return cloudpickle_pickler.loads(data)
    except Exception as error:
        _LOGGER.debug("%s can't be defined here: %s", name, error)
        return None


def _is_made_up(row_type: type) -> bool:
    """Return whether Beam made the class, for rows without one; workers make their own."""
    return row_type.__module__ == "apache_beam.typehints.schemas"


def _is_replaced(row_type: type) -> bool:
    """Return whether a notebook's cell has defined the class again since; the registry keeps all versions."""
    if row_type.__module__ != "__main__" or row_type.__qualname__ != row_type.__name__:
        return False
    return vars(sys.modules["__main__"]).get(row_type.__name__, row_type) is not row_type
