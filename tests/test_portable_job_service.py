"""The transforms on Beam's portable job API, as on Flink and Spark: the results are those of LuminosityRunner.

Each pipeline goes to a job service, a process of its own, with ``PortableRunner``. Beam's workers run the steps: one
for each environment, and so for each set of resource hints. None of them knows the engine.
"""

from __future__ import annotations

import os
import subprocess
import sys
from collections.abc import Callable, Iterator
from pathlib import Path
from typing import Any

import apache_beam as beam
import lancedb
import numpy as np
import psutil
import pyarrow as pa
import pyarrow.parquet as pq
import pytest
import qdrant_edge
from apache_beam.options.pipeline_options import PipelineOptions
from apache_beam.transforms.window import FixedWindows

from luminosity import (
    AddRowIds,
    Column,
    Enrich,
    Handler,
    MapTable,
    ReadKafka,
    ReadTable,
    RowsFromTable,
    RunInference,
    TableFromRows,
    WindowTable,
    WriteKafka,
    WriteLance,
    WriteQdrant,
    WriteTable,
)
from luminosity.drift import MMD, ApplyPCA, DriftHistory, FitPCA, MMDTest, RecordDrift
from luminosity.evaluation import Describe, Evaluate
from luminosity.testing import KafkaBroker
from tests.both_runners import counters
from tests.processes import wait_for
from tests.runners import collect_all

pytestmark = pytest.mark.alone

# The service starts the workers, or this process has them, on threads.
_PROCESSES = (
    "--environment_type=beam:env:harness_subprocess_python:v1",
    f"--environment_config={sys.executable} -m apache_beam.runners.worker.sdk_worker_main",
)
_LOOPBACK = "--environment_type=LOOPBACK"
_START_TIMEOUT_S = 60
_STOP_TIMEOUT_S = 20
_REPOSITORY = Path(__file__).parents[1]

Collections = dict[str, beam.PCollection[Any]]


class Lengths(Handler[str, int, object]):
    """Returns the lengths of texts; fails for one of them. Costs differ, so batches have another order than rows."""

    def load_model(self) -> object:
        return object()

    def prepare(self, block: list[str]) -> list[str]:
        return [text.upper() for text in block]

    def cost(self, prepared: list[str]) -> Any:
        return np.array([len(text) for text in prepared])

    def predict(self, model: object, batch: list[str], inference_args: dict[str, Any] | None = None) -> list[int]:
        if "TEXT 17" in batch:
            raise ValueError("poison")
        return [len(text) for text in batch]


