"""Beam's RunInference with a model for each key: which process loads a model, and which one computes."""

from __future__ import annotations

import json
import os
from collections import Counter
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pytest
from apache_beam.ml.inference.base import KeyedModelHandler, KeyModelMapping, ModelHandler, RunInference
from apache_beam.options.pipeline_options import PipelineOptions

from luminosity import LuminosityRunner
from luminosity.engine.workers.sdk import beam_models
from tests.marks import meet, note, notes

_KEYS = 3
_ROWS = 300


class Model:
    """Says in which process it computes."""

    def __init__(self, size: int) -> None:
        self._memory = b"x" * size

    def predict(self, count: int) -> list[int]:
        return [os.getpid()] * count


class Beams(ModelHandler[int, tuple[int, int], Model]):
    """Notes each load. The first batch of a worker waits until every worker has rows, which the engine gives to all."""

    def __init__(self, folder: Path, size: int = 0, workers: int = 2, **options: Any) -> None:
        super().__init__(**options)
        self._folder, self._size, self._workers = folder, size, workers

    def load_model(self) -> Model:
        note(self._folder / "loads", os.getpid())
        return Model(self._size)

    def run_inference(
        self, batch: Sequence[int], model: Model, inference_args: dict[str, Any] | None = None
    ) -> list[tuple[int, int]]:
        meet(self._folder / "computes", self._workers)
        return [(os.getpid(), computed) for computed in model.predict(len(batch))]


def run(
    folder: Path, handler: KeyedModelHandler[Any, Any, Any, Any], workers: int = 2, *flags: str
) -> list[tuple[int, int]]:
    """Predict all rows; return the process of the worker and that of the model, for each row."""
    options = PipelineOptions(["--progress=off", f"--cpu_workers={workers}", *flags])
    with beam.Pipeline(LuminosityRunner(), options) as pipeline:
        rows = pipeline | beam.Create([(f"k{n % _KEYS}", n) for n in range(_ROWS)]) | beam.Reshuffle()
        predicted = rows | RunInference(handler) | beam.MapTuple(lambda _, pids: json.dumps(pids))
        _ = predicted | beam.io.WriteToText(str(folder / "results"))
    found = [tuple(json.loads(line)) for part in folder.glob("results*") for line in part.read_text().splitlines()]
    assert len(found) == _ROWS
    return found


def keyed(handler: Beams, **options: Any) -> KeyedModelHandler[Any, Any, Any, Any]:
    return KeyedModelHandler([KeyModelMapping([f"k{n}"], handler) for n in range(_KEYS)], **options)


def loads(folder: Path) -> Counter[int]:
    return Counter(map(int, notes(folder / "loads")))


def test_each_worker_computes_with_its_own_small_models(tmp_path: Path) -> None:
    found = run(tmp_path, keyed(Beams(tmp_path)))
    assert all(worker == model for worker, model in found)
    assert len({worker for worker, _ in found}) == 2
    assert max(loads(tmp_path).values()) <= _KEYS


def test_a_single_worker_calls_no_proxy(tmp_path: Path) -> None:
    found = run(tmp_path, keyed(Beams(tmp_path, workers=1)), workers=1)
    assert len(set(found)) == 1
    assert list(loads(tmp_path).values()) == [_KEYS]


def test_large_models_are_shared_as_their_author_says(tmp_path: Path) -> None:
    found = run(tmp_path, keyed(Beams(tmp_path, large_model=True)))
    assert len({worker for worker, _ in found}) == 2
    assert len({model for _, model in found}) == 1
    assert list(loads(tmp_path).values()) == [_KEYS]


def test_models_that_turn_out_large_are_shared(tmp_path: Path) -> None:
    models = keyed(Beams(tmp_path, size=30_000_000), max_models_per_worker_hint=_KEYS)
    found = run(tmp_path, models, 2, "--model_memory_budget=40MB")  # of which 10 MB are for a worker's small models
    assert len({worker for worker, _ in found}) == 2
    assert len({model for _, model in found}) == 1
    assert sum(loads(tmp_path).values()) == 2 * _KEYS, "each model is loaded once to be measured, and once to be shared"


class Counts(Beams):
    def get_num_bytes(self, batch: Sequence[Any]) -> int:
        return 7


def test_the_bytes_of_large_batches_are_estimated(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(ModelHandler, "get_num_bytes", ModelHandler.get_num_bytes)  # given back after the test
    batches: list[Any] = [
        [np.full(4, n) for n in range(1000)],
        ["text " * (n % 50) for n in range(1001)],
        list(range(10)),
        np.zeros((1000, 4)),
    ]
    exact = [Beams(tmp_path).get_num_bytes(batch) for batch in batches]
    for _ in range(2):
        beam_models.count_bytes_of_samples()
        found = [Beams(tmp_path).get_num_bytes(batch) for batch in batches]
        assert found[:2] == pytest.approx(exact[:2], rel=0.15)
        assert found[2:] == exact[2:]
    assert Counts(tmp_path).get_num_bytes(batches[0]) == 7
    pickled: list[int] = []
    monkeypatch.setattr("pickle.dumps", lambda batch: pickled.append(len(batch)) or b"")
    Beams(tmp_path).get_num_bytes(batches[0])
    assert pickled[0] <= 64
