"""Rows whose inputs equal those of an earlier row: the model computes the first, the others get its prediction."""

from __future__ import annotations

import hashlib
from collections import OrderedDict
from collections.abc import Hashable, Sequence
from dataclasses import dataclass, field
from typing import Any

import numpy as np
import pyarrow as pa

from luminosity.inference.blocks import Block
from luminosity.inference.enrich.column import Column, decoded
from luminosity.inference.enrich.table_steps import PreparedRows

__all__ = ["First", "Repeats"]

_MOST_KEPT = 4_096  # inputs of a column in a worker: some megabytes of vectors
_DIGEST_OF = 64  # bytes or characters of an input, from which its digest is shorter
_DIGEST_BYTES = 16


@dataclass(eq=False)
class First:
    """A row that the model computes or has computed, and the rows that wait for it."""

    lane: Any
    """The entered lane that computes it."""
    followers: list[tuple[Any, int]] = field(default_factory=list[tuple[Any, int]])
    """The waiting blocks and the places of their rows."""
    values: Block | None = None
    """The predictions of its batch; None until they are there."""
    place: int = 0
    model_id: str | None = None
    example: Any = None

    @property
    def is_done(self) -> bool:
        """Whether its prediction is there."""
        return self.values is not None


class Repeats:
    """Remembers the last inputs of a column's model in this worker. Belongs to one step object, as its lanes do.

    Inputs are texts, bytes, integers, booleans or times. Vectors and floats are seldom equal, and are not compared.
    """

    def __init__(self, column: Column) -> None:
        self._names = column.needed  # functions around a model may look at the key, too
        self._firsts: OrderedDict[Hashable, First] = OrderedDict()

    def forget_unfinished(self) -> None:
        """Forget the rows that were being computed: their bundle has failed."""
        for key in [key for key, first in self._firsts.items() if not first.is_done]:
            del self._firsts[key]

    def split(
        self, table: pa.RecordBatch, rows: PreparedRows, lane: Any, waiting: Any
    ) -> tuple[PreparedRows, Sequence[First], list[tuple[First, int]]]:
        """Return the rows to compute, their entries, and the rows whose prediction is there, with their places.

        Rows of which an equal one is being computed become followers of that row, for the block ``waiting``.
        """
        keys = self._keys(table, rows)
        if keys is None:
            return rows, (), []
        new: list[int] = []
        firsts: list[First] = []
        done: list[tuple[First, int]] = []
        for number, key in enumerate(keys):
            first = self._firsts.get((lane, key))
            if first is None:
                first = self._firsts[lane, key] = First(lane, example=rows.examples[number] if rows.examples else None)
                new.append(number)
                firsts.append(first)
            elif first.is_done:
                done.append((first, int(rows.places[number])))
            else:
                first.followers.append((waiting, int(rows.places[number])))
        while len(self._firsts) > _MOST_KEPT:
            self._firsts.popitem(last=False)
        return rows if len(new) == len(rows.places) else rows.part(np.array(new, np.int64)), firsts, done

    def drop(self, failed: Sequence[First]) -> None:
        """Forget rows on which the model has failed: an equal one is computed again."""
        gone = set(map(id, failed))
        for key in [key for key, first in self._firsts.items() if id(first) in gone]:
            del self._firsts[key]

    def _keys(self, table: pa.RecordBatch, rows: PreparedRows) -> Sequence[Hashable] | None:
        columns = [decoded(table.column(name)) for name in self._names]
        kinds = tuple(column.type for column in columns)
        if not all(map(_is_comparable, kinds)):
            return None
        places = pa.array(rows.places)
        values = [map(_shortened, column.take(places).to_pylist()) for column in columns]
        return [(kinds, *each) for each in zip(*values, strict=True)]


def _is_comparable(kind: pa.DataType) -> bool:
    types = pa.types
    return (
        types.is_string(kind)
        or types.is_large_string(kind)
        or types.is_binary(kind)
        or types.is_large_binary(kind)
        or types.is_integer(kind)
        or types.is_boolean(kind)
        or types.is_temporal(kind)
    )


def _shortened(value: Any) -> Any:
    """Return a long text or bytes as a digest, so that they need not be kept."""
    if not isinstance(value, str | bytes) or len(value) < _DIGEST_OF:
        return value
    data = value.encode("utf-8", "surrogatepass") if isinstance(value, str) else value
    return hashlib.blake2b(data, digest_size=_DIGEST_BYTES).digest(), len(value)
