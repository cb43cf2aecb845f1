"""Write and read tables for the tests of ReadTable."""

from __future__ import annotations

import json
import random
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
from apache_beam.pvalue import TaggedOutput
from pyarrow import csv, parquet

from luminosity import ReadTable
from luminosity.io.reading.reader import ByteRange, ByteRangeTracker
from luminosity.io.reading.readers import ReadRanges


def write(path: Path, table: pa.Table, rows_at_once: int = 100) -> None:
    """Write a table in the format of the file's suffix, with row groups or record batches of ``rows`` rows."""
    suffixes = path.suffixes
    if ".parquet" in suffixes:
        parquet.write_table(table, path, row_group_size=rows_at_once)
    elif ".arrow" in suffixes:
        with pa.OSFile(str(path), "wb") as sink, pa.ipc.new_file(sink, table.schema) as writer:
            writer.write_table(table, max_chunksize=rows_at_once)
    elif ".csv" in suffixes:
        text = pa.BufferOutputStream()
        csv.write_csv(table, text)
        write_bytes(path, text.getvalue().to_pybytes())
    else:
        lines = "".join(json.dumps(row, ensure_ascii=False) + "\n" for row in table.to_pylist())
        write_bytes(path, lines.encode())


def write_bytes(path: Path, data: bytes) -> None:
    compressions = {".gz": "gzip", ".bz2": "bz2", ".zst": "zstd", ".lz4": "lz4"}
    if path.suffix in compressions:
        with pa.CompressedOutputStream(str(path), compressions[path.suffix]) as sink:
            sink.write(data)
    else:
        path.write_bytes(data)


def numbered(rows: int) -> pa.Table:
    return pa.table({"id": pa.array(range(rows), pa.int64()), "text": [f"row {number}" for number in range(rows)]})


def read_alone(
    transform: ReadTable, rng: random.Random | None = None, letters: list[dict[str, Any]] | None = None
) -> list[dict[str, Any]]:
    """Read all rows without a runner; with ``rng``, in ranges that are split at random, before and while reading.

    Dead letters are added to ``letters``.
    """
    step = ReadRanges(transform._settings)
    rows: list[dict[str, Any]] = []
    for file in transform._files:
        whole = step.initial_restriction(file)
        todo = list(_cut_anywhere(whole, rng)) if rng else list(step.split(file, whole))
        while todo:
            tracker = ByteRangeTracker(todo.pop())
            reading = step.process(file, tracker)
            while True:
                if rng and rng.random() < 0.3 and (split := tracker.try_split(rng.choice([0, 0.1, 0.5, 0.9]))):
                    todo.append(split[1])
                batch = next(reading, None)
                if batch is None:
                    break
                if isinstance(batch, TaggedOutput):
                    assert letters is not None
                    letters += batch.value.to_pylist()
                    continue
                assert batch.num_rows
                assert batch.schema == transform.schema
                rows += batch.to_pylist()
            assert tracker.check_done()
    step.teardown()
    return rows


def _cut_anywhere(whole: ByteRange, rng: random.Random) -> list[ByteRange]:
    cuts = sorted(rng.randint(0, whole.stop) for _ in range(rng.randint(0, 4)))
    starts, stops = [0, *cuts], [*cuts, whole.stop]
    return [ByteRange(start, stop) for start, stop in zip(starts, stops, strict=True)]


def counters(result: Any) -> dict[str, int]:
    metrics = result.metrics().query(beam.metrics.MetricsFilter().with_namespace("ReadTable"))
    found: dict[str, int] = {}
    for counter in metrics["counters"]:
        found[counter.key.metric.name] = found.get(counter.key.metric.name, 0) + counter.committed
    return found
