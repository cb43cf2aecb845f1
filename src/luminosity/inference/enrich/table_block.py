"""``TableBlock``: rows of a table, as they move between the steps of Enrich."""

from __future__ import annotations

import pickle
from collections.abc import Mapping
from dataclasses import dataclass, field, replace
from typing import Any

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from apache_beam import coders

from luminosity._shared.text import shorten
from luminosity.inference.blocks import Block, Indices, size
from luminosity.inference.steps.messages import BlockCoder
from luminosity.tables.coder import RecordBatchCoder

__all__ = ["DELETED", "Letter", "PreparedRows", "TableBlock"]

DELETED = "_deleted"
"""A column that marks deleted rows: models skip them, stores delete them."""
_ROW_CHARACTERS = 100  # how much of a row an error message shows

_TABLES = RecordBatchCoder()


@dataclass(frozen=True)
class Letter:
    """The model that failed on a row, and the reason."""

    model: str
    reason: str


@dataclass(frozen=True)
class PreparedRows:
    """The examples of one model, made from rows of a table."""

    places: Indices
    """The indices of the rows."""
    block: Block
    costs: npt.NDArray[Any]
    weights: npt.NDArray[Any] | None
    seconds: float = 0.0
    """The time that preparing took, or 0 if it is counted for another model."""


@dataclass(frozen=True)
class TableBlock:
    """Rows of a table, with the columns that they have so far."""

    table: pa.RecordBatch
    own: int
    """The number of columns that the table had before Enrich."""
    start: int = 0
    """The index of its first row in the batch that it was cut from."""
    prepared: Mapping[str, PreparedRows] = field(default_factory=dict[str, PreparedRows])
    """Prepared examples by the name of the new column."""
    failed: Mapping[int, Letter] = field(default_factory=dict[int, Letter])
    """Rows that failed, by index; no further model sees them."""

    def luminosity_user_data(self) -> pa.RecordBatch:
        """Return the columns that the user's table had, for error messages."""
        return self.table.select(self.table.schema.names[: self.own])

    def seen(self) -> npt.NDArray[np.bool_]:
        """Return a mask of the rows that models see: neither deleted nor failed."""
        seen = np.ones(self.table.num_rows, np.bool_)
        if DELETED in self.table.schema.names:
            seen = ~self.table.column(DELETED).fill_null(False).to_numpy(zero_copy_only=False)
        seen[list(self.failed)] = False
        return seen

    def with_columns(self, columns: Mapping[str, Any], failed: Mapping[int, Letter]) -> TableBlock:
        """Return the block with new columns and failed rows added."""
        table = self.table
        for name, column in columns.items():
            table = table.append_column(name, column)
        left = {name: rows for name, rows in self.prepared.items() if name not in columns}
        return replace(self, table=table, prepared=left, failed={**self.failed, **failed})

    def row(self, place: int) -> str:
        """Describe a row for an error message: its index and the beginning of its values."""
        values = {name: each[0] for name, each in self.table.slice(place, 1).to_pydict().items()}
        text = ", ".join(f"{name}={_begin(value)}" for name, value in values.items())
        return f"row {self.start + place} of its batch ({shorten(text, _ROW_CHARACTERS)})"


def _begin(value: Any) -> str:
    return repr(value[:_ROW_CHARACTERS] if isinstance(value, str | bytes | list) else value)


class TableBlockCoder(BlockCoder):
    """Encodes a block with pickle, but its table with Arrow: the pickle of a slice holds the whole table."""

    def encode(self, value: TableBlock) -> bytes:
        """Return the pickle of a block, with its table in Arrow's format."""
        whole = replace(value, table=_TABLES.encode(value.table))  # type: ignore[arg-type]
        return pickle.dumps(whole, pickle.HIGHEST_PROTOCOL)

    def decode(self, encoded: bytes) -> TableBlock:
        """Return the block of a pickle that ``encode`` made."""
        whole = pickle.loads(encoded)
        return replace(whole, table=_TABLES.decode(whole.table))

    def estimate_size(self, value: TableBlock) -> int:
        """Return the bytes of the table and of the prepared examples."""
        return int(value.table.nbytes) + sum(size(rows.block) for rows in value.prepared.values())


coders.registry.register_coder(TableBlock, TableBlockCoder)
