"""Reads a table, enriches it with a small model and writes it: as Parquet, as Iceberg and as Delta.

    .venv/bin/python benchmarks/lakes.py             # 10 million rows
    .venv/bin/python benchmarks/lakes.py --rows 200000

Prints the seconds of each, and how many times those of Parquet they are; and the same of CPU seconds, which other
programs of the machine disturb less: those of a run of a few rows, which only starts, are taken off. Rows are counted
and summed up after each run.
"""

from __future__ import annotations

import argparse
import os
import shutil
import subprocess
import sys
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
_FEW = 1_000  # rows of a run that only starts
_KINDS = ("Parquet", "Iceberg", "Delta")


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


def _one(folder: Path, kind: str, rows: int, at: int, workers: int | None) -> None:
    """Run once, in a process of its own, and print the seconds, the rows and the sum of what was written."""
    read, write, result = _transforms(folder, kind, rows, at)
    seconds = _run(read, write, workers)
    table = pa.Table.from_batches([batch for _, batch in result().all()])
    print(seconds, table.num_rows, round(pc.sum(table[_OUT].cast(pa.float64())).as_py(), 1))


def _transforms(folder: Path, kind: str, rows: int, at: int) -> tuple[Any, Any, Callable[[], Any]]:
    """Return what reads and writes, and what reads the result."""
    name = f"{rows}-{at}"
    if kind == "Iceberg":
        settings, out = _settings(folder), f"main.bench.out-{name}"
        read: Any = ReadIceberg(f"main.bench.rows-{rows}", catalog=settings)
        return read, WriteIceberg(out, catalog=settings), lambda: ReadIceberg(out, [_OUT], catalog=settings)
    out = str(folder / f"{kind}-out-{name}")
    if kind == "Delta":
        return ReadDelta(folder / f"delta-in-{rows}"), WriteDelta(out), lambda: ReadDelta(out, [_OUT])
    return ReadTable(str(folder / f"in-{rows}")), WriteTable(out), lambda: ReadTable(out, [_OUT])


def _settings(folder: Path) -> dict[str, str]:
    return {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": str(folder / "warehouse")}


def _write_inputs(folder: Path, rows: int) -> None:
    from deltalake import write_deltalake
    from pyarrow import parquet
    from pyiceberg.catalog import load_catalog

    catalog = load_catalog("main", **_settings(folder))
    catalog.create_namespace_if_not_exists("bench")
    schema = next(_batches(1)).schema
    (folder / f"in-{rows}").mkdir()
    with parquet.ParquetWriter(folder / f"in-{rows}" / "rows.parquet", schema, compression="zstd") as writer:
        for batch in _batches(rows):
            writer.write_batch(batch)
    whole = lambda: pa.RecordBatchReader.from_batches(schema, _batches(rows))  # noqa: E731
    write_deltalake(folder / f"delta-in-{rows}", whole())
    catalog.create_table(f"bench.rows-{rows}", schema).append(whole().read_all())


def _measured(
    folder: Path, kind: str, rows: int, at: int, workers: int | None
) -> tuple[float, float, tuple[int, float]]:
    """Return the seconds of a run, the CPU seconds of its processes, and the rows and sum of what it wrote."""
    words = [sys.executable, __file__, "--one", kind, "--at", str(at), "--folder", str(folder), "--rows", str(rows)]
    before = os.times()
    printed = subprocess.check_output([*words, *(["--workers", str(workers)] if workers else [])], text=True)
    now = os.times()
    cpu = now.children_user + now.children_system - before.children_user - before.children_system
    seconds, count, total = printed.splitlines()[-1].split()
    return float(seconds), cpu, (int(count), float(total))


def main() -> None:
    parser = argparse.ArgumentParser(description=__doc__, formatter_class=argparse.RawDescriptionHelpFormatter)
    parser.add_argument("--rows", type=int, default=10_000_000)
    parser.add_argument("--workers", type=int, help="--cpu_workers of the runs (default: as the runner decides)")
    parser.add_argument("--repeat", type=int, default=3, help="runs of each; the fastest counts")
    for option in ("--one", "--at", "--folder"):
        parser.add_argument(option, help=argparse.SUPPRESS)
    parsed = parser.parse_args()
    if parsed.one:
        _one(Path(parsed.folder), parsed.one, parsed.rows, int(parsed.at), parsed.workers)
        return
    folder = Path(tempfile.mkdtemp(prefix="lakes-"))
    try:
        _compare(folder, parsed)
    finally:
        shutil.rmtree(folder)


def _compare(folder: Path, parsed: argparse.Namespace) -> None:
    (folder / "warehouse").mkdir()
    for rows in (_FEW, parsed.rows):
        _write_inputs(folder, rows)
    best: dict[str, float] = {}
    least: dict[str, float] = {}  # CPU seconds
    idle: dict[str, float] = {}
    sums: set[tuple[int, float]] = set()
    for at in range(parsed.repeat):
        for kind in _KINDS:
            _, started, _ = _measured(folder, kind, _FEW, at, parsed.workers)
            seconds, cpu, written = _measured(folder, kind, parsed.rows, at, parsed.workers)
            best[kind] = min(best.get(kind, seconds), seconds)
            least[kind] = min(least.get(kind, cpu), cpu)
            idle[kind] = min(idle.get(kind, started), started)
            sums.add(written)
    assert len(sums) == 1, sums
    assert next(iter(sums))[0] == parsed.rows, sums
    for kind in _KINDS:
        seconds, cpu = best[kind], least[kind] - idle[kind]
        of_wall, of_cpu = seconds / best["Parquet"], cpu / (least["Parquet"] - idle["Parquet"])
        print(
            f"{kind:8} {seconds:6.1f} s  {parsed.rows / seconds:12,.0f} rows/s  {of_wall:.2f} x Parquet; "
            f"CPU {cpu:6.1f} s  {of_cpu:.2f} x Parquet"
        )


if __name__ == "__main__":
    main()
