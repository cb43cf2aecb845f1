"""Events as JSON, and back."""

from __future__ import annotations

import functools
import types
from dataclasses import fields, is_dataclass
from typing import Any, Literal, Union, cast, get_args, get_origin, get_type_hints

from luminosity.errors import RecordError
from luminosity.events.events import (
    BundleRetried,
    CheckpointDone,
    Event,
    LogMessage,
    ModelLoaded,
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
        ModelLoaded,
        LogMessage,
        CheckpointDone,
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
        return _build(_KINDS[content.pop("event")], content)
    except (AttributeError, KeyError, TypeError) as error:
        raise RecordError(f"not an event of this version: {error!r}") from error


def is_known(data: Any) -> bool:
    """Return whether ``data`` is of a kind of event that this version knows.

    >>> is_known({"event": "Snapshot"}), is_known({"event": "OfALaterVersion"})
    (True, False)
    """
    return isinstance(data, dict) and cast("dict[str, Any]", data).get("event") in _KINDS


def _plain(value: Any) -> Any:
    if is_dataclass(value):
        held = [(field, getattr(value, field.name)) for field in fields(value)]
        return {field.name: _plain(v) for field, v in held if v != field.default}
    if isinstance(value, tuple):
        return [_plain(item) for item in value]
    return value


def _build(kind: Any, data: Any) -> Any:
    if isinstance(kind, type) and is_dataclass(kind):
        hints = _hints(kind)
        return kind(**{name: _build(hints[name], value) for name, value in data.items() if name in hints})
    origin = get_origin(kind)
    if origin is tuple:
        return tuple(_build(get_args(kind)[0], item) for item in data)
    allowed = get_args(kind)
    if isinstance(data, dict):
        kinds = [one for one in allowed if is_dataclass(one)]
        if kinds:
            return _build(kinds[0], data)
    if origin is Literal:
        is_fitting = data in allowed
    else:
        accepted = allowed if origin in (Union, types.UnionType) else (kind,)
        # Other JSON writers turn whole floats into integers.
        is_fitting = isinstance(data, (*accepted, int) if float in accepted else accepted)
    if not is_fitting:
        raise RecordError(f"found {data!r}, expected {kind}")
    return data


@functools.cache
def _hints(kind: Any) -> dict[str, Any]:
    return get_type_hints(kind)
