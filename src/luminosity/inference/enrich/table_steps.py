"""The blocks of rows that move between the steps of Enrich; the first and the last step: tables to blocks and back."""

from __future__ import annotations

from collections.abc import Hashable, Iterator, Mapping, Sequence
from dataclasses import dataclass, field, replace
from typing import Any

import apache_beam as beam
import numpy as np
import numpy.typing as npt
import pyarrow as pa
from apache_beam import coders, pvalue

from luminosity._shared.text import did_you_mean, shorten
from luminosity.core import WorkerShare
from luminosity.errors import InvalidArgument, InvalidType
from luminosity.inference.adapting.adapt import THE_MODEL
from luminosity.inference.adapting.columnar import takes_names
from luminosity.inference.blocks import Block, Indices, size, take
from luminosity.inference.enrich.column import Column, check_number
from luminosity.inference.enrich.column_models import ColumnModels
from luminosity.inference.steps.messages import BlockCoder
from luminosity.tables.schemas import RecordBatchCoder

__all__ = ["FAILED", "BeginDoFn", "FinishDoFn", "Letter", "PreparedRows", "TableBlock", "check_schema", "rows_of_block"]
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
    model: Hashable = THE_MODEL
    """The name of the model, if each key has its own."""
    keys: Sequence[Hashable] = ()
    """The keys of the rows, if each key has its own model."""
    examples: Sequence[Any] = ()
    """The examples that were prepared, if functions after the model take them."""

    def part(self, places: Indices) -> PreparedRows:
        """Return some of the rows; ``places`` counts them, not the rows of the table."""
        weights = None if self.weights is None else self.weights[places]
        keys, examples = (take(list(each), places) if each else () for each in (self.keys, self.examples))
        return PreparedRows(
            self.places[places],
            take(self.block, places),
            self.costs[places],
            weights,
            self.seconds,
            self.model,
            keys,
            examples,
        )


@dataclass(frozen=True)
class TableBlock:
    """Rows of a table, with the columns that they have so far."""

    table: pa.RecordBatch
    own: int
    """The number of columns that the table had before Enrich."""
    start: int = 0
    """The index of its first row in the batch that it was cut from."""
    prepared: Mapping[str, Sequence[PreparedRows]] = field(default_factory=dict[str, Sequence[PreparedRows]])
    """Prepared examples by the name of the new column, for each of its models."""
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

    def luminosity_parts(self, value: TableBlock) -> list[bytes | memoryview]:
        """Return the encoded block in parts, with its table in Arrow's format."""
        return super().luminosity_parts(replace(value, table=_TABLES.encode(value.table)))  # type: ignore[arg-type]

    def decode(self, encoded: bytes | memoryview) -> TableBlock:
        """Return the block that was encoded."""
        whole = super().decode(encoded)
        return replace(whole, table=_TABLES.decode(whole.table))

    def estimate_size(self, value: TableBlock) -> int:
        """Return the bytes of the table and of the prepared examples."""
        return int(value.table.nbytes) + sum(size(rows.block) for each in value.prepared.values() for rows in each)


coders.registry.register_coder(TableBlock, TableBlockCoder)

_MOST_ROWS = 128  # of a block, so that many workers can share a table
_LEAST_ROWS = 16  # of a block, unless the table is shorter: a block has fixed costs
_FEWEST_ROWS = 4  # of a block of a table that is too short for a larger block in each worker
_BLOCKS_PER_WORKER = 8  # of a short table, so that all workers are done at about the same time
_MOST_BYTES = 4_000_000  # of a block, unless a single row is larger
FAILED = "failed"
MODEL, REASON = "_model", "_reason"


