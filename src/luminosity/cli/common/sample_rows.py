"""Reads a sample of a file's rows, always the same, to try a model with."""

from __future__ import annotations

import glob
import json
import os
import random
from collections.abc import Iterable, Iterator, Mapping
from typing import Any, TypeVar

from luminosity._shared.text import did_you_mean, list_some
from luminosity.cli.common.table_options import TableReader
from luminosity.errors import LuminosityError, OptionError

__all__ = ["read_rows"]

T = TypeVar("T")

_MOST_GROUPS = 16  # row groups of a Parquet file that are read, spread over the file
_MOST_BYTES = 1_000_000_000  # how much is read of files that can only be read from the start
_SHOWN_COLUMNS = 20
_SEED = 0


def read_rows(
    path: str, column: str | None, count: int, csv: Mapping[str, Any] | None = None, reader: TableReader | None = None
) -> list[Any]:
    """Return at most ``count`` rows in random order: texts, numbers, and lists as numpy arrays.

    Rows without a value are left out. The file's suffix decides its format; a file with another suffix has a row per
    line. ``csv`` are the arguments of ``ReadTable`` for CSV, which ``reader`` reads.
    """
    if not os.path.isfile(path):
        raise OptionError(f"--data={path}: {'a folder' if os.path.isdir(path) else 'no such file'}, expected a file")
    if not os.path.getsize(path):
        raise OptionError(f"--data={path}: the file is empty")
    kind = os.path.splitext(path)[1].lower()
    chance = random.Random(_SEED)
    try:
        if kind in (".parquet", ".pq"):
            rows = _from_parquet(path, column, count, chance)
        elif kind in (".jsonl", ".ndjson", ".json"):
            rows = _from_json_lines(path, column, count, chance)
        elif kind in (".csv", ".tsv"):
            rows = _sample(_csv_values(path, column, csv or {}, reader or TableReader("bench")), count, chance)
        else:
            rows = _from_lines(path, column, count, chance)
    except (ValueError, OSError) as error:
        if isinstance(error, LuminosityError):
            raise
        raise OptionError(f"--data={path}: can't be read as {kind or 'text'}: {error}") from error
    examples = [_example(row) for row in rows if row is not None]
    if not examples:
        where = "" if column is None else f" with a value in the column {column!r}"
        raise OptionError(f"--data={path}: no row{where}")
    chance.shuffle(examples)
    return examples


def _from_parquet(path: str, column: str | None, count: int, chance: random.Random) -> list[Any]:
    from pyarrow import parquet

    with parquet.ParquetFile(path) as file:
        name = _checked(path, column, file.schema_arrow.names)
        groups = [group for group in range(file.num_row_groups) if file.metadata.row_group(group).num_rows]
        some = groups[:: -(-len(groups) // _MOST_GROUPS)] if groups else []
        tables = (file.read_row_group(group, [name]) for group in some)
        return _sample((value for table in tables for value in table[name].to_pylist()), count, chance)


def _from_json_lines(path: str, column: str | None, count: int, chance: random.Random) -> list[Any]:
    lines = _sample((line for line in _lines(path) if line.strip()), count, chance)
    records = [json.loads(line) for line in lines]
    strays = [record for record in records if not isinstance(record, dict)]
    if strays:
        raise OptionError(f"--data={path}: found {str(strays[0])[:60]!r}, expected a JSON object on each line")
    name = _checked(path, column, list(dict.fromkeys(key for record in records for key in record)))
    return [record.get(name) for record in records]


def _csv_values(path: str, column: str | None, csv: Mapping[str, Any], reader: TableReader) -> Iterator[Any]:
    from luminosity.io.read_table import ReadTable

    pattern, read = glob.escape(path), 0
    name = _checked(path, column, ReadTable(pattern, **csv).schema.names)
    for _, batch in reader.rows(reader.open(pattern, [name], csv)):
        yield from batch.column(name).to_pylist()
        read += batch.nbytes
        if read > _MOST_BYTES:
            return


def _from_lines(path: str, column: str | None, count: int, chance: random.Random) -> list[Any]:
    if column is not None:
        raise OptionError(
            f"--column={column}: {path} is read as lines of text, which have no columns",
            fix="leave --column out, or use a .parquet, .jsonl, .csv or .tsv file",
        )
    return _sample((line for line in _lines(path) if line), count, chance)


def _lines(path: str) -> Iterator[str]:
    with open(path, encoding="utf-8") as file:
        read = 0
        for line in file:
            yield line.rstrip("\n")
            read += len(line)
            if read > _MOST_BYTES:
                return


def _checked(path: str, column: str | None, columns: list[str]) -> str:
    has = f"{path} has {list_some(map(repr, columns), _SHOWN_COLUMNS)}"
    if column is None:
        if len(columns) == 1:
            return columns[0]
        raise OptionError(f"--column is missing; {has}", fix="name the column with the examples: --column C")
    if columns.count(column) > 1:
        raise OptionError(f"--column={column}: {path} has this column {columns.count(column)} times, expected it once")
    if column not in columns:
        raise OptionError(f"--column={column}: no such column; {has}", fix=did_you_mean(column, columns) or None)
    return column


def _sample(values: Iterable[T], count: int, chance: random.Random) -> list[T]:
    """Return a random sample of values that come one by one; each has the same chance, however many there are."""
    kept: list[T] = []
    for seen, value in enumerate(values):
        if seen < count:
            kept.append(value)
        elif (place := int(chance.random() * (seen + 1))) < count:
            kept[place] = value
    return kept


def _example(value: Any) -> Any:
    import numpy as np  # not for --help

    return np.asarray(value) if isinstance(value, list) else value
