"""The transform that adds ids, computed from what rows contain."""

from __future__ import annotations

import hashlib
import json
import uuid
from collections.abc import Sequence
from typing import Any

import apache_beam as beam
import pyarrow as pa

from luminosity._shared.text import list_some
from luminosity.errors import Fix, InvalidArgument, TableError
from luminosity.tables.map_table import MapTable

__all__ = ["AddRowIds"]

_ID_BYTES = 16  # of a UUID
_SHOWN_COLUMNS = 20  # in a message, which stays readable


class AddRowIds(beam.PTransform[Any, Any]):
    """Adds a column of ids to a table: a UUID for each row, computed from the values of its columns.

    The same values give the same id in every run, so a store that is written again is updated, not extended. Rows with
    the same values have the same id.

    >>> rows = pa.record_batch({"text": ["a", "b", "a"], "score": [1.0, 2.0, 3.0]})
    >>> with beam.Pipeline("FnApiRunner") as pipeline:
    ...     table = pipeline | beam.Create([rows]) | AddRowIds(columns=["text"])
    ...     _ = table | beam.Map(lambda batch: print(batch.schema.names, len(set(batch["id"].to_pylist()))))
    ['text', 'score', 'id'] 2

    Args:
        name: the new column.
        columns: the columns to compute the id from; None takes all. Leave out columns that change from run to run,
            such as the outputs of models.
    """

    def __init__(self, name: str = "id", columns: Sequence[str] | None = None) -> None:
        super().__init__()
        if isinstance(columns, str):
            raise InvalidArgument(f"found columns={columns!r}, expected a list of names, such as [{columns!r}]")
        self._name = name
        self._columns = None if columns is None else list(columns)

    def expand(self, pcoll: Any) -> Any:  # type: ignore[override]
        """Hash the columns of each row, and append the ids as a column."""
        return pcoll | "Hash" >> MapTable(_with_ids, self._name, self._columns)


def _with_ids(batch: Any, name: str, columns: list[str] | None) -> Any:
    names = batch.schema.names
    if name in names:
        raise TableError(f"there is a column {name!r} already", fix=Fix("pass another name="))
    if missing := [column for column in columns or () if column not in names]:
        raise TableError(f"there is no column {missing[0]!r}, expected one of {list_some(names, _SHOWN_COLUMNS)}")
    hashed = batch if columns is None else batch.select([column for column in names if column in columns])
    return batch.append_column(name, pa.array([_row_id(row) for row in hashed.to_pylist()], pa.string()))


def _row_id(row: dict[str, Any]) -> str:
    content = json.dumps(row, sort_keys=True, default=str).encode()
    return str(uuid.UUID(bytes=hashlib.blake2b(content, digest_size=_ID_BYTES).digest()))
