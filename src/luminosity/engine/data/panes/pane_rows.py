"""The rows of open windows in a checkpoint: what is kept of each key and window, and the values that were added."""

from __future__ import annotations

import marshal
import struct
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from luminosity.engine.data.panes.pane_values import Mark, PaneValues
from luminosity.engine.data.saved_rows import MARSHAL_VERSION, Changes
from luminosity.engine.spill.files import pieces

__all__ = ["ROWS_BYTES", "TIME_KEY", "PaneRows"]

TIME_KEY = b"t"  # of the row with the watermarks of panes, which comes before those of entries
_ENTRY_PREFIX = b"v"  # of the keys of entries' rows
ROWS_BYTES = 500  # that Python needs for what is known of an entry's rows
_YIELD_BYTES = 64 << 10  # of restored values, before memory is looked at
_KEY = struct.Struct(">QI")  # the number of the entry, and of its row


class _Entry(Protocol):
    values: PaneValues

    def __hash__(self) -> int: ...  # by identity


_T = TypeVar("_T", bound=_Entry)


@dataclass(slots=True, eq=False)
class _Rows:
    """What a checkpoint has of one entry: row 0 has its fields, the others its values."""

    number: int
    fields: bytes = b""
    last: int = 0  # the number of the last row
    values: PaneValues | None = None  # those that the rows have; None: they must be written again
    count: int = 0  # of the values in the rows
    mark: Mark | None = None  # where the values end that the rows have

    def keys_from(self, first: int) -> Iterator[bytes]:
        return (_key(self.number, row) for row in range(first, self.last + 1))


def _key(number: int, row: int) -> bytes:
    return _ENTRY_PREFIX + _KEY.pack(number, row)


class PaneRows(Generic[_T]):
    """Knows which entries have changed since the last checkpoint. An entry is what is kept of a key in a window.

    A checkpoint writes only what has changed: the fields of an entry, and a row with the values that were added. So it
    costs the same, however many entries and values there are. Only the loop's thread uses it.
    """

    def __init__(self) -> None:
        self._changed: dict[_T, Any] = {}
        self._rows: dict[_T, _Rows] = {}
        self._gone: list[_Rows] = []
        self._number = 0  # of the latest entry

    def __len__(self) -> int:
        return len(self._rows)

    def change(self, entry: _T, of: Any = None) -> None:
        """Note that an entry has changed. ``of`` is passed on to the function that returns its fields."""
        self._changed[entry] = of

    def rewrite_values(self, entry: _T) -> None:
        """Note that an entry's values changed in another way than by new ones at their end."""
        if (rows := self._rows.get(entry)) is not None:
            rows.values = None

    def drop(self, entry: _T) -> None:
        """Note that an entry is gone."""
        self._changed.pop(entry, None)
        if (rows := self._rows.pop(entry, None)) is not None:
            self._gone.append(rows)

    def save(self, changes: Changes, owner: str, fields: Callable[[_T, Any], tuple[Any, ...]]) -> None:
        """Write what has changed. ``fields`` returns what to keep of an entry besides its values, for ``marshal``."""
        for rows in self._gone:
            for key in rows.keys_from(0):
                changes.remove(owner, key)
        self._gone.clear()
        for entry, of in self._changed.items():
            rows = self._rows.get(entry)
            if rows is None:
                self._number += 1
                rows = self._rows[entry] = _Rows(self._number)
            if (row := marshal.dumps(fields(entry, of), MARSHAL_VERSION)) != rows.fields:
                changes.put(owner, _key(rows.number, 0), row)
                rows.fields = row
            self._save_values(rows, entry.values, changes, owner)
        self._changed.clear()

    def _save_values(self, rows: _Rows, values: PaneValues, changes: Changes, owner: str) -> None:
        if rows.values is not values:
            for key in rows.keys_from(1):
                changes.remove(owner, key)
            rows.values, rows.last, rows.count, rows.mark = values, 0, 0, None
        count = len(values) - rows.count
        if not count:
            return
        for piece in pieces(values.since(rows.mark)):
            rows.last += 1
            changes.put(owner, _key(rows.number, rows.last), marshal.dumps((count, piece)))
            count = 0  # all are counted in the first row
        rows.count, rows.mark = len(values), values.mark()

    def restore(
        self,
        saved: Iterable[tuple[bytes, bytes]],
        restored: Callable[[tuple[Any, ...]], _T],
        restore_other: Callable[[bytes, bytes], None],
    ) -> Iterator[int]:
        """Take over the rows of a checkpoint, in the order of their keys.

        ``restored`` makes an entry of its fields. ``restore_other`` gets keys and values of rows that belong to no
        entry. Yields often: how much memory the values take that were added since it yielded last.
        """
        values: PaneValues | None = None  # of the entry whose rows come now
        rows = _Rows(0)
        load, unpack, prefix = marshal.loads, _KEY.unpack_from, len(_ENTRY_PREFIX)
        added = 0
        for key, value in saved:
            if not key.startswith(_ENTRY_PREFIX):
                restore_other(key, value)
                continue
            number, row = unpack(key, prefix)
            if not row:
                if values is not None:
                    rows.mark = values.mark()
                if added >= _YIELD_BYTES:
                    yield added
                    added = 0
                entry = restored(load(value))
                values = entry.values
                rows = self._rows[entry] = _Rows(number, value, 0, values)
                self._number = number
                continue
            assert values is not None, "found values without their entry"
            count, data = load(value)
            added += values.append_joined(data, count)
            rows.last = row
            rows.count += count
            if added >= _YIELD_BYTES:
                yield added
                added = 0
        if values is not None:
            rows.mark = values.mark()
        yield added
