"""Run jobs with models on Beam's DirectRunner, and on Luminosity with one worker process and with two.

A second worker must not make a job slower. The jobs are those in which it once did: many small models by key, with
Luminosity's RunInference and with Beam's; a model for each of many keys with few rows; jitted functions over batches;
and a short table through a text model. ``python benchmarks/two_workers.py enrich`` runs one job only.
"""

from __future__ import annotations

import os
import pickle
import sys
import tempfile
import time
from collections.abc import Callable, Generator, Iterable, Iterator
from contextlib import contextmanager
from dataclasses import dataclass
from functools import partial
from pathlib import Path
from typing import Any

import _measure
import apache_beam as beam
import numpy as np
from apache_beam.ml.inference.base import KeyedModelHandler, KeyModelMapping
from apache_beam.options.pipeline_options import PipelineOptions

os.environ["HF_HUB_OFFLINE"] = "1"

Build = Callable[[beam.Pipeline, Path], None]

_RUNNERS = ("DirectRunner", "one worker", "two workers")
_SEPARATOR = ": "  # between a job and a runner, in the name of a side
_FEATURES = 8
_START_S = 1.0  # the time that worker processes may take to start
_LONG_S = 10.0  # DirectRunner's time from which Luminosity must not be slower


@dataclass(frozen=True)
class Job:
    """A pipeline to run on all sides; ``beams`` builds DirectRunner's if that differs."""

    about: str
    build: Build
    at_most: float
    """Two workers' time / one worker's."""
    beams: Build | None = None


# Models by key.


def save_model(folder: Path, name: str, slope: float) -> str:
    """Save a linear model that predicts ``slope`` times the sum of the features."""
    from sklearn.linear_model import LinearRegression

    path = folder / f"{name}.pkl"
    if not path.exists():
        inputs = np.random.default_rng(0).normal(size=(100, _FEATURES))
        model = LinearRegression(fit_intercept=False).fit(inputs, slope * inputs.sum(axis=1))
        path.write_bytes(pickle.dumps(model))
    return str(path)


def handler_of(keys: int, folder: Path) -> Any:
    from apache_beam.ml.inference.sklearn_inference import SklearnModelHandlerNumpy

    paths = {f"k{number}": save_model(folder, f"k{number}", number + 1.0) for number in range(keys)}
    return KeyedModelHandler([KeyModelMapping([key], SklearnModelHandlerNumpy(path)) for key, path in paths.items()])


