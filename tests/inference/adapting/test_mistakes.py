"""Common mistakes raise early errors that say what to do."""

from __future__ import annotations

from collections.abc import Iterable
from pathlib import Path
from typing import Any

import apache_beam as beam
import pytest
from apache_beam.ml.inference.base import KeyedModelHandler

from luminosity import Handler, LuminosityRunner, RunInference, SentenceEmbedder
from luminosity.errors import ModelUnavailable, StepFailed


class Numbers(Handler[str, Any, int]):
    def load_model(self) -> int:
        return 1  # A model, not an example: the error must not name it as an example.

    def predict(self, model: int, batch: list[str], inference_args: dict[str, Any] | None = None) -> list[int]:
        return [int(each) for each in batch]


class Forgotten(Handler[str, Any, int]):
    def load_model(self) -> int:
        return 1


class BeamStyle(Forgotten):
    def run_inference(self, batch: Any, model: Any, inference_args: Any = None) -> Iterable[Any]:
        return batch


def test_a_handler_without_predict_is_refused_before_anything_runs() -> None:
    with pytest.raises(TypeError, match=r"Forgotten has no method `predict"):
        RunInference(Forgotten())
    with pytest.raises(TypeError, match=r"BeamStyle has no method.*needs only the run_inference"):
        RunInference(BeamStyle())
    with pytest.raises(TypeError, match=r"Forgotten has no method"):
        _ = beam.Pipeline() | beam.Create([("key", "1")]) | RunInference(KeyedModelHandler(Forgotten()))


def test_what_is_no_handler_is_refused() -> None:
    with pytest.raises(
        TypeError, match=r"found the class Numbers, expected an instance of it; call it: Numbers\(\.\.\.\)"
    ):
        RunInference(Numbers)  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]
    with pytest.raises(TypeError, match=r"found 'model.pkl', expected a ModelHandler"):
        RunInference("model.pkl")  # type: ignore[arg-type]  # pyright: ignore[reportArgumentType]


def test_a_misspelt_option_of_ones_own_handler() -> None:
    with pytest.raises(TypeError, match=r"'max_batch_sise'; did you mean 'max_batch_size'"):
        Numbers(max_batch_sise=8)  # type: ignore[call-arg]  # pyright: ignore[reportCallIssue]
    assert Numbers(max_batch_size=8).batch_elements_kwargs()["max_batch_size"] == 8


def test_the_example_at_fault_is_named_not_the_model() -> None:
    with pytest.raises(StepFailed) as caught, beam.Pipeline(runner=LuminosityRunner()) as pipeline:
        _ = pipeline | beam.Create(["three"]) | RunInference(Numbers())
    assert "element: 'three'" in str(caught.value)
    with pytest.raises(StepFailed) as caught, beam.Pipeline(runner=LuminosityRunner()) as pipeline:
        _ = pipeline | beam.Create([["1", "three"]]) | beam.FlatMap(lambda both: both) | RunInference(Numbers())
    assert "element: one of a batch of 2" in str(caught.value)


def test_a_model_that_is_not_there(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    with pytest.raises(ModelUnavailable, match=r"'/nowhere/model': found no file or folder '/nowhere/model'"):
        SentenceEmbedder("/nowhere/model").load_model()
    monkeypatch.setenv("HOME", str(tmp_path))
    (tmp_path / "model").mkdir()
    with pytest.raises(ModelUnavailable, match=f"pass '{tmp_path}/model': `~` is not expanded"):
        SentenceEmbedder("~/model").load_model()


def test_a_name_that_the_hub_does_not_know() -> None:
    offline: Any = {"local_files_only": True}
    with pytest.raises(ModelUnavailable, match=r"'org/no-such-model': found no folder .*, no copy in"):
        SentenceEmbedder("org/no-such-model", load_model_args=offline).load_model()
