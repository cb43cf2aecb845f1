"""Tables and stores behind ReadKafka have each record once, although workers are killed and partitions move."""

from __future__ import annotations

import json
import os
import time
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.window import FixedWindows

from luminosity import LuminosityRunner, MapTable, ReadKafka, WindowTable, WriteLance, WriteQdrant, WriteTable
from luminosity.io.stores.address import StoreAddress
from luminosity.io.stores.embedded_qdrant import EmbeddedCollection
from luminosity.testing import KafkaBroker
from tests.io.stores.test_qdrant import stored
from tests.io.written import rows_of
from tests.marks import note, wait_for_file
from tests.processes import MOST_KILLS, kill_workers_of
from tests.streams import names_in, wait_for

_RECORDS = 240
_PARTITIONS = 3
_START_MS = 1_700_000_000_000
_SCHEMA = pa.schema([("id", pa.int64()), ("vector", pa.list_(pa.float32(), 2))])


def _lance(out: Path, name: str) -> list[int]:
    if not (out / f"{name}.lance").exists():
        return []
    import lancedb  # workers, which import this file, don't need it

    return sorted(lancedb.connect(out).open_table(name).to_arrow()["id"].to_pylist())


def _counts(out: Path) -> list[int]:
    """Return how many rows each destination has while the stream runs."""
    store = EmbeddedCollection(StoreAddress(str(out / "store"), "things"))
    rows = rows_of(out / "table") if names_in(out / "table") else []
    points = store.count() if (out / "store" / "things").exists() else 0
    return [len(rows), len(_lance(out, "rows")), len(_lance(out, "merged")), points]


@pytest.mark.alone
def test_each_record_is_once_in_tables_and_stores_while_workers_are_killed(tmp_path: Path) -> None:
    """Windows are complete while the stream runs, and their rows come from bundles of killed workers and of others."""
    out, at_work, killed = tmp_path / "out", tmp_path / "at-work", tmp_path / "killed"
    with KafkaBroker({"in": _PARTITIONS}) as broker:
        broker.produce_many(
            "in",
            [
                {
                    "value": json.dumps({"id": n, "vector": [n, 1.0]}),
                    "partition": n % _PARTITIONS,
                    "timestamp": _START_MS + 250 * n,  # six windows
                }
                for n in range(_RECORDS)
            ],
        )

        def slowly(rows: pa.RecordBatch) -> pa.RecordBatch:
            note(at_work, os.getpid())
            time.sleep(0.005 * rows.num_rows)
            if _RECORDS - 1 in rows["id"].to_pylist():
                wait_for_file(killed)
            return rows.select(["id", "vector", "_timestamp"])

        pipeline = beam.Pipeline(LuminosityRunner(), PipelineOptions(["--progress=off", "--cpu_workers=2"]))
        read = ReadKafka(broker.bootstrap_servers, "in", value="json", as_table=True, schema=_SCHEMA, groups=2)
        rows: Any = pipeline | read | MapTable(slowly) | WindowTable(FixedWindows(10))
        _ = rows | WriteTable(out / "table")
        _ = rows | WriteLance(out / "rows.lance")
        _ = rows | "Merge" >> WriteLance(out / "merged.lance", mode="merge", key="id")
        _ = rows | WriteQdrant(out / "store", "things", vectors="vector")
        with kill_workers_of(os.getpid(), every_s=0.4, at_work=at_work, over=killed) as kills:
            result = pipeline.run()
            try:
                assert wait_for(lambda: min(_counts(out)) >= _RECORDS), _counts(out)
            finally:
                result.cancel()
        assert kills.count == MOST_KILLS
    expected = list(range(_RECORDS))
    assert sorted(row["id"] for row in rows_of(out / "table")) == expected
    assert _lance(out, "rows") == expected
    assert _lance(out, "merged") == expected
    assert sorted(stored(out / "store")) == expected
