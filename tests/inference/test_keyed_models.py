"""A model for each key, with its own batches, hints and settings."""

from __future__ import annotations

from typing import Any

import apache_beam as beam
import pytest
from apache_beam.ml.inference.base import KeyedModelHandler, KeyModelMapping, PredictionResult
from apache_beam.testing.util import assert_that, equal_to

from luminosity import Handler, RunInference
from luminosity.inference.adapting.adapt import ModelSet
from tests.both_runners import Pipelines, counters


class Times(Handler[int, int, int]):
    """Multiplies, and returns the size of the batch."""

    def __init__(self, factor: int, hints: dict[str, str] | None = None, **options: Any) -> None:
        super().__init__(**options)
        self._factor = factor
        self._hints = hints or {}

    @property
    def model_id(self) -> str:
        return f"times {self._factor}"

    def get_resource_hints(self) -> dict[str, str]:
        return self._hints

    def load_model(self) -> int:
        return self._factor

    def memory(self, model: int) -> int:
        return 1000

    def predict(self, model: int, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        return [(model * example, len(batch)) for example in batch]


def keyed(*models: Times, most: int | None = None) -> KeyedModelHandler[Any, Any, Any, Any]:
    mappings = [KeyModelMapping([f"k{number}", f"also {number}"], model) for number, model in enumerate(models)]
    return KeyedModelHandler(mappings, max_models_per_worker_hint=most)


def test_each_key_gets_its_model_and_its_own_batches(pipelines: Pipelines) -> None:
    handler = keyed(Times(2, max_batch_size=1), Times(3, max_batch_size=7))
    examples = [(key, number) for number in range(100) for key in ("k0", "also 0", "k1")]
    with pipelines() as (pipeline, run):
        results = pipeline | beam.Create(examples, reshuffle=False) | RunInference(handler)

        def right(result: tuple[str, PredictionResult]) -> bool:
            key, predicted = result
            factor, most = (3, 7) if key == "k1" else (2, 1)
            value, batch = predicted.inference
            return value == factor * predicted.example and batch <= most and predicted.model_id == f"times {factor}"

        assert_that(results | beam.Map(right), equal_to([True] * 300))
    found = counters(run.result)
    assert found["num_inferences"] == 300
    assert found["k0-_num_inferences"] == 200
    assert found["k1-_num_inferences"] == 100


def test_few_fit_and_all_answer(pipelines: Pipelines) -> None:
    handler = keyed(*(Times(factor) for factor in range(12)))
    examples = [(f"k{number % 12}", number) for number in range(600)]
    # Eight models in two workers, four in each process.
    with pipelines("--model_memory_budget=8000") as (pipeline, _):
        results = pipeline | beam.Create(examples) | RunInference(handler)
        values = results | beam.Map(lambda result: (result[1].example, result[1].inference[0]))
        assert_that(values, equal_to([(number, number * (number % 12)) for number in range(600)]))


def test_most_models_at_once(pipelines: Pipelines) -> None:
    handler = keyed(*(Times(factor) for factor in range(5)), most=1)
    with pipelines() as (pipeline, _):
        results = pipeline | beam.Create([(f"k{number % 5}", number) for number in range(50)]) | RunInference(handler)
        assert_that(results | beam.combiners.Count.Globally(), equal_to([50]))


def test_a_key_without_a_model_names_those_that_have_one(pipelines: Pipelines) -> None:
    expected = r"no model has the key 'k9'; the KeyedModelHandler maps 'k0', 'also 0'"
    with pytest.raises(Exception, match=expected), pipelines() as (pipeline, _):
        _ = pipeline | beam.Create([("k9", 1)]) | RunInference(keyed(Times(1)))


def test_of_many_keys_the_one_that_was_meant_is_named_first() -> None:
    models = ModelSet(KeyedModelHandler([KeyModelMapping([f"customer {n}"], Times(n)) for n in range(30)]))
    with pytest.raises(
        KeyError, match=r"no model has the key 'custmer 17'; the KeyedModelHandler maps 'customer 17', "
    ):
        models.name_of_key("custmer 17")


def test_a_key_without_a_model_is_a_dead_letter(pipelines: Pipelines) -> None:
    with pipelines() as (pipeline, _):
        examples = pipeline | beam.Create([("k9", 1), ("k0", 2), 3])
        good, bad = examples | RunInference(keyed(Times(1))).with_exception_handling()
        assert_that(good | beam.Map(lambda result: result[0]), equal_to(["k0"]), "good")
        assert_that(bad.failed_inferences | beam.Map(lambda letter: letter[0]), equal_to([[("k9", 1)], [3]]), "bad")


def test_keys_that_ask_for_different_resources_get_different_steps() -> None:
    pipeline = beam.Pipeline("FnApiRunner")
    handler = keyed(Times(1, {"min_ram": "1GB"}), Times(2), Times(3, {"min_ram": "1GB"}))
    _ = pipeline | beam.Create([("k0", 1)]) | RunInference(handler)
    proto = pipeline.to_runner_api()
    hints = {
        transform.unique_name: [
            hint.decode() for hint in proto.components.environments[transform.environment_id].resource_hints.values()
        ]
        for transform in proto.components.transforms.values()
        if transform.unique_name.startswith("RunInference/Infer")
    }
    assert {name: "1000000000" in values for name, values in hints.items()} == {
        "RunInference/Infer 1": True,
        "RunInference/Infer 2": False,
    }


def test_different_resources_give_all_results(pipelines: Pipelines) -> None:
    handler = keyed(Times(1, {"min_ram": "100MB"}), Times(2))
    with pipelines() as (pipeline, _):
        results = pipeline | beam.Create([("k0", 1), ("k1", 1)]) | RunInference(handler)
        assert_that(
            results | beam.Map(lambda result: (result[0], result[1].inference[0])), equal_to([("k0", 1), ("k1", 2)])
        )