class Doubles(Handler[Any, Any, object]):
    """Doubles numbers, a whole column at a time."""

    columnar = True

    def load_model(self) -> object:
        return object()

    def predict(self, model: object, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        import pyarrow.compute as pc

        return pc.multiply(batch, 2.0)


@pytest.fixture(scope="module")
def job_service(tmp_path_factory: pytest.TempPathFactory) -> Iterator[str]:
    """A job service on loopback, ended with all its workers when the tests are done; its address."""
    folder = tmp_path_factory.mktemp("job-service")
    port_file, log = folder / "port", folder / "log"
    command = [sys.executable, "-m", "apache_beam.runners.portability.local_job_service_main", "--port=0"]
    path = os.pathsep.join([str(_REPOSITORY), *filter(None, [os.environ.get("PYTHONPATH")])])  # for the handlers above
    with log.open("w") as file:
        service = subprocess.Popen(
            [*command, f"--port_file={port_file}", f"--staging_dir={folder / 'staged'}"],
            stdout=file,
            stderr=file,
            env={**os.environ, "PYTHONPATH": path},
        )
    process = psutil.Process(service.pid)
    try:
        if not wait_for(lambda: service.poll() is not None or port_file.exists(), _START_TIMEOUT_S):
            pytest.fail("the job service did not say its port")
        assert service.poll() is None, log.read_text()[-3000:]
        yield f"localhost:{port_file.read_text().strip()}"
        left = wait_for(lambda: not process.children(recursive=True), _STOP_TIMEOUT_S)
        assert left, f"jobs left processes: {process.children(recursive=True)}"
    finally:
        for child in process.children(recursive=True):
            child.kill()
        service.terminate()
        try:
            service.wait(_STOP_TIMEOUT_S)
        except subprocess.TimeoutExpired:
            service.kill()
            service.wait(_STOP_TIMEOUT_S)


def on_both(
    build: Callable[[beam.Pipeline, Path], Collections], folder: Path, address: str, *environment: str
) -> list[tuple[dict[str, list[Any]], dict[str, int], Path]]:
    """Run a pipeline on the job service, then on LuminosityRunner: elements, counters and the folder of each run."""
    runs = {
        "portable": ("PortableRunner", [f"--job_endpoint={address}", *environment]),
        "luminosity": ("luminosity.LuminosityRunner", ["--progress=off", "--cpu_workers=1"]),
    }
    found: list[Any] = []
    for name, (runner, flags) in runs.items():
        (own := folder / name).mkdir()
        pipeline = beam.Pipeline(runner, PipelineOptions(flags))
        elements, result = collect_all(lambda pipeline, own=own: build(pipeline, own), own, pipeline)
        found.append(({key: sorted(values, key=repr) for key, values in elements.items()}, counters(result), own))
    return found


def rows_of(*paths: Path) -> list[dict[str, Any]]:
    return sorted((row for path in paths for row in pq.read_table(path).to_pylist()), key=lambda row: row["id"])


def test_tables_through_models_into_files_and_stores(job_service: str, tmp_path: Path) -> None:
    """Steps with resource hints have an environment, and so a worker process, of their own."""
    texts = [f"text {number}" for number in range(60)]
    table = pa.table({"number": [float(number) for number in range(60)], "text": texts})
    pq.write_table(table, tmp_path / "in.parquet", row_group_size=20)

    def shifted(batch: pa.RecordBatch) -> pa.RecordBatch:
        vectors = pa.array([[value, 1.0] for value in batch["number"].to_pylist()], pa.list_(pa.float32(), 2))
        return batch.append_column("vector", vectors)

    def build(pipeline: beam.Pipeline, folder: Path) -> Collections:
        read = pipeline | ReadTable(tmp_path / "in.parquet") | AddRowIds(columns=["text"])
        columns = {
            "length": Column(Lengths(), "text", pa.int64()),
            "double": Column(Doubles(), "number", pa.float64()),
        }
        enrich = Enrich(**columns).with_exception_handling().with_resource_hints(min_ram="100MB")
        good, bad = read | enrich
        stored = good | MapTable(shifted)
        rows = stored | RowsFromTable()
        timed = rows | beam.Map(lambda row: beam.window.TimestampedValue(row, row["number"])).with_output_types(dict)
        again = timed | TableFromRows(with_timestamps=True) | WindowTable(FixedWindows(30))
        counts = again | beam.Map(lambda batch: batch.num_rows) | beam.CombineGlobally(sum).without_defaults()
        return {
            "files": stored | WriteTable(folder / "out") | beam.Map(lambda path: str(path).startswith(str(folder))),
            "points": stored
            | WriteQdrant(folder / "store", "things", vectors="vector")
            | "Sum" >> beam.CombineGlobally(sum),
            "lance": stored | WriteLance(folder / "rows.lance") | beam.Map(os.path.basename),
            "windows": counts,
            "bad": bad | beam.FlatMap(lambda batch: batch.select(["text", "number"]).to_pylist()),
        }

    runs = on_both(build, tmp_path, job_service, *_PROCESSES)
    (portable, counted, folder), (expected, counted_here, folder_here) = runs
    assert portable == expected
    assert sum(portable["windows"]) == 59
    assert portable["bad"] == [{"text": "text 17", "number": 17.0}]
    written = rows_of(folder / "out")
    assert written == rows_of(folder_here / "out")
    assert [row["double"] == 2 * row["number"] and row["length"] == len(row["text"]) for row in written] == [True] * 59
    for own in (folder, folder_here):
        shard = qdrant_edge.EdgeShard.load(str(own / "store" / "things"))
        assert shard.info().points_count == 59
        shard.close()
        assert lancedb.connect(own).open_table("rows").count_rows() == 59
    assert counted["rows_read"] == counted_here["rows_read"] == 60


def test_drift_and_evaluation(job_service: str, tmp_path: Path) -> None:
    random = np.random.default_rng(0)
    x, y = random.normal(size=(300, 4)), random.normal(0.5, 1, size=(200, 4))
    labels = [{"y": "ab"[number % 2], "p": "ab"[number % 3 % 2], "n": number} for number in range(90)]

    def build(pipeline: beam.Pipeline, folder: Path) -> Collections:
        current = pipeline | "Current" >> beam.Create([y[:80], y[80:]])
        reference = pipeline | "Reference" >> beam.Create([x[:150], x[150:]])
        tested = current | MMDTest(reference, precision="float64")
        components = reference | FitPCA(2)
        rows = pipeline | "Rows" >> beam.Create(labels)
        return {
            "test": tested | "Test" >> beam.Map(lambda result: (result.mmd2, result.p_value, result.verdict)),
            "mmd": current | MMD(x, precision="float64") | "Number" >> beam.Map(float),
            "components": current | ApplyPCA(components) | "Shape" >> beam.Map(lambda rows: np.shape(rows)),
            "recorded": tested | RecordDrift(folder / "drift.sqlite", reference="r") | "None" >> beam.Map(lambda _: 1),
            "evaluation": rows | Evaluate("y", "p") | "Metrics" >> beam.Map(lambda found: found.as_dict()),
            "description": rows | Describe() | "Columns" >> beam.Map(lambda found: found.as_dict()),
        }

    runs = on_both(build, tmp_path, job_service, _LOOPBACK)
    (portable, counted, folder), (expected, counted_here, folder_here) = runs
    for values in (portable, expected):
        ((values["mmd2"], values["p"], verdict),) = values.pop("test")
        assert verdict == "drift"
    for name in ("mmd2", "p", "mmd"):
        assert portable.pop(name) == pytest.approx(expected.pop(name))
    assert portable == expected
    assert [each.verdict for own in (folder, folder_here) for each in DriftHistory(own / "drift.sqlite").last("r")] == [
        "drift",
        "drift",
    ]
    assert counted["reference_rows"] == counted_here["reference_rows"] == 600


def test_records_of_kafka_through_a_model(job_service: str, tmp_path: Path) -> None:
    with KafkaBroker({"in": 2, "portable": 1, "luminosity": 1}) as broker:
        broker.produce_many("in", [{"key": f"k{n}", "value": f"value {n}", "partition": n % 2} for n in range(20)])

        def build(pipeline: beam.Pipeline, folder: Path) -> Collections:
            records = pipeline | ReadKafka(broker.bootstrap_servers, ["in"], stop="now")
            texts = records | "Text" >> beam.Map(lambda record: record.value.decode())
            predictions = texts | RunInference(Lengths())
            pairs = predictions | "Pair" >> beam.Map(lambda found: (found.example, str(found.inference)))
            return {"written": pairs | WriteKafka(broker.bootstrap_servers, folder.name) | beam.combiners.ToList()}

        (_, counted, _), (_, counted_here, _) = on_both(build, tmp_path, job_service, _LOOPBACK)
        sent, expected = ([(r.key, r.value) for r in broker.consume(name)] for name in ("portable", "luminosity"))
    assert sorted(sent) == sorted(expected)
    assert sorted(sent)[0] == (b"value 0", b"7")
    for name in ("records_read", "num_inferences"):
        assert counted[name] == counted_here[name] == 20
