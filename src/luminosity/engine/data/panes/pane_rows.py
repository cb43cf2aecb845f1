"""Open windows: what is kept of each key and window until its panes fire, and its rows in a checkpoint."""

from __future__ import annotations

import marshal
import struct
from abc import ABC, abstractmethod
from collections.abc import Callable, Iterable, Iterator
from dataclasses import dataclass
from typing import Any, Generic, Protocol, TypeVar

from apache_beam.transforms import trigger
from apache_beam.transforms.core import Windowing
from apache_beam.transforms.timeutil import TimestampCombinerImpl
from apache_beam.transforms.window import TimestampCombiner
from apache_beam.utils.windowed_value import WindowedValue

from luminosity.engine.data.event_time import MIN, Holds
from luminosity.engine.data.panes.pane_values import ENTRY_BYTES, Mark, PaneValues, spill_values
from luminosity.engine.data.saved_rows import MARSHAL_VERSION, Changes, SingleRow
from luminosity.engine.plan.codecs import ElementCodec
from luminosity.engine.spill.files import pieces

__all__ = ["TIME_KEY", "PaneRows", "Panes"]

TIME_KEY = b"t"  # of the row with the watermarks of panes, which comes before those of entries
_ENTRY_PREFIX = b"v"  # of the keys of entries' rows
_ROWS_BYTES = 500  # that Python needs for what is known of an entry's rows
_YIELD_BYTES = 64 << 10  # of restored values, before memory is looked at
_KEY = struct.Struct(">QI")  # the number of the entry, and of its row


class _Entry(Protocol):
    values: PaneValues
    hold: int | None  # the timestamp at which it holds the watermark back

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


class Panes(ABC, Generic[_T]):
    """Decides which values of a key come out when. Only the loop's thread uses it."""

    def __init__(self, windowing: Windowing) -> None:
        combiner: Any = windowing.timestamp_combiner
        self._windowing = windowing
        self._combiner: TimestampCombinerImpl = TimestampCombiner.get_impl(combiner, windowing.windowfn)
        self._keeps_times = combiner != TimestampCombiner.OUTPUT_AT_EOW
        self._accumulates = windowing.accumulation_mode == trigger.AccumulationMode.ACCUMULATING
        self._holds = Holds()
        self._watermark = self.output_watermark = MIN
        self.memory_bytes = 0
        self._entry_bytes = ENTRY_BYTES
        self._rows: PaneRows[_T] | None = None  # if the run is saved
        self._time = SingleRow(TIME_KEY)
        self._codec: ElementCodec | None = None

    @property
    @abstractmethod
    def is_empty(self) -> bool:
        """Whether no key has an open window."""

    @property
    def earliest(self) -> int:
        """The earliest timestamp that a pane may have, in microseconds."""
        return self._holds.minimum

    @abstractmethod
    def add(self, key: bytes, values: list[WindowedValue]) -> Iterator[tuple[bytes, WindowedValue]]:
        """Add values of a key, in windows that have not expired, and yield the panes that fire at once."""

    @abstractmethod
    def advance(self, watermark: int) -> Iterator[tuple[bytes, WindowedValue] | None]:
        """Move event time to ``watermark`` and processing time to the clock's, and yield the panes that fire.

        Yields None between panes if there is much to do, so that you can continue later. Add nothing in between.
        """

    def next_fire(self) -> int | None:
        """Return when the next processing-time trigger fires, in microseconds since 1970, or None if none is set."""
        return None

    def has_due(self) -> bool:
        """Return whether a late element has set a timer for a time that has passed: fire it with :meth:`advance`."""
        return False

    def settle(self) -> None:
        """Move the watermark of the output as far as the panes that are to come allow."""
        self.output_watermark = max(self.output_watermark, min(self._watermark, self._holds.minimum))

    def spill(self, folder: str, wanted: int) -> tuple[int, int]:
        """Move values to disk, those of the windows that end last first. Returns the bytes freed and written."""
        freed, written = spill_values((entry.values for entry in self._last_first()), folder, wanted)
        self.memory_bytes -= freed
        return freed, written

    @abstractmethod
    def _last_first(self) -> Iterable[_T]:
        """Return all entries, those of the windows that end last first."""

    def track(self, codec: ElementCodec) -> None:
        """Note from now on what changes between two checkpoints. ``codec`` encodes windows."""
        self._rows = PaneRows()
        self._codec = codec
        self._entry_bytes += _ROWS_BYTES

    def save(self, changes: Changes, owner: str) -> None:
        """Write what has changed since the last checkpoint. Call it when nothing is left of :meth:`advance`."""
        assert self._rows is not None
        self._time.save((self._watermark, self.output_watermark), changes, owner)
        self._rows.save(changes, owner, self._fields)

    def restore(self, saved: Iterable[tuple[bytes, bytes]]) -> Iterator[None]:
        """Take over the rows of a checkpoint, in the order of their keys, after :meth:`track`.

        Yields often, so that you can look at the memory. Timers of processing time that are due by now fire with the
        next :meth:`advance`.
        """
        assert self._rows is not None
        for added in self._rows.restore(saved, self._restored, self._restore_shared):
            self.memory_bytes += added
            yield None

    def _restore_shared(self, key: bytes, value: bytes) -> None:
        """Take over a row that belongs to no entry."""
        if key == TIME_KEY:
            self._watermark, self.output_watermark = self._time.restore(value)

    @abstractmethod
    def _fields(self, entry: _T, of: Any) -> tuple[Any, ...]:
        """Return what a checkpoint keeps of an entry besides its values."""

    @abstractmethod
    def _restored(self, fields: tuple[Any, ...]) -> _T:
        """Return the entry with these fields, once it is among the open windows."""

    def release(self) -> None:
        """Drop all windows."""
        for entry in self._last_first():
            entry.values.release()
        self._clear()
        self.memory_bytes = 0

    @abstractmethod
    def _clear(self) -> None:
        """Forget all windows, whose values are released."""

    def _close(self, key: bytes, entry: _T) -> None:
        """Drop the values of an entry, its hold and its rows."""
        self._set_hold(entry, None)
        if self._rows is not None:
            self._rows.drop(entry)
        self.memory_bytes -= self._entry_bytes + len(key) + entry.values.memory_bytes
        entry.values.release()

    def _set_hold(self, entry: _T, hold: int | None) -> None:
        if hold != entry.hold:
            if entry.hold is not None:
                self._holds.remove(entry.hold)
            if hold is not None:
                self._holds.add(hold)
            entry.hold = hold
