"""Read written tables with pyarrow only, and list the contents of folders."""

from __future__ import annotations

import os
from collections.abc import Iterable
from pathlib import Path
from typing import Any

import pyarrow as pa
from pyarrow import csv, dataset, json


def rows_of(path: Path | str, schema: pa.Schema | None = None) -> list[dict[str, Any]]:
    """Return the rows of a table, sorted, including partition columns."""
    return in_order(table_of(path, schema).to_pylist())


def in_order(rows: Iterable[dict[str, Any]]) -> list[dict[str, Any]]:
    return sorted(rows, key=lambda row: repr(sorted(row.items())))


def table_of(path: Path | str, schema: pa.Schema | None = None) -> pa.Table:
    paths = [Path(path)] if Path(path).is_file() else [file for file in Path(path).rglob("*") if file.is_file()]
    if any(".jsonl" in file.name for file in paths):
        return pa.concat_tables([json.read_json(file) for file in paths])
    if any(".csv" in file.name for file in paths):
        return pa.concat_tables([csv.read_csv(file) for file in paths])
    kind = "ipc" if any(file.suffix == ".arrow" for file in paths) else "parquet"
    partitioning = "hive" if schema is None else dataset.partitioning(schema, flavor="hive")
    return dataset.dataset(path, schema=schema, format=kind, partitioning=partitioning).to_table()


def everything_in(folder: Path | str) -> list[str]:
    """Return all files and folders, including hidden ones, relative to the folder."""
    return sorted(
        os.path.relpath(os.path.join(place, name), folder)
        for place, folders, names in os.walk(folder)
        for name in (*folders, *names)
    )
