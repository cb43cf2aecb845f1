"""Tables given back: rows with their new columns, and dead letters."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
from apache_beam import pvalue

from luminosity.inference.enrich.messages import TableBlock

__all__ = ["FAILED", "FinishDoFn"]

FAILED = "failed"
MODEL, REASON = "_model", "_reason"


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