def keyed_rows(rows: int, keys: int) -> Iterator[tuple[str, Any]]:
    for number in range(rows):
        yield f"k{number % keys}", np.full(_FEATURES, float(number // keys % 10))


def predict_by_key(pipeline: beam.Pipeline, folder: Path, *, rows: int, keys: int, ours: bool) -> None:
    """Predict each row with the model of its key, and check the sum of the predictions."""
    from apache_beam.ml.inference.base import RunInference as BeamsRunInference

    from luminosity import RunInference

    transform = RunInference if ours else BeamsRunInference
    expected = sum((number % keys + 1) * _FEATURES * (number // keys % 10) for number in range(rows))
    predicted: Any = (
        pipeline
        | beam.Create([None])
        | beam.FlatMap(lambda _: keyed_rows(rows, keys))
        | beam.Reshuffle()
        | transform(handler_of(keys, folder))
        | beam.MapTuple(lambda _, result: round(float(result.inference)))
    )
    _measure.check_count_and_sum(predicted, rows, expected)


def by_key(about: str, rows: int, keys: int, *, ours: bool, at_most: float) -> Job:
    build = partial(predict_by_key, rows=rows, keys=keys)
    return Job(about, partial(build, ours=ours), at_most, beams=partial(build, ours=False))


# Jitted functions over batches, as a talk about drift on Beam writes them.

_DRIFT_ROWS = 20_000
_COLUMNS = 64
_COMPONENTS = 16
_LANDMARKS = 256


class Project(beam.DoFn):
    """Projects batches of rows on principal components, and emits the mean of their kernel values."""

    def setup(self) -> None:
        import jax
        import jax.numpy as jnp

        random = np.random.default_rng(1)
        axes = jnp.asarray(np.linalg.qr(random.normal(size=(_COLUMNS, _COMPONENTS)))[0])
        landmarks = jnp.asarray(random.normal(size=(_LANDMARKS, _COMPONENTS)))

        self._pca = jax.jit(lambda rows: (rows - rows.mean(axis=1, keepdims=True)) @ axes)

        def rbf(points: Any) -> Any:
            squared = (points**2).sum(1)[:, None] + (landmarks**2).sum(1) - 2 * points @ landmarks.T
            return jnp.exp(-squared / (2 * _COMPONENTS)).sum(axis=0)

        self._rbf = jax.jit(rbf)

    def process(self, batch: list[Any]) -> Iterator[tuple[int, tuple[int, Any]]]:
        yield 0, (len(batch), np.asarray(self._rbf(self._pca(np.stack(batch)))))


def mmd(sides: tuple[int, dict[str, Iterable[tuple[int, Any]]]]) -> tuple[int, float]:
    """Return the number of rows, and the mean squared distance of both sides' kernel means."""
    counts, means = [], []
    for parts in sides[1].values():
        pairs = list(parts)
        counts.append(sum(count for count, _ in pairs))
        means.append(sum(values for _, values in pairs) / counts[-1])
    return sum(counts), float(((means[0] - means[1]) ** 2).mean())


def drift(pipeline: beam.Pipeline, folder: Path) -> None:
    def rows(seed: int) -> Iterator[Any]:
        random = np.random.default_rng(seed)
        for _ in range(_DRIFT_ROWS // 100):
            yield from random.normal(loc=seed / 10, size=(100, _COLUMNS)).astype(np.float32)

    def side(name: str, seed: int) -> Any:
        return (
            pipeline
            | f"Create {name}" >> beam.Create([seed])
            | f"Rows {name}" >> beam.FlatMap(rows)
            | f"Spread {name}" >> beam.Reshuffle()
            | f"Batch {name}" >> beam.BatchElements(min_batch_size=100, max_batch_size=100)
            | f"Project {name}" >> beam.ParDo(Project())
        )

    def check(found: tuple[int, float]) -> None:
        if found[0] != 2 * _DRIFT_ROWS or not 0 < found[1] < 1:
            raise ValueError(f"found {found}, expected {2 * _DRIFT_ROWS} rows and a distance between 0 and 1")

    sides = {"reference": side("reference", 1), "current": side("current", 2)}
    _ = sides | beam.CoGroupByKey() | beam.Map(mmd) | beam.Map(check)


# A short table through a text model.

_TEXTS = 300


def enrich(pipeline: beam.Pipeline, folder: Path) -> None:
    import pyarrow as pa
    from _texts import MODEL, Texts

    from luminosity import Column, Enrich, SentenceEmbedder

    embedder = SentenceEmbedder(MODEL)
    lines = Texts.read(embedder.tokenizer.whole.backend_tokenizer).make("skewed", _TEXTS)
    table = pipeline | beam.Create([pa.record_batch({"text": lines})])
    enriched = table | Enrich(semantic=Column(embedder, "text"))
    counted: Any = enriched | beam.FlatMap(lambda batch: [1] * batch.num_rows)
    _measure.check_count_and_sum(counted, _TEXTS, _TEXTS)


JOBS = {
    "two models": by_key("60,000 rows, two small models", 60_000, 2, ours=True, at_most=1.0),
    "two models, long": by_key("600,000 rows, two small models", 600_000, 2, ours=True, at_most=0.7),
    "Beam's, two models": by_key("60,000 rows, Beam's RunInference", 60_000, 2, ours=False, at_most=1.0),
    "many keys": by_key("1,000 keys with 10 rows and a model each", 10_000, 1000, ours=True, at_most=1.0),
    "jitted": Job("jitted functions over batches, then CoGroupByKey", drift, at_most=1.0),
    "enrich": Job("300 texts through MiniLM in Enrich", enrich, at_most=0.7),
}


def run(job: Job, runner: str) -> dict[str, float]:
    with saved_models() as folder:
        build = job.beams if runner == "DirectRunner" and job.beams else job.build
        pipeline = make_pipeline(runner)
        build(pipeline, folder)
        begun = time.perf_counter()
        pipeline.run().wait_until_finish()
        return {"seconds": time.perf_counter() - begun}


def make_pipeline(runner: str) -> beam.Pipeline:
    if runner == "DirectRunner":
        return beam.Pipeline("DirectRunner")
    from luminosity import LuminosityRunner

    workers = 1 if runner == "one worker" else 2
    return beam.Pipeline(LuminosityRunner(), PipelineOptions(["--progress=off", f"--cpu_workers={workers}"]))


@contextmanager
def saved_models() -> Generator[Path]:
    with tempfile.TemporaryDirectory() as folder:
        yield Path(folder)


def report(results: _measure.Results) -> None:
    _measure.print_table(results)
    for name, job in JOBS.items():
        if f"{name}{_SEPARATOR}{_RUNNERS[0]}" not in results:
            continue
        direct, one, two = (results[f"{name}{_SEPARATOR}{runner}"]["seconds"] for runner in _RUNNERS)
        _measure.print_figure(f"{name}: two workers / one", two / one, at_most=job.at_most)
        allowed = direct if direct >= _LONG_S else direct + _START_S
        what = "DirectRunner's time" if direct >= _LONG_S else f"DirectRunner's time and {_START_S:.0f} s"
        _measure.print_figure(f"{name}: two workers / {what}", two / allowed, at_most=1.0)


if __name__ == "__main__":
    chosen = dict(JOBS)
    if len(sys.argv) > 1 and sys.argv[1] in JOBS:
        chosen = {sys.argv[1]: JOBS[sys.argv.pop(1)]}
    sides: dict[str, _measure.Side] = {
        f"{name}{_SEPARATOR}{runner}": partial(run, job, runner) for name, job in chosen.items() for runner in _RUNNERS
    }
    _measure.main(sides, report)
