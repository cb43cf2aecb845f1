"""What tables contain, whatever the order of their rows and however many files they have.

Rows are compared by hashes, which are computed column by column.
"""

from __future__ import annotations

import hashlib
import os
from collections.abc import Sequence
from dataclasses import dataclass
from typing import Any, cast

import numpy as np
import numpy.typing as npt
import pyarrow as pa
from pyarrow import compute

from luminosity.runs.manifest.files import COLUMNAR, LINES, header_and_lines, suffix_of

__all__ = [
    "Comparison",
    "compare_tables",
    "content_digest",
    "float_leaves",
    "float_sums",
    "is_table",
    "read_files",
    "row_hashes",
]


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


Hashes = npt.NDArray[np.uint64]
_NULL = np.uint64(0x9E3779B97F4A7C15)
_FLOATS = {"halffloat": "float16", "float": "float32", "double": "float64"}  # Arrow's names, and NumPy's
_FACTOR_1 = np.uint64(0xBF58476D1CE4E5B9)  # this and the following: the mixer of the generator SplitMix64
_FACTOR_2 = np.uint64(0x94D049BB133111EB)


def row_hashes(table: Any, *, with_floats: bool = True) -> Hashes:
    """Return a hash of 64 bits for each row; names and types of columns count.

    Without floats, only the places of floating-point numbers count, not their values: rows that differ by rounding have
    the same hash.

    >>> first = pa.table({"n": [1, 2], "v": [[0.5], [1.5, None]]})
    >>> second = pa.table({"n": [2, 1], "v": [[1.5, None], [0.5]]})
    >>> sorted(row_hashes(first)) == sorted(row_hashes(second))
    True
    """
    result = np.zeros(table.num_rows, np.uint64)
    for name in sorted(table.schema.names):
        column = table.column(name)
        seed = _hash_of(f"{name} {column.type}".encode())
        result += _mixed(_hashed(_one_array(column), with_floats) + seed)
    return _mixed(result)


def float_leaves(array: Any) -> list[npt.NDArray[np.float64]]:
    """Return all floating-point numbers in a column, also those inside of lists and structs; nulls are NaN."""
    array = _one_array(array)
    if pa.types.is_floating(array.type):
        return [_floats(array)]
    if _is_list(array.type):
        return float_leaves(array.flatten())
    if pa.types.is_struct(array.type):
        return [leaf for field in array.flatten() for leaf in float_leaves(field)]
    return []


def float_sums(array: Any) -> npt.NDArray[np.float64]:
    """Return the sum of the floating-point numbers in each row, to order rows that differ in nothing else."""
    array = _one_array(array)
    if pa.types.is_floating(array.type):
        return np.nan_to_num(_floats(array))
    if _is_list(array.type):
        return _summed(float_sums(array.flatten()), _lengths(array))
    if pa.types.is_struct(array.type):
        return sum((float_sums(field) for field in array.flatten()), np.zeros(len(array)))
    return np.zeros(len(array))


def _hashed(array: Any, with_floats: bool) -> Hashes:
    kind = array.type
    if isinstance(kind, pa.BaseExtensionType):
        return _hashed(array.storage, with_floats)
    if pa.types.is_dictionary(kind):
        return _hashed(array.dictionary_decode(), with_floats)
    if pa.types.is_null(kind):
        return np.full(len(array), _NULL)
    if _is_list(kind):
        hashes = _of_lists(array, with_floats)
    elif pa.types.is_struct(kind):
        hashes = np.zeros(len(array), np.uint64)
        for field, child in zip(kind, array.flatten(), strict=True):
            hashes += _mixed(_hashed(child, with_floats) + _hash_of(field.name.encode()))
    elif pa.types.is_floating(kind):
        values = _floats(array) if with_floats else np.zeros(len(array))
        hashes = _mixed(values.view(np.uint64))
    elif pa.types.is_boolean(kind) or pa.types.is_integer(kind) or pa.types.is_temporal(kind):
        hashes = _mixed(_integers(array).view(np.uint64))
    else:
        hashes = _of_values(array)
    return cast(Hashes, np.where(_is_null(array), _NULL, hashes))


