"""What moves between the steps of Enrich."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from apache_beam import coders

from luminosity.inference.blocks import Block, Indices, size
from luminosity.inference.steps.messages import BlockCoder
from luminosity.tables.coder import RecordBatchCoder

__all__ = ["DELETED", "Letter", "PreparedRows", "TableBlock"]

DELETED = "_deleted"
"""A column that marks rows of which only the key is left: models skip them, stores delete them."""
_ROW_CHARACTERS = 100

_TABLES = RecordBatchCoder()


@dataclass(frozen=True)
class Letter:
    """Why a row has no value of a model."""

    model: str
    reason: str


@dataclass(frozen=True)
class PreparedRows:
    """What one model gets of a table."""

    places: Indices
    """The rows it gets."""
    block: Block
    costs: npt.NDArray[Any]
    weights: npt.NDArray[Any] | None
    seconds: float = 0.0
    """What preparing it took, where nobody else has counted that."""


@dataclass(frozen=True)
class TableBlock:
    """Rows of a table, with the columns that it has so far."""

    table: pa.RecordBatch
    own: int
    """How many of its columns it came with."""
    start: int = 0
    """The number of its first row in the batch that it was cut from."""
    prepared: Mapping[str, PreparedRows] = field(default_factory=dict[str, PreparedRows])
    """For columns to come."""
    failed: Mapping[int, Letter] = field(default_factory=dict[int, Letter])
    """Rows that no model is to see any more."""

    def seen(self) -> npt.NDArray[np.bool_]:
        """For each row, whether models are to see it."""
        seen = np.ones(self.table.num_rows, np.bool_)
        if DELETED in self.table.schema.names:
            seen = ~self.table.column(DELETED).fill_null(False).to_numpy(zero_copy_only=False)
        seen[list(self.failed)] = False
        return seen

    def with_columns(self, columns: Mapping[str, Any], failed: Mapping[int, Letter]) -> TableBlock:
        table = self.table
        for name, column in columns.items():
            table = table.append_column(name, column)
        left = {name: rows for name, rows in self.prepared.items() if name not in columns}
        return replace(self, table=table, prepared=left, failed={**self.failed, **failed})

    def row(self, place: int) -> str:
        """A row in a few words: its number, and how its values begin."""
        values = {name: each[0] for name, each in self.table.slice(place, 1).to_pydict().items()}
        text = ", ".join(f"{name}={_begin(value)}" for name, value in values.items())
        text = text if len(text) <= _ROW_CHARACTERS else text[: _ROW_CHARACTERS - 1] + "…"
        return f"row {self.start + place} of its batch ({text})"


def _begin(value: Any) -> str:
    return repr(value[:_ROW_CHARACTERS] if isinstance(value, str | bytes | list) else value)


class TableBlockCoder(BlockCoder):
    """Pickles, but for the table: of a slice, a pickle would hold all that it was cut from."""

    def encode(self, value: TableBlock) -> bytes:
        whole = replace(value, table=_TABLES.encode(value.table))  # type: ignore[arg-type]
        return pickle.dumps(whole, pickle.HIGHEST_PROTOCOL)

    def decode(self, encoded: bytes) -> TableBlock:
        whole = pickle.loads(encoded)
        return replace(whole, table=_TABLES.decode(whole.table))

    def estimate_size(self, value: TableBlock) -> int:
        return int(value.table.nbytes) + sum(size(rows.block) for rows in value.prepared.values())


coders.registry.register_coder(TableBlock, TableBlockCoder)
