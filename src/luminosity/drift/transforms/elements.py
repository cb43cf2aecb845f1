"""Reads the elements of a pipeline, vectors, matrices or record batches, and gathers their rows by key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam.transforms.window import GlobalWindows, WindowedValue

from luminosity._shared.text import list_some, shorten
from luminosity.drift.rows import as_floats, is_number
from luminosity.drift.sums.bins import hash_ids
from luminosity.drift.transforms.columns import Columns, column_of, matrix_of
from luminosity.drift.transforms.summary import HashedRows, by_width
from luminosity.errors import DriftError

__all__ = ["Gather", "Reader"]

_SHOWN_NUMBERS = 4  # numbers of a row in a message
_SHOWN_COLUMNS = 20  # names of columns in a message


@dataclass(frozen=True)
class Reader:
    """Turns elements into rows by key.

    Elements are vectors, matrices of rows, or, with ``column``, record batches. ``keyed`` elements are pairs of a key
    and one of these; ``by`` names a column of keys. ``seed`` is the seed of the rows' hashes.
    """

    column: Columns | None = None
    id: str | None = None
    by: str | None = None
    keyed: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("id", "by"):
            if getattr(self, name) is not None and self.column is None:
                raise DriftError(
                    f"found {name}={getattr(self, name)!r} without column=", fix="pass column=, the column of vectors"
                )
        if self.by is not None and self.keyed:
            raise DriftError(f"found by={self.by!r} and keyed=True, expected one of them: each says what the key is")

    @property
    def key_name(self) -> str | None:
        """The name of keys in messages, or None if there are no keys."""
        return "key" if self.keyed else self.by

    @property
    def columns(self) -> list[str]:
        """All columns that are read from record batches."""
        vectors = [self.column] if isinstance(self.column, str) else list(self.column or [])
        return [*vectors, *(name for name in (self.id, self.by) if name is not None)]

    def parted(self, element: Any) -> tuple[Any, Any]:
        """Return the key of an element, or None, and its rows: a record batch or a matrix of numbers."""
        key, value = self._pair(element) if self.keyed else (None, element)
        if isinstance(value, pa.RecordBatch):
            if self.column is None:
                raise DriftError(
                    f"found a table with the columns {list_some(value.schema.names, _SHOWN_COLUMNS)}, but no column=",
                    fix="pass column=, the column of vectors",
                )
            return key, value
        if self.column is not None:
            raise DriftError(
                f"found an element of type {type(value).__name__}, expected a pyarrow.RecordBatch because of "
                f"column={self.column!r}",
                fix="use TableFromRows() to turn dicts, Beam Rows and dataclasses into record batches",
            )
        return key, _matrix(value)

    def of_table(self, batch: pa.RecordBatch) -> Iterator[tuple[Any, HashedRows]]:
        """Yield the rows of each key in the column ``by``; without it, all rows for the key None."""
        assert self.column is not None
        matrix, wrong = matrix_of(batch, self.column)
        matrix, finite = as_floats(matrix), np.isfinite(matrix).all(axis=1)
        for place in np.flatnonzero(~finite).tolist():
            wrong.setdefault(place, "has NaN, null or infinity")
        wrong = {place: f"{what} in column {self.column!r}" for place, what in wrong.items()}
        ids = None if self.id is None else self._ids(batch, wrong)
        for key, places in self._by_key(batch):
            good = np.array([place for place in places if place not in wrong], dtype=np.int64) if wrong else places
            bad = [place for place in places if place in wrong] if wrong else []
            rows = matrix[good]
            found = HashedRows(self._hashes(rows, None if ids is None else ids[good]), rows)
            if bad:
                names = (self._row_name(ids, matrix, place) for place in bad)
                faults = (f"{name} {wrong[place]}" for name, place in zip(names, bad, strict=True))
                found = replace(found, bad=len(bad), fault=min(faults))
            yield key, found

    def of_matrices(self, matrices: Sequence[Any]) -> list[HashedRows]:
        """Return the rows of the matrices, one ``HashedRows`` for each width."""
        alike: dict[tuple[int, Any], list[Any]] = {}
        for matrix in matrices:
            alike.setdefault((matrix.shape[1], matrix.dtype), []).append(matrix)
        return by_width(self._of_matrix(np.concatenate(some)) for some in alike.values())

    def _of_matrix(self, matrix: Any) -> HashedRows:
        good = np.isfinite(matrix).all(axis=1)
        found = HashedRows(self._hashes(matrix[good], None), matrix[good])
        if good.all():
            return found
        faults = (
            f"{self._row_name(None, matrix, place)} has NaN, null or infinity"
            for place in np.flatnonzero(~good).tolist()
        )
        return replace(found, bad=int((~good).sum()), fault=min(faults))

    def _by_key(self, batch: pa.RecordBatch) -> Iterator[tuple[Any, Any]]:
        if self.by is None:
            yield None, np.arange(batch.num_rows)
            return
        column = column_of(batch, self.by)
        if not _can_be_a_key(column.type):
            raise DriftError(
                f"the column {self.by!r} holds {column.type}, expected texts or numbers as keys", fix="cast it"
            )
        encoded = column.dictionary_encode(null_encoding="encode")
        indices = encoded.indices.to_numpy(zero_copy_only=False)
        order = np.argsort(indices, kind="stable")
        keys = encoded.dictionary.to_pylist()
        starts = np.searchsorted(indices[order], np.arange(len(keys) + 1))
        for number, key in enumerate(keys):
            yield key, order[starts[number] : starts[number + 1]]

    def _ids(self, batch: pa.RecordBatch, wrong: dict[int, str]) -> Any:
        """Return the ids of rows. Rows without an id are added to ``wrong``."""
        assert self.id is not None
        column = column_of(batch, self.id)
        if not column.null_count:
            return column.to_numpy(zero_copy_only=False)
        for place in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)).tolist():
            wrong[place] = f"has no id in column {self.id!r}"
        ids = np.empty(len(column), dtype=object)  # to_numpy() would turn numbers into floats because of nulls.
        ids[:] = column.to_pylist()
        return ids

    def _hashes(self, rows: Any, ids: Any) -> Any:
        if ids is None:
            ids = np.empty(len(rows), dtype=object)  # An array of bytes would drop zeros at the end.
            ids[:] = [row.tobytes() for row in rows]
        return hash_ids(ids, self.seed)

    def _row_name(self, ids: Any, matrix: Any, place: int) -> str:
        if ids is not None and ids[place] is not None:
            value = ids[place]
            return f"the row with {self.id}={value.item() if isinstance(value, np.generic) else value!r}"
        numbers = ", ".join(format(number, ".4g") for number in matrix[place][:_SHOWN_NUMBERS])
        return f"the row [{numbers}{', …' if matrix.shape[1] > _SHOWN_NUMBERS else ''}]"

    def _pair(self, element: Any) -> tuple[Any, Any]:
        if isinstance(element, tuple) and len(element) == 2:
            key, value = element
            return (key.item() if isinstance(key, np.generic) else key), value  # Beam groups by plain values only.
        raise DriftError(
            f"found an element of type {type(element).__name__}, expected a pair of a key and a vector: keyed=True"
        )


def _can_be_a_key(kind: pa.DataType) -> bool:
    """Return whether every runner can group by values of this type."""
    of = pa.types
    text = of.is_string(kind) or of.is_large_string(kind) or of.is_binary(kind)
    return text or of.is_integer(kind) or of.is_floating(kind) or of.is_boolean(kind) or of.is_null(kind)


def _is_number_or_none(value: Any) -> bool:
    return value is None or isinstance(value, (int, float, np.number))


def _matrix(value: Any) -> Any:
    try:
        array = np.asarray(value)
    except ValueError:
        array = np.asarray("ragged")
    if array.dtype == object and array.ndim <= 2 and all(_is_number_or_none(each) for each in array.flat):
        array = array.astype(np.float64)  # None becomes NaN, which is reported as a fault of its row.
    if not is_number(array.dtype) or array.ndim > 2:
        raise DriftError(
            f"found an element of type {type(value).__name__} that is not a vector: {shorten(str(value), 100)}, "
            "expected a vector of numbers, a matrix of rows, or with column= a pyarrow.RecordBatch",
            fix="pass keyed=True for pairs of a key and a vector" if isinstance(value, tuple) else None,
        )
    return as_floats(array.reshape(1, -1) if array.ndim < 2 else array)


_ELEMENT_BYTES = 8 << 20  # rows of an element
_HELD_BYTES = 32 << 20  # rows that are held until they are passed on


class Gather(beam.PTransform[Any, Any]):
    """Turns elements into pairs of a key and ``HashedRows``.

    Without keys there is a pair even if there are no rows, so that the test can report that.
    """

    def __init__(self, reader: Reader) -> None:
        super().__init__()
        self._reader = reader

    def expand(self, input_or_inputs: Any) -> Any:
        """Gather rows by key, and add a pair without rows, unless there are keys or windows."""
        kind = tuple[Any, HashedRows]
        rows = input_or_inputs | "Gather" >> beam.ParDo(_GatherDoFn(self._reader)).with_output_types(kind)
        if self._reader.key_name is not None or not isinstance(rows.windowing.windowfn, GlobalWindows):
            return rows
        nothing = HashedRows(np.empty(0, dtype=np.uint64), np.empty((0, 0)))
        empty = rows.pipeline | "NoRows" >> beam.Create([(None, nothing)]).with_output_types(kind)
        return (rows, empty) | "OrNoRows" >> beam.Flatten()


@dataclass
class _Held:
    """The rows of one key and window. ``matrices`` are hashed when they are passed on."""

    timestamp: Any
    hashed: list[HashedRows] = field(default_factory=list[HashedRows])
    matrices: list[Any] = field(default_factory=list[Any])


class _GatherDoFn(beam.DoFn):
    """Rows of different windows are never put together, and none are held beyond their bundle."""

    def __init__(self, reader: Reader) -> None:
        self._reader = reader
        self._held: dict[tuple[Any, Any], _Held] = {}
        self._bytes = 0

    def start_bundle(self) -> None:
        self._held, self._bytes = {}, 0

    def process(
        self, element: Any, timestamp: Any = beam.DoFn.TimestampParam, window: Any = beam.DoFn.WindowParam
    ) -> Iterator[WindowedValue]:
        key, rows = self._reader.parted(element)
        if isinstance(rows, pa.RecordBatch):
            for of_row, hashed in self._reader.of_table(rows):
                self._hold(of_row if key is None else key, window, timestamp).hashed.append(hashed)
                self._bytes += hashed.rows.nbytes
        else:
            self._hold(key, window, timestamp).matrices.append(rows)
            self._bytes += rows.nbytes
        if self._bytes > _HELD_BYTES:
            yield from self.finish_bundle()

    def finish_bundle(self) -> Iterator[WindowedValue]:  # type: ignore[override]  # Beam's annotation says None; it accepts these.
        for (key, window), held in self._held.items():
            for hashed in by_width([*held.hashed, *self._reader.of_matrices(held.matrices)]):
                for piece in hashed.pieces(_ELEMENT_BYTES):
                    yield WindowedValue((key, piece), held.timestamp, (window,))
        self.start_bundle()

    def _hold(self, key: Any, window: Any, timestamp: Any) -> _Held:
        held = self._held.setdefault((key, window), _Held(timestamp))
        held.timestamp = min(held.timestamp, timestamp)
        return held
