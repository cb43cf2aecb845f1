"""Tests that every row is read once, however a file is split before and while it is read."""

from __future__ import annotations

import random
import tempfile
from pathlib import Path
from unittest import mock

import pyarrow as pa
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from luminosity import ReadTable
from luminosity.io.reading import csv_reader, text_lines
from tests.io.reading.reads import read_alone, write

TEXTS = st.text(st.characters(exclude_categories=["Cs", "Cc"]), max_size=20)


@settings(max_examples=150, deadline=None, suppress_health_check=[HealthCheck.too_slow])
@given(
    texts=st.lists(TEXTS, max_size=60),
    name=st.sampled_from(["t.parquet", "t.arrow", "t.csv", "t.jsonl", "t.jsonl.gz"]),
    rows_at_once=st.integers(1, 30),
    rows_per_batch=st.integers(1, 20),
    block=st.integers(1, 300),
    seed=st.integers(0, 1 << 30),
)
def test_every_row_once(
    texts: list[str], name: str, rows_at_once: int, rows_per_batch: int, block: int, seed: int
) -> None:
    schema = pa.schema({"id": pa.int64(), "text": pa.string()})
    table = pa.table({"id": range(len(texts)), "text": texts}, schema=schema)
    with (
        tempfile.TemporaryDirectory() as folder,
        mock.patch.multiple(text_lines, TEXT_BYTES=block, _READ_AHEAD=block // 3 + 1),
        mock.patch.multiple(csv_reader, TEXT_BYTES=block, _READ_AHEAD=block // 3 + 1),
    ):
        write(Path(folder) / name, table, rows_at_once)
        transform = ReadTable(folder, schema=schema, rows_per_batch=rows_per_batch)
        found = read_alone(transform, random.Random(seed))
    assert sorted(found, key=lambda row: row["id"]) == table.to_pylist()
