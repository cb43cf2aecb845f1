"""Tables taken in: checked, and cut where many workers are to share one."""

from __future__ import annotations

import difflib
from collections.abc import Iterator, Mapping, Sequence
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam import pvalue

from luminosity.inference.enrich.column import Column
from luminosity.inference.enrich.table_block import DELETED, TableBlock

__all__ = ["FAILED", "BeginDoFn", "FinishDoFn"]


_MOST_ROWS = 128
_MOST_BYTES = 4_000_000

FAILED = "failed"
MODEL, REASON = "_model", "_reason"


class BeginDoFn(beam.DoFn):
    def __init__(self, columns: Mapping[str, Column], cuts: bool) -> None:
        self._columns = columns
        self._cuts = cuts
        self._checked: Any = None

    def process(self, table: pa.RecordBatch) -> Iterator[TableBlock]:
        if not isinstance(table, pa.RecordBatch):
            raise TypeError(
                f"found an element of type {type(table).__name__}, expected a pyarrow.RecordBatch; "
                "TableFromRows() makes them of dicts, Beam Rows and dataclasses"
            )
        if table.schema is not self._checked and table.schema != self._checked:
            check_schema(table.schema, self._columns)
            self._checked = table.schema
        if self._cuts:
            for start in range(0, max(table.num_rows, 1), _MOST_ROWS):
                yield from _pieces(table.slice(start, _MOST_ROWS), start)
        else:
            yield TableBlock(table, table.num_columns)


def check_schema(schema: pa.Schema, columns: Mapping[str, Column]) -> None:
    """Whether a table has what models take, and room for what they give."""
    there = list(schema.names)
    taken = [name for name in columns if name in there]
    if taken:
        raise ValueError(
            f"the table has {_listed(taken)} already, expected new names: call the new column otherwise, or rename the "
            f"table's own before; its columns are {_listed(there)}"
        )
    for name, column in columns.items():
        for each in column.names:
            if each not in there and each not in columns:
                near = difflib.get_close_matches(each, [*there, *columns], n=1)
                hint = f"; did you mean {near[0]!r}?" if near else ""
                raise ValueError(
                    f"the column {name!r} takes {each!r}, which is not in the table; it has {_listed(there)}{hint}"
                )
            if there.count(each) > 1:
                raise ValueError(f"the column {name!r} takes {each!r}, and the table has {there.count(each)} of them")
    if DELETED in there and not pa.types.is_boolean(schema.field(DELETED).type):
        raise ValueError(
            f"the column {DELETED!r} holds {schema.field(DELETED).type}, expected bool: it marks deleted rows"
        )


def _pieces(table: pa.RecordBatch, start: int) -> Iterator[TableBlock]:
    """The rows in pieces that are not too large, unless a single row is."""
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
    """A row is either among the good ones, with all columns, or a dead letter, as it came."""

    def __init__(self, names: Sequence[str]) -> None:
        self._names = list(names)

    def process(self, block: TableBlock) -> Iterator[Any]:
        own = block.table.schema.names[: block.own]
        # By number: a table may have two columns of one name, where no model takes them.
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
        # Those of letters that come back are about an earlier try.
        kept = [number for number, name in enumerate(own) if name not in (MODEL, REASON)]
        letters = table.select(kept).take(pa.array(places))
        told = [block.failed[place] for place in places.tolist()]
        letters = letters.append_column(MODEL, pa.array([letter.model for letter in told], pa.string()))
        letters = letters.append_column(REASON, pa.array([letter.reason for letter in told], pa.string()))
        yield pvalue.TaggedOutput(FAILED, letters)
