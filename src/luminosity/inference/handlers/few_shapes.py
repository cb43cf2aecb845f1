"""Batches of arrays, padded to few different shapes: a compiled model is compiled again for every new shape."""

from __future__ import annotations

from collections.abc import Callable, Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from luminosity.inference.handlers import padding
from luminosity.inference.handlers.columns import Array, Column, Columns, lengths, pad_ragged, to_numpy, to_tree

__all__ = ["Padded", "Padding"]


@dataclass(frozen=True)
class Padded:
    """A batch whose last rows may be padding."""

    values: Any
    """An array, or a dict or tuple of arrays, as the examples are."""
    mask: Any
    """True for examples: of shape (rows,), or (rows, length) for ragged arrays; None unless requested."""
    rows: int
    """The number of examples."""
    padded_rows: int
    """The number of rows including padding."""

    @property
    def nbytes(self) -> int:
        """The size of the values in bytes."""
        values = self.values
        arrays = values.values() if isinstance(values, dict) else values if isinstance(values, tuple) else (values,)
        return sum(array.nbytes for array in arrays)


@dataclass(frozen=True)
class Padding:
    """Settings of padding. Lengths default to powers of two, rows to powers of two and the values halfway between them.

    >>> from luminosity.inference.handlers.columns import to_columns
    >>> batch = Padding().pad(to_columns([[7], [8, 9, 9]], ragged=True), masked=True)
    >>> batch.values.tolist(), batch.mask.tolist()[0], batch.rows
    ([[7, 0, 0, 0], [8, 9, 9, 0]], [True, False, False, False], 2)
    """

    rows: Sequence[int] | None = None
    lengths: Sequence[int] | None = None
    value: float = 0

    def __post_init__(self) -> None:
        for option, given in (("rows", self.rows), ("lengths", self.lengths)):
            if given is not None:
                padding.check_sizes(given, option)

    def pad(
        self, columns: Columns, masked: bool = False, convert: Callable[[Array], Array] = lambda values: values
    ) -> Padded:
        """Return the examples as one batch; ``convert`` changes the type of the numbers before they are padded."""
        count, found = len(columns), lengths(columns)
        rows = padding.next_half_step(count) if self.rows is None else padding.next_of(self.rows, count)
        length = 0 if found is None else self._padded_length(int(found.max(initial=0)))

        def padded(column: Column) -> Array:
            is_ragged = pa.types.is_large_list(column.type)
            values = pad_ragged(column, length, self.value) if is_ragged else to_numpy(column)
            return _with_rows(convert(values), rows, self.value)

        mask = None
        if masked:
            here = np.ones(count, bool) if found is None else np.arange(length) < found[:, None]
            mask = _with_rows(here, rows, False)
        return Padded(to_tree(columns, padded), mask, count, rows)

    def _padded_length(self, needed: int) -> int:
        return padding.next_power(needed) if self.lengths is None else padding.next_of(self.lengths, needed)


def _with_rows(values: Array, rows: int, value: float) -> Array:
    if len(values) == rows:
        return values
    padded = np.full((rows, *values.shape[1:]), value, values.dtype)
    padded[: len(values)] = values
    return padded
