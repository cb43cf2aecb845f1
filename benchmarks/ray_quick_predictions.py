"""A million quick predictions from Parquet to Parquet on one running Ray cluster: ours, and Ray Data's.

The table, the model and the check are those of ``quick_predictions.py``: 1,000,000 rows of 8 features and a linear
model. All sides read and write the same folder, which all nodes see. Each side is a fresh process that imports its
libraries, connects to the cluster and then runs twice. The time of a run begins when the process is connected;
"process" is all of it, to the end of the first run. In the second run the processes that Ray keeps for this driver are
there already: these are Ray Data's best terms. All run in an empty folder: ours sends the working folder to the nodes.

Ray Data has three sides. As it comes: ``read_parquet`` and ``map_batches`` with a function and NumPy batches. Its
default reader in Ray 2.60 then puts all rows into one block, and one core does all the work, whatever
``override_num_blocks`` says. The two others read with its older reader and get two blocks a core: one with the
function, one with an actor per core and batches of 65,536 rows.
"""

from __future__ import annotations

import os
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from pathlib import Path
from typing import Any

import _measure
import _ray_cluster
import apache_beam as beam
import numpy as np
import psutil
from apache_beam.options.pipeline_options import PipelineOptions
from quick_predictions import FEATURES, check, make_table

from luminosity import Column, Enrich, Handler, LuminosityRunner, ReadTable, WriteTable

_NODES = [_ray_cluster.FakeNode(cpus=1), _ray_cluster.FakeNode(cpus=1)]
_CORES = 2
_BLOCKS = 2 * _CORES  # of Ray Data
_BATCH = 65_536  # rows, for an actor of Ray Data
_ROUNDS = 3
_FOLDER = "LUMINOSITY_BENCHMARK_FOLDER"  # the environment variable with the folder of the tables


class Linear(Handler[np.ndarray, float, np.ndarray]):
    columnar = True  # predict() gets a matrix instead of a list of rows.

    def __init__(self, file: str) -> None:
        super().__init__()
        self._file = file

    def load_model(self) -> np.ndarray:
        return np.load(self._file)

    def predict(self, model: np.ndarray, batch: np.ndarray, inference_args: object = None) -> np.ndarray:
        return batch @ model


class Score:
    """The same for Ray Data."""

    def __init__(self, file: str) -> None:
        self._weights = np.load(file)

    def __call__(self, batch: dict[str, np.ndarray]) -> dict[str, np.ndarray]:
        batch["score"] = np.column_stack([batch[f"f{place}"] for place in range(FEATURES)]) @ self._weights
        return batch


def twice(run: Callable[[Path, Path, Path], Any]) -> dict[str, float]:
    """Run, check the result, and do both again."""
    folder = Path(os.environ[_FOLDER])
    (folder / "empty").mkdir(exist_ok=True)
    os.chdir(folder / "empty")
    source, target, weights = folder / "source", folder / "target", folder / "weights.npy"
    began_s = psutil.Process().create_time()
    measured: dict[str, float] = {}
    for name in ("first run, s", "second run, s"):
        with _ray_cluster.CpuMeter() as meter:
            begun = time.perf_counter()
            run(source, target, weights)
            measured[name] = time.perf_counter() - begun
        measured[name.replace(", s", ", CPU")] = meter.seconds
        measured.setdefault("process, s", time.time() - began_s)  # from its start to the end of its first run
        check(target, source, weights)
        shutil.rmtree(target)
    return measured


def luminosity() -> dict[str, float]:
    _ray_cluster.connect()  # as the sides of Ray Data do, before their time begins
    return twice(ours)


def ours(source: Path, target: Path, weights: Path) -> None:
    options = PipelineOptions(["--progress=off", f"--ray_address={_ray_cluster.address()}"])
    with beam.Pipeline(LuminosityRunner(), options) as pipeline:
        table = pipeline | ReadTable(f"{source}/*.parquet")
        scored = table | Enrich(score=Column(Linear(str(weights)), [f"f{place}" for place in range(FEATURES)]))
        _ = scored | WriteTable(str(target))


def ray_data_as_it_comes() -> dict[str, float]:
    data = _ray_cluster.connect_ray_data()

    def run(source: Path, target: Path, weights: Path) -> None:
        table = data.read_parquet(str(source))
        table.map_batches(Score(str(weights)).__call__, batch_format="numpy").write_parquet(str(target))

    return twice(run)


def ray_data() -> dict[str, float]:
    data = _ray_cluster.connect_ray_data()

    def run(source: Path, target: Path, weights: Path) -> None:
        table = _ray_cluster.read_parquet(data, source, _BLOCKS)
        table.map_batches(Score(str(weights)).__call__, batch_format="numpy").write_parquet(str(target))

    return twice(run)


def ray_data_actors() -> dict[str, float]:
    data = _ray_cluster.connect_ray_data()

    def run(source: Path, target: Path, weights: Path) -> None:
        scores = _ray_cluster.read_parquet(data, source, _BLOCKS).map_batches(
            Score,
            fn_constructor_args=(str(weights),),
            batch_format="numpy",
            batch_size=_BATCH,
            compute=data.ActorPoolStrategy(size=_CORES),
            num_cpus=0,  # if actors took the cores, Ray Data would wait for ever for one to read with
        )
        scores.write_parquet(str(target))

    return twice(run)


def report(results: _measure.Results) -> None:
    _measure.print_table(results)
    ours = results["Luminosity"]
    theirs = {side: measured for side, measured in results.items() if side != "Luminosity"}
    best = {name: min(measured[name] for measured in theirs.values()) for name in ours}  # figure by figure
    for words, other in (("as it comes", theirs["Ray Data"]), ("at its best", best)):
        for name in ours:
            target = {"at_most": 0.5} if name == "first run, s" else {}
            label = f"of Ray Data's {words}, {name.removesuffix(', s')}"
            _measure.print_figure(label, ours[name] / other[name], **target)


if __name__ == "__main__":
    sides: dict[str, _measure.Side] = {
        "Luminosity": luminosity,
        "Ray Data": ray_data_as_it_comes,
        "Ray Data, function": ray_data,
        "Ray Data, actors": ray_data_actors,
    }
    if len(sys.argv) > 1:
        _ray_cluster.main(sides, report, _NODES)
    else:
        with tempfile.TemporaryDirectory(prefix="ray-quick-") as folder:
            make_table(Path(folder) / "source", Path(folder) / "weights.npy")
            os.environ[_FOLDER] = folder
            _ray_cluster.main(sides, report, _NODES, _ROUNDS)