def _of_lists(array: Any, with_floats: bool) -> Hashes:
    lengths = _lengths(array)
    children = _hashed(_one_array(array.flatten()), with_floats)
    starts = np.cumsum(lengths) - lengths
    positions = np.arange(len(children), dtype=np.uint64) - np.repeat(starts, lengths).astype(np.uint64)
    return _mixed(_summed(_mixed(children + _mixed(positions)), lengths) + lengths.astype(np.uint64))


def _of_values(array: Any) -> Hashes:
    """Return the hashes of texts, bytes and rare types; each distinct value is hashed once."""
    if not (pa.types.is_large_string(array.type) or pa.types.is_string(array.type) or _is_binary(array.type)):
        array = pa.array([None if each is None else repr(each) for each in array.to_pylist()], pa.large_string())
    encoded = array.dictionary_encode()
    values = encoded.dictionary.to_pylist()
    hashes = np.array([_hash_of(each.encode() if isinstance(each, str) else each) for each in values], np.uint64)
    if not len(hashes):
        return np.zeros(len(array), np.uint64)
    return hashes[np.clip(_raw(encoded.indices), 0, len(hashes) - 1)]


def _integers(array: Any) -> npt.NDArray[np.int64]:
    kind = array.type
    if pa.types.is_boolean(kind):
        array = array.cast(pa.int8())
    elif pa.types.is_temporal(kind):
        array = array.view(pa.int32() if kind.bit_width == 32 else pa.int64())
    return _raw(array).astype(np.int64)


def _is_null(array: Any) -> npt.NDArray[np.bool_]:
    return _raw(array.is_null().cast(pa.uint8())).astype(bool)


def _raw(array: Any) -> npt.NDArray[Any]:
    """Return the numbers of an array as they lie in memory, with any number for a null.

    Arrow's ``to_numpy`` and ``fill_null`` would do, but they import pandas, if that is installed, which takes longer
    than all the rest.
    """
    values = array.buffers()[1] if len(array) else None
    kind = _FLOATS.get(str(array.type), str(array.type))
    if values is None:
        return np.zeros(len(array), kind)
    return np.frombuffer(values, kind)[array.offset : array.offset + len(array)]


def _floats(array: Any) -> npt.NDArray[np.float64]:
    return np.where(_is_null(array), np.nan, _raw(array).astype(np.float64))


def _lengths(array: Any) -> npt.NDArray[np.int64]:
    lengths: Any = compute.call_function("list_value_length", [array])
    return np.where(_is_null(lengths), 0, _raw(lengths)).astype(np.int64)


def _summed(values: Any, lengths: npt.NDArray[np.int64]) -> Any:
    """Return the sums of consecutive groups of values."""
    totals = np.concatenate([np.zeros(1, values.dtype), np.cumsum(values)])
    ends = np.cumsum(lengths)
    return totals[ends] - totals[ends - lengths]


def _mixed(values: Hashes) -> Hashes:
    """Return other numbers, one for each, that look random."""
    with np.errstate(over="ignore"):
        values = (values ^ (values >> np.uint64(30))) * _FACTOR_1
        values = (values ^ (values >> np.uint64(27))) * _FACTOR_2
        return values ^ (values >> np.uint64(31))


def _hash_of(content: bytes) -> np.uint64:
    return np.frombuffer(hashlib.blake2b(content, digest_size=8).digest(), np.uint64)[0]


def _one_array(column: Any) -> Any:
    if not isinstance(column, pa.ChunkedArray):
        return column
    chunks = column.combine_chunks()
    return pa.concat_arrays(chunks.chunks) if isinstance(chunks, pa.ChunkedArray) else chunks


def _is_list(kind: Any) -> bool:
    return pa.types.is_list(kind) or pa.types.is_large_list(kind) or pa.types.is_fixed_size_list(kind)


def _is_binary(kind: Any) -> bool:
    return pa.types.is_binary(kind) or pa.types.is_large_binary(kind)
