"""Lists the state and timers that a checkpoint has of a step, also while a run writes to it."""

from __future__ import annotations

import json
import marshal
import os
import sqlite3
from collections.abc import Iterator
from dataclasses import dataclass
from functools import cache
from typing import Any

from apache_beam.portability.api import beam_fn_api_pb2

from luminosity.engine.durable.inspection import shown_step
from luminosity.engine.durable.place import DATABASE, read_only
from luminosity.engine.durable.stored_values import Undecoded, ValueReader, key_of, window_of
from luminosity.engine.durable.tables import VERSION, stored_meta, stored_rows, version_of
from luminosity.engine.plan.codecs import TimerRecord
from luminosity.errors import CheckpointError

__all__ = ["Kept", "kept_by", "steps_with_state"]

_ORDERED_ENTRY = "kv(varint,length_prefix({}))"  # the sort key, and the value
_TIMER_FAMILY = "ts-"  # what Beam puts before the name of a timer
_COUNT_BYTES = 4  # of the number of a timer's windows, which is one


@dataclass(frozen=True)
class Kept:
    """A cell of state or a timer of one key in one window."""

    step: str
    key: Any
    window: tuple[float, float] | Undecoded | None  # start and end in seconds since 1970; None: the global window
    name: str
    kind: str  # such as "bag" or "combining"; "event time timer" or "processing time timer"
    value: Any  # of a timer the time at which it fires, in seconds since 1970


def steps_with_state(folder: str) -> list[str]:
    """Return the names of the steps of which a checkpoint has state or timers.

    Raises :class:`CheckpointError` if the folder has no checkpoint.
    """
    with read_only(folder) as rows:
        return list(_owners(rows, _shape(rows, folder)))


def kept_by(folder: str, step: str) -> Iterator[Kept]:
    """Yield what a checkpoint has of a step: its state, then its timers.

    ``step`` is the name of the step, or its unique end, such as ``Count`` for ``Orders/Count``. Values of coders that
    only the pipeline's program has are :class:`Undecoded`. Raises :class:`CheckpointError` if the folder has no
    checkpoint, or no state and timers of this step.
    """
    with read_only(folder) as rows:
        shape = _shape(rows, folder)
        owners = _owners(rows, shape)
        name = _chosen(step, list(owners), folder)
        for owner in owners[name]:
            kind, _, rest = owner.partition("/")
            durable_name, _, family = rest.partition("/")
            reader = _Reader(name, shape["steps"].get(durable_name, {}))
            for key, value in stored_rows(rows, os.path.join(folder, DATABASE), owner):
                yield reader.cell(key, value) if kind == "state" else reader.timer(family, value)


def _shape(rows: sqlite3.Connection, folder: str) -> dict[str, Any]:
    database = os.path.join(folder, DATABASE)
    version = version_of(rows, database)
    if version is None:
        return {"steps": {}}
    if version != VERSION:
        raise CheckpointError(
            f"the checkpoint in {folder} has version {version}, and this release reads version {VERSION}",
            fix="look at it with the release that wrote it",
        )
    meta = stored_meta(rows, database)
    return json.loads(meta["shape"]) if "shape" in meta else {"steps": {}}


def _owners(rows: sqlite3.Connection, shape: dict[str, Any]) -> dict[str, list[str]]:
    """Return the owners of the rows of each step with state or timers, by the step's shown name; state first."""
    found: dict[str, list[str]] = {}
    of_steps = "owner GLOB 'state/*' OR owner GLOB 'timers/*'"
    for (owner,) in rows.execute(f"SELECT DISTINCT owner FROM rows WHERE {of_steps} ORDER BY owner").fetchall():
        durable_name = owner.split("/")[1]
        found.setdefault(shown_step(durable_name, shape), []).append(owner)
    return found


def _chosen(step: str, names: list[str], folder: str) -> str:
    """Return the only name that is ``step`` or ends with it."""
    fitting = [step] if step in names else [name for name in names if name.endswith(f"/{step}")]
    if len(fitting) == 1:
        return fitting[0]
    if not names:
        raise CheckpointError(f"the checkpoint in {folder} has no state and no timers of any step")
    which = "several steps with this end" if fitting else "no state or timers of such a step"
    raise CheckpointError(
        f"found {which} in {folder}: {step!r}, expected one of {', '.join(map(repr, fitting or names))}"
    )


class _Reader:
    """Reads the rows of one step as its shape says."""

    def __init__(self, step: str, shape: dict[str, Any]) -> None:
        self._step = step
        self._specs: dict[str, dict[str, str]] = shape.get("state", {})
        self._domains: dict[str, str] = shape.get("timers", {})
        self._key_coder: str = shape.get("key", "the key")
        self._windows: str = shape.get("windows", "the window")
        self._reader = cache(ValueReader)

    def cell(self, cell_key: bytes, row: bytes) -> Kept:
        """Return what one row of state says."""
        state_key: Any = beam_fn_api_pb2.StateKey.FromString(cell_key)
        place = getattr(state_key, str(state_key.WhichOneof("type")))
        spec = self._specs.get(place.user_state_id, {})
        kind = spec.get("kind", "state")
        coder = next((text for name, text in spec.items() if name.endswith("coder")), "its coder")
        values = list(self._values(kind, coder, marshal.loads(row)))
        if kind == "set":
            values = list({repr(value): value for value in values}.values())
        is_one = kind == "read modify write" and len(values) == 1
        return Kept(
            step=self._step,
            key=key_of(place.key, self._key_coder),
            window=window_of(place.window, self._windows),
            name=place.user_state_id,
            kind="value" if kind == "read modify write" else kind,
            value=values[0] if is_one else values,
        )

    def _values(self, kind: str, coder: str, cell: list[Any]) -> Iterator[Any]:
        if kind == "ordered list":
            entries = self._reader(_ORDERED_ENTRY.format(coder))
            for entry in entries.values(b"".join(data for _, data in cell)):
                yield entry if isinstance(entry, Undecoded) else (entry[0] / 1e6, entry[1])
        else:
            yield from self._reader(coder).values(b"".join(cell))

    def timer(self, family: str, row: bytes) -> Kept:
        """Return what one timer says."""
        record = TimerRecord._make(marshal.loads(row))
        domain = self._domains.get(family, "").replace("_", " ")
        tag, _, windows = record.identity[len(record.key) :].partition(b"\0")
        return Kept(
            step=self._step,
            key=key_of(record.key, self._key_coder),
            window=window_of(windows[_COUNT_BYTES:], self._windows),
            name=family.removeprefix(_TIMER_FAMILY) + (f" {tag.decode()}" if tag else ""),
            kind=f"{domain} timer".strip(),
            value=record.fire_micros / 1e6,
        )
