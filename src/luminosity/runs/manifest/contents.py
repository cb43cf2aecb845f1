"""What tables contain, whatever the order of their rows and however many files they have."""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any

import numpy as np
import pyarrow as pa

from luminosity.runs.manifest.lines import COLUMNAR, LINES, header_and_lines, suffix_of
from luminosity.runs.manifest.row_hashes import float_leaves, float_sums, row_hashes

__all__ = ["Comparison", "compare_tables", "content_digest", "is_table", "read_files"]


@dataclass(frozen=True)
class Comparison:
    """How two tables differ."""

    before: int  # rows
    now: int
    is_same: bool  # whether they have the same rows, in any order
    largest: float | None = None  # difference of two numbers, if nothing else differs; relative for large numbers
    changed: int = 0  # rows of the second table that the first one does not have
    columns: str = ""  # how the columns differ

    def is_within(self, tolerance: float) -> bool:
        """Return whether the tables have the same rows up to this difference of floating-point numbers."""
        return self.is_same or (self.largest is not None and self.largest <= tolerance)


def is_table(files: Sequence[str]) -> bool:
    """Return whether all files have a name of a format whose rows can be compared."""
    return bool(files) and all(suffix_of(file) in (*LINES, *COLUMNAR) for file in files)


def read_files(files: Sequence[str], base: str) -> Any:
    """Read files as one ``pyarrow.Table``. Lines of text files are rows; folders such as ``lang=en`` are columns.

    Raises ``OSError`` or ``pyarrow.ArrowException`` if a file can't be read.
    """
    tables = [_with_partitions(_read(file), os.path.relpath(file, base)) for file in files]
    return pa.concat_tables(tables, promote_options="default") if tables else pa.table({})


def content_digest(table: Any) -> str:
    """Return a digest of a table's rows, which does not depend on their order."""
    return f"rows:{hashlib.sha256(np.sort(row_hashes(table)).tobytes()).hexdigest()}"


def compare_tables(before: Any, now: Any) -> Comparison:
    """Compare two tables row by row, in any order.

    >>> first, second = pa.table({"n": [1, 2], "x": [0.5, 0.25]}), pa.table({"n": [2, 1], "x": [0.25, 0.5000001]})
    >>> compare_tables(first, first.take([1, 0])).is_same
    True
    >>> compare_tables(first, second).is_within(1e-6), compare_tables(first, second).is_within(0)
    (True, False)
    """
    counts = before.num_rows, now.num_rows
    if columns := _different_columns(before.schema, now.schema):
        return Comparison(*counts, is_same=False, changed=now.num_rows, columns=columns)
    hashes = row_hashes(before), row_hashes(now)
    if counts[0] == counts[1] and np.array_equal(np.sort(hashes[0]), np.sort(hashes[1])):
        return Comparison(*counts, is_same=True)
    return Comparison(*counts, is_same=False, largest=_largest(before, now), changed=_new_rows(*hashes))


def _largest(before: Any, now: Any) -> float | None:
    """Return the largest difference of two numbers if the tables differ in nothing else, otherwise None."""
    keys = [row_hashes(table, with_floats=False) for table in (before, now)]
    if not np.array_equal(np.sort(keys[0]), np.sort(keys[1])):
        return None
    ordered: list[Any] = []
    for table, key in zip((before, now), keys, strict=True):
        sums = sum((float_sums(column) for column in table.columns), np.zeros(table.num_rows))
        ordered.append(table.take(pa.array(np.lexsort((sums, key)))))
    largest = 0.0
    for name in before.schema.names:
        for old, new in zip(float_leaves(ordered[0][name]), float_leaves(ordered[1][name]), strict=True):
            if not np.array_equal(np.isfinite(old), np.isfinite(new)):
                return None
            with np.errstate(invalid="ignore"):
                apart = np.abs(new - old) / np.maximum(1.0, np.abs(old))
            if not np.array_equal(old[~np.isfinite(old)], new[~np.isfinite(new)], equal_nan=True):
                return None
            largest = max(largest, float(np.max(apart, where=np.isfinite(old), initial=0.0)))
    return largest


def _new_rows(before: Any, now: Any) -> int:
    """Return how many rows of the second table are not in the first one, each counted as often as it is there."""
    values, counts = np.unique(before, return_counts=True)
    known = dict(zip(values.tolist(), counts.tolist(), strict=True))
    values, counts = np.unique(now, return_counts=True)
    return sum(max(0, n - known.get(value, 0)) for value, n in zip(values.tolist(), counts.tolist(), strict=True))


def _different_columns(before: Any, now: Any) -> str:
    old = {field.name: str(field.type) for field in before}
    new = {field.name: str(field.type) for field in now}
    parts = [f"column {name!r} is gone" for name in old if name not in new]
    parts += [f"column {name!r} is new" for name in new if name not in old]
    parts += [f"column {n!r} was {old[n]}, is {new[n]}" for n in old if n in new and old[n] != new[n]]
    return ", ".join(parts)


def _read(path: str) -> Any:
    suffix = suffix_of(path)
    if suffix == ".parquet":
        import pyarrow.parquet

        return pyarrow.parquet.ParquetFile(path).read()
    if suffix in COLUMNAR:
        with pa.memory_map(path) as source:
            try:
                return pa.ipc.open_file(source).read_all()
            except pa.ArrowInvalid:
                source.seek(0)
                return pa.ipc.open_stream(source).read_all()
    header, rows = header_and_lines(path)
    if header is None:
        return pa.table({"line": pa.array(rows, pa.large_binary())})
    columns = {"header": [header] * len(rows), "line": rows}
    return pa.table({name: pa.array(values, pa.large_binary()) for name, values in columns.items()})


def _with_partitions(table: Any, relative: str) -> Any:
    for part in os.path.dirname(relative).split(os.sep):
        name, is_partition, value = part.partition("=")
        if is_partition and name not in table.schema.names:
            table = table.append_column(name, pa.repeat(pa.scalar(value), table.num_rows))
    return table
