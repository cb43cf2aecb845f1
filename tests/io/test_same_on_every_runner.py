"""Tests that a job gives the same rows on three runners: Beam's own, a real job service, and ours."""

from __future__ import annotations

import subprocess
import sys
from collections.abc import Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.compute as pc
import pyarrow.dataset as ds
import pyarrow.parquet as pq
import pytest
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import Column, Enrich, Handler, MapTable, ReadTable, WriteTable
from tests.processes import wait_for

WEIGHTS = np.array([2.0, -1.0])
ROWS = 3000


class Linear(Handler[Any, Any, Any]):
    columnar = True

    def load_model(self) -> Any:
        return WEIGHTS

    def predict(self, model: Any, batch: Any, inference_args: Any = None) -> Any:
        return batch @ model


class Shout(Handler[str, str, None]):
    def load_model(self) -> None:
        return None

    def predict(self, model: None, batch: Any, inference_args: Any = None) -> Any:
        return [str(text).upper() for text in batch]


def without_odd_ids(batch: Any) -> Any:
    return batch.filter(pc.equal(pc.bit_wise_and(batch["id"], 1), 0))


@pytest.fixture(scope="module")
def source(tmp_path_factory: pytest.TempPathFactory) -> Path:
    folder = tmp_path_factory.mktemp("source")
    generator = np.random.default_rng(0)
    for number in range(3):
        ids = np.arange(number * ROWS // 3, (number + 1) * ROWS // 3)
        table = {"id": ids, "a": generator.normal(size=len(ids)), "b": generator.normal(size=len(ids))}
        table["text"] = [f"row {each}" for each in ids]
        pq.write_table(pa.table(table), folder / f"part-{number}.parquet", row_group_size=250)
    return folder


@pytest.fixture(scope="module")
def job_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """Start a job service, which chooses its port itself: a free port might be taken in the meantime."""
    port = tmp_path_factory.mktemp("service") / "port"
    module = "apache_beam.runners.portability.local_job_service_main"
    service = subprocess.Popen(
        [sys.executable, "-m", module, "--port_file", str(port)], stdout=subprocess.DEVNULL, stderr=subprocess.DEVNULL
    )
    try:
        assert wait_for(lambda: port.exists() and port.read_text(), 120), "the job service did not come up"
        yield f"127.0.0.1:{port.read_text()}"
    finally:
        service.terminate()
        service.wait(60)


@pytest.mark.parametrize("runner", ["FnApiRunner", "PortableRunner", "luminosity.LuminosityRunner"])
def test_the_same_content(runner: str, source: Path, tmp_path: Path, request: pytest.FixtureRequest) -> None:
    flags = [f"--runner={runner}"]
    if runner == "PortableRunner":
        flags += [f"--job_endpoint={request.getfixturevalue('job_service')}", "--environment_type=LOOPBACK"]
    if runner == "luminosity.LuminosityRunner":
        flags += ["--progress=off", "--cpu_workers=2"]
    with beam.Pipeline(options=PipelineOptions(flags)) as pipeline:
        table = pipeline | ReadTable(f"{source}/*.parquet", where=pc.field("id") < 2500)
        kept = table | MapTable(without_odd_ids)
        scored = kept | Enrich(score=Column(Linear(), ["a", "b"]), loud=Column(Shout(), "text", pa.string()))
        _ = scored | WriteTable(str(tmp_path / "out"), rows_per_file=700)
    found = ds.dataset(tmp_path / "out").to_table().sort_by("id")
    rows = ds.dataset(source).to_table(filter=pc.field("id") < 2500).sort_by("id").to_pandas()
    expected = rows[rows["id"] % 2 == 0]
    assert found["id"].to_pylist() == expected["id"].to_list()
    np.testing.assert_allclose(found["score"], expected[["a", "b"]].to_numpy() @ WEIGHTS)
    assert found["loud"].to_pylist() == [text.upper() for text in expected["text"]]
    assert all(pq.read_metadata(file).num_rows <= 700 for file in (tmp_path / "out").glob("*.parquet"))
