"""Compares what two runs have written."""

from __future__ import annotations

import json
import os
from dataclasses import dataclass
from typing import Any, Literal

from luminosity.errors import LuminosityError
from luminosity.runs.manifest.files import files_of, is_local
from luminosity.runs.manifest.manifest import describe
from luminosity.runs.manifest.places import Place, Sealed, base_of, seal

__all__ = ["Outcome", "compare_outputs", "compare_reads"]

_LARGEST_TABLE = 2 << 30  # bytes of files; rows of larger tables are not compared one by one

Verdict = Literal["same bytes", "same content", "same within rounding", "differs"]


@dataclass(frozen=True)
class Outcome:
    """How one output of two runs compares."""

    step: str
    before: str  # the path
    now: str
    verdict: Verdict
    detail: str = ""

    @property
    def is_same(self) -> bool:
        """Whether the outputs count as equal."""
        return self.verdict != "differs"

    def __str__(self) -> str:
        return f"{self.now}: {self.verdict}{': ' if self.detail else ''}{self.detail}"


def compare_outputs(
    before: Sealed, kept: str, now: Sealed | None, since: tuple[float, float], tolerance: float
) -> Outcome:
    """Compare an output of a run with that of its rerun.

    ``kept`` is where the first one is now, and ``since`` are the times at which both runs began.
    """
    if now is None:
        return Outcome(before.step, before.path, "", "differs", "the rerun has no such output")
    place = (before.step, before.path, now.path)
    if before.digest and before.digest == now.digest:
        return Outcome(*place, "same bytes", _amount(now) + (", in the parts that were read" if now.is_sampled else ""))
    if not now.digest or not before.digest:
        detail = f"was {describe(before)}, is {describe(now)}"
        return Outcome(*place, "same bytes" if before.note == now.note == "no such file" else "differs", detail)
    if before.content and before.content == now.content:
        return Outcome(*place, "same content", f"{_amount(now)}, in another order or in other files")
    is_kept, note = _is_kept(before, kept, since[0])
    if not is_kept:
        return Outcome(*place, "differs", f"was {describe(before)}, is {describe(now)}; {note}")
    if max(before.size, now.size) > _LARGEST_TABLE:
        return Outcome(*place, "differs", f"was {describe(before)}, is {describe(now)}; too large to compare rows")
    try:
        old = _table(Sealed(before.step, kept, before.kind, before.name), since[0])
        new = _table(now, since[1])
    except (LuminosityError, OSError, ValueError, TypeError) as error:
        return Outcome(*place, "differs", f"was {describe(before)}, is {describe(now)}; rows can't be read: {error}")
    if old is None or new is None:
        return Outcome(*place, "differs", f"was {describe(before)}, is {describe(now)}")
    return _compare_rows(place, old, new, tolerance, note)


def compare_reads(before: tuple[Sealed, ...], now: tuple[Sealed, ...]) -> list[str]:
    """Say which inputs or models the rerun has taken that differ from those of the run, by step."""
    found: list[str] = []
    for old, new in zip(_by_step(before), _by_step(now), strict=False):
        if old.step == new.step and old.digest and new.digest and (old.digest, old.name) != (new.digest, new.name):
            names = (f"version {old.name}, ", f"version {new.name}, ") if old.kind == "model" and old.name else ("", "")
            found.append(f"{new.path}: was {names[0]}{describe(old)}, is {names[1]}{describe(new)}")
    return found


def _by_step(places: tuple[Sealed, ...]) -> list[Sealed]:
    return sorted(places, key=lambda each: (each.step, os.path.basename(each.path)))


def _compare_rows(place: tuple[str, str, str], old: Any, new: Any, tolerance: float, note: str) -> Outcome:
    from luminosity.runs.manifest.contents import compare_tables  # imports pyarrow

    found = compare_tables(old, new)
    also = f"; {note}" if note else ""
    if found.is_same:
        return Outcome(*place, "same content", f"{found.now:,} rows, in another order or in other files{also}")
    if found.is_within(tolerance):
        return Outcome(
            *place, "same within rounding", f"{found.now:,} rows, numbers differ by at most {found.largest:.2g}{also}"
        )
    if found.columns:
        return Outcome(*place, "differs", f"{found.columns}{also}")
    detail = f"{found.changed:,} of {found.now:,} rows are new or changed"
    if found.before != found.now:
        detail += f", {found.before:,} rows before"
    if found.largest is not None:
        detail += f", only in numbers, by at most {found.largest:.2g}"
    return Outcome(*place, "differs", f"{detail}{also}")


def _is_kept(before: Sealed, kept: str, since: float) -> tuple[bool, str]:
    """Return whether the output of the first run is still there, and what to say of it."""
    if before.kind != "files":  # a store may change its files when it is opened
        is_there = is_local(kept) and os.path.exists(kept)
        return is_there, "" if is_there else "the output of the run is gone"
    now = seal(Place(before.step, kept, before.kind, before.name), since=since)
    if now.digest == before.digest:
        return True, ""
    return False, "the output of the run has changed since, so that only digests can be compared"


def _table(place: Sealed, since: float) -> Any:
    """Read an output as a ``pyarrow.Table``; None if it is no table."""
    from luminosity.runs.manifest.contents import is_table, read_files

    if place.kind == "qdrant":
        return _points(place)
    if place.kind == "lance":
        from luminosity.io.stores.lance_table import LanceTable

        return LanceTable(place.path).rows()
    files = files_of(place.path, since)
    return read_files(files, base_of(place.path)) if is_table(files) else None


def _points(place: Sealed) -> Any:
    import pyarrow as pa

    from luminosity.io.stores.address import StoreAddress
    from luminosity.io.stores.embedded_qdrant import EmbeddedCollection

    points = list(EmbeddedCollection(StoreAddress(place.path, place.name)).all_points())
    names = sorted({name for point in points for name in point.vectors})
    return pa.table(
        {
            "id": [str(point.id) for point in points],
            "payload": _payloads(points),
            **{
                f"vector {name}": pa.array([p.vectors.get(name) for p in points], pa.list_(pa.float64()))
                for name in names
            },
        }
    )


def _payloads(points: Any) -> Any:
    import pyarrow as pa

    payloads = [dict(sorted(point.payload.items())) for point in points]
    try:
        return pa.array(payloads)
    except pa.ArrowInvalid:  # one name has values of several types
        return pa.array([json.dumps(each, sort_keys=True, default=str) for each in payloads])


def _amount(sealed: Sealed) -> str:
    if sealed.rows is not None:
        return f"{sealed.rows:,} rows"
    return f"{sealed.files:,} file{'' if sealed.files == 1 else 's'}"
