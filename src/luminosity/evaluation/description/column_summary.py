"""The accumulator of a column: what its values have in common, by their kind."""

from __future__ import annotations

from typing import Any, Literal

import numpy as np
import pyarrow as pa
import pyarrow.compute as pc

from luminosity.errors import EvaluationError
from luminosity.evaluation.columns import is_number, is_text
from luminosity.evaluation.description.sketches import DistinctCount, NumberSummary, TopValues
from luminosity.tables.types import is_any_list

__all__ = ["ColumnSummary", "Kind"]

Kind = Literal["numbers", "texts", "booleans", "times", "vectors", "lists", "bytes", "other"]


class ColumnSummary:
    """Collects a column. ``numbers`` summarises numbers, lengths of texts and lists, or norms of vectors."""

    def __init__(self) -> None:
        self.kind: Kind | None = None
        self.types: set[str] = set()
        self.count = 0  # neither null nor NaN
        self.nan = 0
        self.infinite = 0
        self.numbers = NumberSummary()
        self.widths = NumberSummary()  # of vectors
        self.top = TopValues()
        self.distinct = DistinctCount()

    def add(self, name: str, values: Any) -> None:
        """Add the values of an Arrow array."""
        if pa.types.is_null(values.type):
            return
        self._set_kind(name, _kind_of(values.type))
        self.types.add(str(values.type))
        values = values.drop_null()
        self.count += len(values)
        if len(values):
            getattr(self, f"_add_{self.kind}")(values)

    def merge(self, name: str, other: ColumnSummary) -> None:
        """Add what another summary of the same column has collected."""
        if other.kind is not None:
            self._set_kind(name, other.kind)
        self.types |= other.types
        self.count += other.count
        self.nan += other.nan
        self.infinite += other.infinite
        self.numbers.merge(other.numbers)
        self.widths.merge(other.widths)
        self.top.merge(other.top)
        self.distinct.merge(other.distinct)

    def _set_kind(self, name: str, kind: Kind) -> None:
        if self.kind is not None and kind != self.kind:
            both = " and ".join(sorted((kind, self.kind)))
            raise EvaluationError(f"the column {name!r} holds {both}, expected one kind", fix="cast it")
        self.kind = kind

    def _add_numbers(self, values: Any) -> None:
        floats = values.cast(pa.float64(), safe=False).to_numpy(zero_copy_only=False)
        is_finite = np.isfinite(floats)
        if not is_finite.all():
            missing = int(np.isnan(floats).sum())
            self.nan += missing
            self.count -= missing
            self.infinite += int((~is_finite).sum()) - missing
            floats, values = floats[is_finite], values.filter(pa.array(is_finite))
        self.numbers.add(floats)
        self.distinct.add(values)

    def _add_times(self, values: Any) -> None:
        kind = values.type
        if pa.types.is_date(kind):
            values = values.cast(pa.timestamp("s"))
        units = {"s": 1, "ms": 1e3, "us": 1e6, "ns": 1e9}
        ticks = values.cast(pa.int64()) if values.type.bit_width == 64 else values.cast(pa.int32()).cast(pa.int64())
        self.numbers.add(ticks.to_numpy(zero_copy_only=False) / units[values.type.unit])
        self.distinct.add(ticks)

    def _add_texts(self, values: Any) -> None:
        values = values.cast(pa.large_string())
        encoded = values.dictionary_encode()
        self.top.add(values)
        self.distinct.add(encoded.dictionary)
        lengths = pc.call_function("utf8_length", [values])
        self.numbers.add(lengths.to_numpy(zero_copy_only=False).astype(np.float64))

    def _add_booleans(self, values: Any) -> None:
        self.top.add(values)
        self.distinct.add(values)

    def _add_bytes(self, values: Any) -> None:
        values = values.cast(pa.large_binary())
        lengths = pc.call_function("binary_length", [values])
        self.numbers.add(lengths.to_numpy(zero_copy_only=False).astype(np.float64))
        self.distinct.add(values)

    def _add_lists(self, values: Any) -> None:
        self.numbers.add(_lengths(values))

    def _add_vectors(self, values: Any) -> None:
        lengths = _lengths(values)
        self.widths.add(lengths)
        flat = values.flatten().cast(pa.float64()).to_numpy(zero_copy_only=False)
        bounds = np.r_[0, np.cumsum(lengths.astype(np.int64))]
        is_long = lengths > 0
        squares = np.zeros(len(values))
        if is_long.any():
            squares[is_long] = np.add.reduceat(flat * flat, bounds[:-1][is_long])
        norms = np.sqrt(squares)
        is_finite = np.isfinite(norms)
        self.nan += int((~is_finite).sum())
        self.count -= int((~is_finite).sum())
        self.numbers.add(norms[is_finite])

    def _add_other(self, values: Any) -> None:
        """Count only: structs and maps have no common summary."""


def _lengths(values: Any) -> Any:
    lengths = pc.call_function("list_value_length", [values])
    return lengths.to_numpy(zero_copy_only=False).astype(np.float64)


def _kind_of(kind: pa.DataType) -> Kind:
    if is_text(kind):
        return "texts"
    if pa.types.is_boolean(kind):
        return "booleans"
    if is_number(kind):
        return "numbers"
    if pa.types.is_temporal(kind) and "interval" not in str(kind):
        return "times"
    if is_any_list(kind):
        return "vectors" if is_number(kind.value_type) else "lists"
    binary = pa.types.is_binary(kind) or pa.types.is_large_binary(kind) or pa.types.is_fixed_size_binary(kind)
    return "bytes" if binary or str(kind) == "binary_view" else "other"