class BeginDoFn(beam.DoFn):
    """Checks tables and cuts them into blocks that several workers can share."""

    def __init__(self, columns: Mapping[str, Column], cuts: bool) -> None:
        self._columns = columns
        self._cuts = cuts
        self._checked: Any = None
        self._rows_seen = 0

    def process(self, table: pa.RecordBatch) -> Iterator[TableBlock]:
        """Check the schema of a table and yield its rows as blocks."""
        if not isinstance(table, pa.RecordBatch):
            raise InvalidType(
                f"found an element of type {type(table).__name__}, expected a pyarrow.RecordBatch",
                fix="use TableFromRows(), which takes dicts, Beam Rows and dataclasses",
            )
        if table.schema is not self._checked and table.schema != self._checked:
            check_schema(table.schema, self._columns)
            self._checked = table.schema
        if self._cuts:
            workers = WorkerShare.current().workers
            # The first rows may be the whole table: each worker gets some of them.
            least = _LEAST_ROWS if self._rows_seen else max(_FEWEST_ROWS, -(-table.num_rows // workers))
            start = 0
            while start < table.num_rows or start == 0:
                count = rows_of_block(self._rows_seen, workers, min(least, _LEAST_ROWS))
                yield from _pieces(table.slice(start, count), start)
                start += count
                self._rows_seen += count
        else:
            yield TableBlock(table, table.num_columns)


def rows_of_block(rows_seen: int, workers: int, least: int = _LEAST_ROWS) -> int:
    """Return how many rows the next block has, after this many rows; ``least`` is the least unless there is one worker.

    How many rows follow is not known. So the first blocks are small, because a short table must have enough blocks for
    all workers, and they grow with the rows so far, because a long table has enough large ones.

    >>> rows_of_block(0, workers=2), rows_of_block(1000, workers=2), rows_of_block(0, workers=1)
    (16, 62, 128)
    """
    if workers == 1:
        return _MOST_ROWS
    return min(max(rows_seen // (_BLOCKS_PER_WORKER * workers), least), _MOST_ROWS)


def check_schema(schema: pa.Schema, columns: Mapping[str, Column]) -> None:
    """Raise if a table lacks a column that a model takes, has one of the wrong type, or already has a new column."""
    there = list(schema.names)
    taken = [name for name in columns if name in there]
    if taken:
        raise InvalidArgument(
            f"the table has {_listed(taken)} already, expected new names; its columns are {_listed(there)}",
            fix="give the new column another name, or rename the table's column",
        )
    for name, column in columns.items():
        for each in column.needed:
            if each not in there and each not in columns:
                raise InvalidArgument(
                    f"the column {name!r} takes {each!r}, which is not in the table; it has {_listed(there)}",
                    fix=did_you_mean(each, [*there, *columns]) or None,
                )
            if there.count(each) > 1:
                raise InvalidArgument(
                    f"the column {name!r} takes {each!r}, of which the table has {there.count(each)}, expected one"
                )
        _check_types(name, column, schema)
    if DELETED in there and not pa.types.is_boolean(schema.field(DELETED).type):
        raise InvalidArgument(
            f"the column {DELETED!r} holds {schema.field(DELETED).type}, expected bool, because it marks deleted rows"
        )


def _check_types(name: str, column: Column, schema: pa.Schema) -> None:
    """Raise if a model can't take the types of its columns. Columns that another model adds are not known yet."""
    if not all(each in schema.names for each in column.names):
        return
    kinds = [schema.field(each).type for each in column.names]
    if isinstance(column.inputs, str):
        example = kinds[0]
    elif isinstance(column.inputs, Mapping) or takes_names(column.handler):
        example = pa.struct(list(zip(column.inputs, kinds, strict=True)))
    else:
        for each, kind in zip(column.names, kinds, strict=True):
            check_number(each, kind)
        example = pa.list_(pa.float64(), len(kinds))
    models = ColumnModels(name, column)
    if models.functions.before:
        return  # Only the functions know what the model gets.
    try:
        for handler in models.handlers:
            handler.check_input_type(example)
    except InvalidType as error:
        takes = " and ".join(map(repr, column.names))
        raise InvalidType(f"the column {name!r} takes {takes}: {error.message}", fix=error.fix) from None


def _pieces(table: pa.RecordBatch, start: int) -> Iterator[TableBlock]:
    """Cut rows into blocks that are not too large, unless a single row is."""
    count = table.num_rows
    if count <= 1 or table.nbytes <= _MOST_BYTES:
        yield TableBlock(table, table.num_columns, start)
        return
    half = count // 2
    yield from _pieces(table.slice(0, half), start)
    yield from _pieces(table.slice(half), start + half)


def _listed(names: list[str]) -> str:
    return ", ".join(map(repr, names)) or "no columns"


class FinishDoFn(beam.DoFn):
    """Emits good rows with all columns, and rows that failed, unchanged, as dead letters."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)

    def process(self, block: TableBlock) -> Iterator[Any]:
        """Yield a table of the good rows, and the failed rows as dead letters, tagged ``FAILED``."""
        own = block.table.schema.names[: block.own]
        # By index: a table may have two columns of one name if no model takes them.
        new = [block.table.schema.get_field_index(name) for name in self._names]
        table = block.table.select([*range(len(own)), *new])
        if not block.failed:
            yield table
            return
        places = np.array(sorted(block.failed))
        good = np.ones(table.num_rows, np.bool_)
        good[places] = False
        if good.any():
            yield table.filter(pa.array(good))
        # Dead letters may be processed again: drop the model and reason of their earlier failure.
        kept = [number for number, name in enumerate(own) if name not in (MODEL, REASON)]
        letters = table.select(kept).take(pa.array(places))
        failures = [block.failed[place] for place in places.tolist()]
        letters = letters.append_column(MODEL, pa.array([letter.model for letter in failures], pa.string()))
        letters = letters.append_column(REASON, pa.array([letter.reason for letter in failures], pa.string()))
        yield pvalue.TaggedOutput(FAILED, letters)
