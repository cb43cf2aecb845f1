"""Real models through RunInference and the host, on both runners, predict the same as the model alone."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pytest
import torch
from apache_beam.metrics.metric import MetricsFilter
from apache_beam.testing.util import assert_that

from luminosity import Handler, JaxModelHandler, RunInference, SentenceEmbedder, TorchModelHandler
from tests.both_runners import Pipelines, counters
from tests.inference.handlers.test_torch import TinyConvNet, TinyTagger
from tests.inference.texts import MINILM, sentences

_ONE_WORKER = "--cpu_workers=1"  # each imports torch or JAX, which takes seconds


def check_against_alone(pipelines: Pipelines, handler: Handler[Any, Any, Any], examples: list[Any]) -> dict[str, int]:
    """Check that a pipeline predicts the same as the handler for each example alone; return the run's counters."""
    model = handler.load_model()
    expected = {
        number: next(iter(handler.run_inference([example], model))).inference for number, example in enumerate(examples)
    }

    def check(found: list[tuple[int, Any]]) -> None:
        assert sorted(number for number, _ in found) == sorted(expected)
        for number, inference in found:
            _assert_close(inference, expected[number])

    from apache_beam.ml.inference.base import KeyedModelHandler

    with pipelines(_ONE_WORKER) as (pipeline, run):
        keyed = pipeline | beam.Create(list(enumerate(examples))) | RunInference(KeyedModelHandler(handler))
        assert_that(keyed | beam.MapTuple(lambda number, result: (number, result.inference)), check)
    sizes = run.result.metrics().query(MetricsFilter().with_name("inference_request_batch_byte_size"))
    assert sum(each.committed.sum for each in sizes["distributions"]) > 0
    return counters(run.result)


def _assert_close(found: Any, expected: Any) -> None:
    if isinstance(expected, dict):
        assert found.keys() == expected.keys()
        for name in expected:
            _assert_close(found[name], expected[name])
    else:
        np.testing.assert_allclose(found, expected, atol=1e-5)


@pytest.mark.alone
def test_sentences(pipelines: Pipelines) -> None:
    found = check_against_alone(pipelines, SentenceEmbedder(MINILM, device="CPU"), sentences(60))
    assert found["num_inferences"] == 60
    assert found["batches"] < 60
    assert found["padded_cost"] >= found["useful_cost"] > 0


def test_images(pipelines: Pipelines, tmp_path: Path) -> None:
    torch.manual_seed(0)
    torch.save(TinyConvNet().state_dict(), path := str(tmp_path / "net.pt"))
    images = [np.random.default_rng(seed).random((3, 16, 16), np.float32) for seed in range(40)]
    handler = TorchModelHandler(path, model_class=TinyConvNet, device="CPU")
    assert check_against_alone(pipelines, handler, images)["num_inferences"] == 40


def test_tokens_of_sequences_that_differ_in_length(pipelines: Pipelines, tmp_path: Path) -> None:
    torch.manual_seed(0)
    torch.save(TinyTagger().state_dict(), path := str(tmp_path / "tagger.pt"))
    handler = TorchModelHandler(path, model_class=TinyTagger, device="CPU", mask="attention_mask", warm_up_example=None)
    rng = np.random.default_rng(0)
    found = check_against_mean(pipelines, handler, [rng.integers(1, 50, length) for length in (3, 9, 5, 30, 1, 30, 7)])
    assert found["useful_cost"] == 85


def check_against_mean(pipelines: Pipelines, handler: Any, examples: list[Any]) -> dict[str, int]:
    """The scores of padding are dropped, and the prediction for the whole sequence does not depend on it."""
    model = handler.load_model()
    expected = sorted(
        float(next(iter(handler.run_inference([example], model))).inference["mean"].sum()) for example in examples
    )

    def check(found: list[float]) -> None:
        np.testing.assert_allclose(sorted(found), expected, atol=1e-5)

    with pipelines(_ONE_WORKER) as (pipeline, run):
        results = pipeline | beam.Create(examples) | RunInference(handler)
        assert_that(results | beam.Map(lambda result: float(result.inference["mean"].sum())), check)
    return counters(run.result)


def _linear(parameters: Any, batch: Any) -> Any:
    return batch @ parameters["weights"] + parameters["bias"]


def test_a_pure_function_of_jax(pipelines: Pipelines) -> None:
    parameters = {"weights": np.arange(8, dtype=np.float32), "bias": np.float32(1)}
    rows = [np.random.default_rng(seed).random(8, np.float32) for seed in range(100)]
    assert check_against_alone(pipelines, JaxModelHandler(_linear, parameters), rows)["num_inferences"] == 100
