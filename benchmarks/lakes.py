"""Reads a table, enriches it with a small model and writes it: as Parquet, as Iceberg and as Delta.

    .venv/bin/python benchmarks/lakes.py             # 10 million rows
    .venv/bin/python benchmarks/lakes.py --rows 200000

Prints the seconds of each, and how many times those of Parquet they are. Rows are counted and summed up after each run.
"""

from __future__ import annotations

import argparse
import shutil
import tempfile
import time
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import (
    Column,
    Enrich,
    Handler,
    LuminosityRunner,
    ReadDelta,
    ReadIceberg,
    ReadTable,
    WriteDelta,
    WriteIceberg,
    WriteTable,
)

_ROWS_PER_BATCH = 1 << 16
_OUT = "score"


class Line(Handler[Any, float, Any]):
    """A linear model of two numbers: cheap, and computed for a whole batch at once."""

    def load_model(self) -> Any:
        return np.array([0.25, -0.5], np.float32)

    def predict(self, model: Any, batch: Any, inference_args: Any = None) -> Any:
        return (np.asarray(batch, np.float32) @ model).tolist()


def _batches(rows: int) -> Iterator[pa.RecordBatch]:
    chance = np.random.default_rng(0)
    for first in range(0, rows, _ROWS_PER_BATCH):
        count = min(_ROWS_PER_BATCH, rows - first)
        ids = np.arange(first, first + count)
        point = pa.FixedSizeListArray.from_arrays(pa.array(chance.random(2 * count, np.float32)), 2)
        text = pc.binary_join_element_wise("review number ", pa.array(ids).cast(pa.string()), "")
        lang = pa.array(np.array(["de", "en", "fr"])[chance.integers(0, 3, count)])
        yield pa.record_batch({"id": ids, "text": text, "lang": lang, "point": point.cast(pa.list_(pa.float32()))})


def _run(read: Any, write: Any, workers: int | None) -> float:
    flags = ["--progress=off", *([f"--cpu_workers={workers}"] if workers else [])]
    began = time.monotonic()
    with beam.Pipeline(LuminosityRunner(), PipelineOptions(flags)) as pipeline:
        _ = (
            pipeline
            | "Read" >> read
            | Enrich(**{_OUT: Column(Line(), "point", output=pa.float32())})
            | "Write" >> write
        )
    return time.monotonic() - began


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--workers", type=int, help="--cpu_workers of the runs (default: as the runner decides)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; the fastest counts")
    parsed = parser.parse_args()
    folder = Path(tempfile.mkdtemp(prefix="lakes-"))
    try:
        _compare(folder, parsed)
    finally:
        shutil.rmtree(folder)


def _compare(folder: Path, parsed: argparse.Namespace) -> None:
    from deltalake import write_deltalake
    from pyarrow import parquet
    from pyiceberg.catalog import load_catalog

    settings = {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": str(folder / "warehouse")}
    (folder / "warehouse").mkdir()
    catalog = load_catalog("main", **settings)
    catalog.create_namespace("bench")
    schema = next(_batches(1)).schema
    (folder / "in").mkdir()
    with parquet.ParquetWriter(folder / "in" / "rows.parquet", schema, compression="zstd") as writer:
        for batch in _batches(parsed.rows):
            writer.write_batch(batch)
    whole = lambda: pa.RecordBatchReader.from_batches(schema, _batches(parsed.rows))  # noqa: E731
    write_deltalake(folder / "delta-in", whole())
    catalog.create_table("bench.rows", schema).append(whole().read_all())

    def iceberg(at: int) -> tuple[Any, Any, Callable[[], Any]]:
        out = f"main.bench.out{at}"
        read = ReadIceberg("main.bench.rows", catalog=settings)
        return read, WriteIceberg(out, catalog=settings), lambda: ReadIceberg(out, [_OUT], catalog=settings)

    def delta(at: int) -> tuple[Any, Any, Callable[[], Any]]:
        out = folder / f"delta-out{at}"
        return ReadDelta(folder / "delta-in"), WriteDelta(out), lambda: ReadDelta(out, [_OUT])

    def files(at: int) -> tuple[Any, Any, Callable[[], Any]]:
        out = str(folder / f"out{at}")
        return ReadTable(str(folder / "in")), WriteTable(out), lambda: ReadTable(out, [_OUT])

    best: dict[str, float] = {}
    sums: set[tuple[int, float]] = set()
    for at in range(parsed.repeat):
        for name, make in (("Parquet", files), ("Iceberg", iceberg), ("Delta", delta)):
            read, write, result = make(at)
            best[name] = min(best.get(name, float("inf")), _run(read, write, parsed.workers))
            table = pa.Table.from_batches([batch for _, batch in result().all()])
            sums.add((table.num_rows, round(pc.sum(table[_OUT].cast(pa.float64())).as_py(), 1)))
    assert len(sums) == 1, sums
    assert next(iter(sums))[0] == parsed.rows, sums
    for name, seconds in best.items():
        ratio = seconds / best["Parquet"]
        print(f"{name:8} {seconds:6.1f} s  {parsed.rows / seconds:12,.0f} rows/s  {ratio:.2f} x Parquet")


if __name__ == "__main__":
    main()
