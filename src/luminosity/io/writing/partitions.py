"""Rows to the folders of their values, column by column."""

from __future__ import annotations

from collections.abc import Iterator, Sequence
from typing import Any
from urllib.parse import quote

import numpy as np
import pyarrow as pa
from pyarrow import compute

__all__ = ["NULL_FOLDER", "partitioned"]

pc: Any = compute  # which makes its functions when it is imported: a type checker sees none

NULL_FOLDER = "__HIVE_DEFAULT_PARTITION__"


def partitioned(batch: pa.RecordBatch, by: Sequence[str]) -> Iterator[tuple[str, pa.RecordBatch]]:
    """The rows of each combination of values, without these columns, and the name of their folder.

    >>> batch = pa.record_batch({"lang": ["en", "de", "en"], "n": [1, 2, 3]})
    >>> [(folder, rows.to_pydict()) for folder, rows in partitioned(batch, ["lang"])]
    [('lang=en', {'n': [1, 3]}), ('lang=de', {'n': [2]})]
    """
    if not by:
        yield "", batch
        return
    codes = np.zeros(batch.num_rows, dtype=np.int64)
    values: list[Any] = []
    for name in by:
        encoded = batch.column(name)
        if not isinstance(encoded, pa.DictionaryArray):
            encoded = pc.dictionary_encode(encoded)
        # The last number is for nulls.
        numbers = pc.fill_null(encoded.indices.cast(pa.int64()), len(encoded.dictionary)).to_numpy()
        _, codes = np.unique(codes * (len(encoded.dictionary) + 1) + numbers, return_inverse=True)
        values.append((name, encoded.dictionary, numbers))
    rest = batch.drop_columns(list(by))
    order = np.argsort(codes, kind="stable")
    starts = np.flatnonzero(np.diff(codes[order], prepend=-1))
    for rows in np.split(order, starts[1:]) if len(order) else []:
        # A copy: a view of few rows would keep the whole batch in memory for as long as they wait.
        yield "/".join(_folder(name, texts, numbers[rows[0]]) for name, texts, numbers in values), rest.take(rows)


def _folder(name: str, values: Any, number: int) -> str:
    value = values[int(number)].as_py() if number < len(values) else None
    return f"{_quoted(name)}={NULL_FOLDER if value is None else _quoted(value)}"


def _quoted(value: Any) -> str:
    """Dates and times in the form that readers of such folders know: 2024-01-31, 2024-01-31 12:00:00."""
    return quote(str(value).lower() if isinstance(value, bool) else str(value), safe="")
