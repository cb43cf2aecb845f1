"""Events as JSON, and back."""

from __future__ import annotations

import functools
import types
from collections.abc import Callable
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from typing_extensions import Never

from luminosity.errors import RecordError
from luminosity.events.events import (
    BundleRetried,
    BundleStalled,
    CheckpointDone,
    Event,
    LogMessage,
    ModelLoaded,
    NodeChanged,
    RunEnded,
    RunStarted,
    Snapshot,
    WorkerEnded,
    WorkerLost,
    WorkerStarted,
)

__all__ = ["from_json", "is_known", "to_json"]

_KINDS: dict[str, type[Event]] = {
    kind.__name__: kind
    for kind in (
        RunStarted,
        Snapshot,
        WorkerStarted,
        WorkerLost,
        WorkerEnded,
        BundleRetried,
        BundleStalled,
        ModelLoaded,
        LogMessage,
        CheckpointDone,
        NodeChanged,
        RunEnded,
    )
}


def to_json(event: Event) -> dict[str, Any]:
    """Return ``event`` as a dictionary for ``json.dumps``, without the fields that have their default.

    >>> lost = WorkerLost("r1", 2.5, "w1", "cpu", "was killed by SIGKILL", bundles=1)
    >>> from_json(to_json(lost)) == lost
    True
    """
    return {"event": type(event).__name__, **_plain(event)}


def from_json(data: Any) -> Event:
    """Return the event that :func:`to_json` turned into ``data``.

    Leaves out fields that only a later version knows. Raises :class:`RecordError`, which is a ``ValueError``, for
    anything else; :func:`is_known` tells whether this version knows the kind of an event at all.
    """
    try:
        content = dict(data)
        return _builder(_KINDS[content.pop("event")])(content)
    except (AttributeError, KeyError, TypeError) as error:
        raise RecordError(f"not an event of this version: {error!r}") from error


def is_known(data: Any) -> bool:
    """Return whether ``data`` is of a kind of event that this version knows.

    >>> is_known({"event": "Snapshot"}), is_known({"event": "OfALaterVersion"})
    (True, False)
    """
    return isinstance(data, dict) and cast("dict[str, Any]", data).get("event") in _KINDS


def _plain(value: Any) -> Any:
    kind = type(value)
    if kind in _SCALARS:
        return value
    if kind is tuple:
        return [_plain(item) for item in value]
    if not is_dataclass(kind):
        return value
    plain: dict[str, Any] = {}
    for name, default in _defaults(kind):
        held = getattr(value, name)
        if held is not default and held != default:
            plain[name] = held if type(held) in _SCALARS else _plain(held)
    return plain


_SCALARS = frozenset((str, int, float, bool, type(None)))


@functools.cache
def _defaults(kind: type[Any]) -> list[tuple[str, Any]]:
    return [(field.name, field.default) for field in fields(kind)]


@functools.cache
def _builder(kind: Any) -> Callable[[Any], Any]:
    """Return what builds a value of ``kind`` from JSON: found once for each kind, since records hold many."""
    if isinstance(kind, type) and is_dataclass(kind):
        builders = {name: _builder(hint) for name, hint in get_type_hints(kind).items()}

        def build(data: Any) -> Any:
            return kind(**{name: builders[name](value) for name, value in data.items() if name in builders})

        return build
    origin, allowed = get_origin(kind), get_args(kind)
    if origin is tuple:
        build_item = _builder(allowed[0])
        return lambda data: tuple([build_item(item) for item in data])
    if origin is Literal:
        return lambda data: data if data in allowed else _refuse(data, kind)
    accepted = tuple(allowed if origin in (Union, types.UnionType) else (kind,))
    # Other JSON writers turn whole floats into integers.
    types_of_it = (*accepted, int) if float in accepted else accepted
    parts = [_builder(one) for one in accepted if is_dataclass(one)]

    def check(data: Any) -> Any:
        if parts and isinstance(data, dict):
            return parts[0](data)
        return data if isinstance(data, types_of_it) else _refuse(data, kind)

    return check


def _refuse(data: Any, kind: Any) -> Never:
    raise RecordError(f"found {data!r}, expected {kind}")
