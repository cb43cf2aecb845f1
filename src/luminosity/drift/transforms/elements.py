"""What elements hold, as blocks of rows by key."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from dataclasses import dataclass, replace
from typing import Any

import numpy as np
import pyarrow as pa

from luminosity.drift.rows import as_floats, is_number
from luminosity.drift.sums.bins import hash_ids
from luminosity.drift.transforms.columns import Columns, column_of, matrix_of
from luminosity.drift.transforms.hashed_rows import HashedRows, by_width
from luminosity.errors import DriftError

__all__ = ["Reader"]

_SHOWN_NUMBERS = 4


@dataclass(frozen=True)
class Reader:
    """Elements are record batches, then ``column`` says where the vectors are; or vectors, or matrices of rows.

    ``keyed`` elements are pairs of a key and such a thing. ``seed`` is that of the hashes.
    """

    column: Columns | None = None
    id: str | None = None
    by: str | None = None
    keyed: bool = False
    seed: int = 0

    def __post_init__(self) -> None:
        for name in ("id", "by"):
            if getattr(self, name) is not None and self.column is None:
                raise DriftError(f"Found {name}={getattr(self, name)!r} without column=, which says where vectors are.")
        if self.by is not None and self.keyed:
            raise DriftError(f"Found by={self.by!r} and keyed=True, expected one of them: each says what the key is.")

    @property
    def key_name(self) -> str | None:
        """What keys are called in messages; None: there are none."""
        return "key" if self.keyed else self.by

    @property
    def columns(self) -> list[str]:
        """All that are read."""
        vectors = [self.column] if isinstance(self.column, str) else list(self.column or [])
        return [*vectors, *(name for name in (self.id, self.by) if name is not None)]

    def parted(self, element: Any) -> tuple[Any, Any]:
        """The key, or None, and the rows: a record batch, or a matrix of numbers."""
        key, value = self._pair(element) if self.keyed else (None, element)
        if isinstance(value, pa.RecordBatch):
            if self.column is None:
                raise DriftError(
                    f"Found a table with the columns {', '.join(value.schema.names)}, and no column= that says where "
                    "the vectors are."
                )
            return key, value
        if self.column is not None:
            raise DriftError(
                f"Found an element of type {type(value).__name__}, expected a pyarrow.RecordBatch, since there is "
                f"column={self.column!r}. TableFromRows() makes them of dicts, Beam Rows and dataclasses."
            )
        return key, _matrix(value)

    def of_table(self, batch: pa.RecordBatch) -> Iterator[tuple[Any, HashedRows]]:
        """Blocks by the values of the column ``by``; without it, one for the key None."""
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
            block = HashedRows(self._hashes(rows, None if ids is None else ids[good]), rows)
            if bad:
                names = (self._row_name(ids, matrix, place) for place in bad)
                faults = (f"{name} {wrong[place]}" for name, place in zip(names, bad, strict=True))
                block = replace(block, bad=len(bad), fault=min(faults))
            yield key, block

    def of_matrices(self, matrices: Sequence[Any]) -> list[HashedRows]:
        """One block for each width. The bytes of a row don't depend on those beside it."""
        alike: dict[tuple[int, Any], list[Any]] = {}
        for matrix in matrices:
            alike.setdefault((matrix.shape[1], matrix.dtype), []).append(matrix)
        return by_width(self._of_matrix(np.concatenate(some)) for some in alike.values())

    def _of_matrix(self, matrix: Any) -> HashedRows:
        good = np.isfinite(matrix).all(axis=1)
        block = HashedRows(self._hashes(matrix[good], None), matrix[good])
        if good.all():
            return block
        faults = (
            f"{self._row_name(None, matrix, place)} has NaN, null or infinity"
            for place in np.flatnonzero(~good).tolist()
        )
        return replace(block, bad=int((~good).sum()), fault=min(faults))

    def _by_key(self, batch: pa.RecordBatch) -> Iterator[tuple[Any, Any]]:
        if self.by is None:
            yield None, np.arange(batch.num_rows)
            return
        column = column_of(batch, self.by)
        if not _can_be_a_key(column.type):
            raise DriftError(f"The column {self.by!r} holds {column.type}, expected texts or numbers as keys: cast it.")
        encoded = column.dictionary_encode(null_encoding="encode")
        indices = encoded.indices.to_numpy(zero_copy_only=False)
        order = np.argsort(indices, kind="stable")
        keys = encoded.dictionary.to_pylist()
        starts = np.searchsorted(indices[order], np.arange(len(keys) + 1))
        for number, key in enumerate(keys):
            yield key, order[starts[number] : starts[number + 1]]

    def _ids(self, batch: pa.RecordBatch, wrong: dict[int, str]) -> Any:
        """Rows without one are added to what is wrong."""
        assert self.id is not None
        column = column_of(batch, self.id)
        if not column.null_count:
            return column.to_numpy(zero_copy_only=False)
        for place in np.flatnonzero(column.is_null().to_numpy(zero_copy_only=False)).tolist():
            wrong[place] = f"has no id in column {self.id!r}"
        ids = np.empty(len(column), dtype=object)  # An array of numbers would have lost digits to make room for nulls.
        ids[:] = column.to_pylist()
        return ids

    def _hashes(self, rows: Any, ids: Any) -> Any:
        if ids is None:
            ids = np.empty(len(rows), dtype=object)  # An array of bytes would lose zeros at their ends.
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
            return (key.item() if isinstance(key, np.generic) else key), value  # Beam groups by plain ones alone.
        raise DriftError(
            f"Found an element of type {type(element).__name__}, expected a pair of a key and a vector: keyed=True."
        )


def _can_be_a_key(kind: pa.DataType) -> bool:
    """Beam groups by these whatever the runner."""
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
        array = array.astype(np.float64)  # None becomes NaN: a fault of this row, which is told with the others.
    if not is_number(array.dtype) or array.ndim > 2:
        hint = " For pairs of a key and a vector say keyed=True." if isinstance(value, tuple) else ""
        raise DriftError(
            f"Found an element of type {type(value).__name__} that is no vector: {str(value)[:100]}. Expected a vector "
            f"of numbers, a matrix of rows, or with column= a pyarrow.RecordBatch.{hint}"
        )
    return as_floats(array.reshape(1, -1) if array.ndim < 2 else array)
