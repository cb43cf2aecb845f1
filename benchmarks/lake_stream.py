"""Writes a stream from Kafka into Iceberg with a commit every 10 s, kills it again and again, and counts the rows.

    python benchmarks/lake_stream.py               # killed ten times
    python benchmarks/lake_stream.py --kills 2     # a try

A producer writes records at a steady rate all the time. Each start is killed, with all its workers, at a random moment
within some seconds after its first commit. The last lines say how many records are missing or there twice, and how many
data files no snapshot names: those of workers and runs that were killed. The exit code is 1 if a row is missing or
there twice.
"""

from __future__ import annotations

import argparse
import random
import sys
import tempfile
import time
from pathlib import Path
from typing import Any

import _kafka
import apache_beam as beam
import pyarrow as pa
from _killable import Killable
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.window import FixedWindows

from luminosity import KafkaRecord, LuminosityRunner, ReadKafka, TableFromRows, WriteIceberg

RECORDS_PER_SECOND = 500
WINDOW_S = 10
SPREAD_S = 15.0  # after the first commit of a start, within which it is killed
SEED = 7
TABLE = "bench.rows"
SCHEMA = pa.schema({"partition": pa.int32(), "offset": pa.int64()})


def settings(folder: str) -> dict[str, str]:
    """Return the properties of a catalog in a folder."""
    return {"type": "sql", "uri": f"sqlite:///{folder}/catalog.db", "warehouse": f"{folder}/warehouse"}


def place(record: KafkaRecord) -> dict[str, int]:
    return {"partition": record.partition, "offset": record.offset}


def stream(servers: str, folder: str) -> None:
    """What is killed."""
    options = PipelineOptions(
        ["--streaming", f"--checkpoint_dir={folder}/checkpoint", "--cpu_workers=2", "--progress=off", "--run_dir=off"]
    )
    with beam.Pipeline(LuminosityRunner(), options) as pipeline:
        records: Any = pipeline | ReadKafka(servers, "in")
        rows = records | beam.Map(place) | beam.WindowInto(FixedWindows(WINDOW_S)) | TableFromRows(SCHEMA)
        _ = rows | WriteIceberg(f"main.{TABLE}", catalog=settings(folder), schema=SCHEMA)


def main() -> int:
    if sys.argv[1:2] == ["stream"]:
        stream(*sys.argv[2:])
        return 0
    parser = argparse.ArgumentParser(description=(__doc__ or "").partition("\n")[0])
    parser.add_argument("--kills", type=int, default=10)
    kills = parser.parse_args().kills
    from pyiceberg.catalog import load_catalog

    chance = random.Random(SEED)
    with _kafka.TransactionalProcess() as broker, tempfile.TemporaryDirectory(prefix="lake-stream-") as folder:
        (Path(folder) / "warehouse").mkdir()
        catalog = load_catalog("main", **settings(folder))
        catalog.create_namespace("bench")

        def commits() -> int:
            return len(catalog.load_table(TABLE).snapshots()) if catalog.table_exists(TABLE) else 0

        began = time.monotonic()
        with _kafka.ProducerProcess(broker.servers, RECORDS_PER_SECOND):
            for _ in range(kills):
                before = commits()
                with Killable(Path(folder) / "output", "stream", broker.servers, folder) as run:
                    run.wait_for(lambda before=before: commits() > before, "new commit", every_s=0.5)
                    time.sleep(chance.uniform(0, SPREAD_S))
        expected = broker.count("in")
        with Killable(Path(folder) / "output", "stream", broker.servers, folder) as run:

            def is_whole() -> bool:
                table = catalog.load_table(TABLE)
                return sum(table.inspect.files()["record_count"].to_pylist()) >= expected

            run.wait_for(is_whole, "last commit", every_s=1)
            seconds = time.monotonic() - began
            time.sleep(2 * WINDOW_S)  # in which repeated rows would come
        table = catalog.load_table(TABLE)
        rows = table.scan().to_arrow()
        distinct = rows.group_by(SCHEMA.names).aggregate([]).num_rows
        named = {Path(path).name for path in table.inspect.files()["file_path"].to_pylist()}
        there = {path.name: path.stat().st_size for path in Path(folder).rglob("*.parquet")}
        orphans = [size for name, size in there.items() if name not in named]
        print(f"{expected} records in {seconds:.0f} s, {kills} kills, {commits()} commits, {len(named)} data files")
        print(f"missing: {expected - distinct}; there twice: {rows.num_rows - distinct}")
        print(f"data files that no snapshot names: {len(orphans)}, with {sum(orphans)} B")
    return int(distinct != expected or rows.num_rows != distinct)


if __name__ == "__main__":
    sys.exit(main())
