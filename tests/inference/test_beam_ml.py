"""Beam's own handlers and machine-learning transforms run here: those that docs/beam-ml.md says run.

All of them run in one pipeline, which takes seconds instead of a minute.
"""

from __future__ import annotations

import importlib.util
import json
import pickle
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import apache_beam as beam
import apache_beam.ml.inference
import numpy as np
import pytest
from apache_beam.ml.inference.base import KeyedModelHandler
from apache_beam.ml.inference.base import RunInference as BeamsRunInference
from qdrant_client import QdrantClient, models

import luminosity
from luminosity.errors import MissingExtra
from tests.docs_pages import REPOSITORY
from tests.inference.texts import MINILM, save_with_tokenizer, tiny_bert_config

_TEXTS = ["a short text", "another text"]
_CASES: dict[str, Callable[[Any, Path], Any]] = {}


def _case(name: str) -> Callable[[Any], Any]:
    def register(function: Callable[[Any, Path], Any]) -> Any:
        _CASES[name] = function
        return function

    return register


def _predict(pipeline: Any, handler: Any, examples: list[Any], plain: Callable[[Any], Any]) -> Any:
    """Predict with Beam's RunInference and with ours; both results are the value of the case."""
    both = [
        pipeline
        | f"{step} examples" >> beam.Create(examples, reshuffle=False)
        | f"{step} inference" >> transform(handler)
        | f"{step} value" >> beam.Map(lambda result: plain(result.inference))
        for step, transform in (("beams", BeamsRunInference), ("ours", luminosity.RunInference))
    ]
    return tuple(both) | beam.Flatten()


@_case("SklearnModelHandlerNumpy")
def _sklearn(pipeline: Any, folder: Path) -> Any:
    from apache_beam.ml.inference.sklearn_inference import SklearnModelHandlerNumpy

    return _predict(pipeline, SklearnModelHandlerNumpy(_doubling(folder)), [np.array([3.0])], lambda y: round(float(y)))


@_case("SklearnModelHandlerPandas")
def _sklearn_pandas(pipeline: Any, folder: Path) -> Any:
    import pandas as pd
    from apache_beam.ml.inference.sklearn_inference import SklearnModelHandlerPandas

    frame = pd.DataFrame({"x": [3.0]})
    return _predict(pipeline, SklearnModelHandlerPandas(_doubling(folder)), [frame], lambda y: round(float(y)))


@_case("KeyedModelHandler")
def _keyed(pipeline: Any, folder: Path) -> Any:
    from apache_beam.ml.inference.sklearn_inference import SklearnModelHandlerNumpy

    handler = KeyedModelHandler(SklearnModelHandlerNumpy(_doubling(folder)))
    results = pipeline | beam.Create([("a", np.array([3.0]))]) | BeamsRunInference(handler)
    return results | "value" >> beam.Map(lambda pair: [pair[0], round(float(pair[1].inference))])


@_case("PytorchModelHandlerTensor")
def _torch(pipeline: Any, folder: Path) -> Any:
    import torch
    from apache_beam.ml.inference.pytorch_inference import PytorchModelHandlerTensor

    path = folder / "linear.pt"
    torch.save({"weight": torch.tensor([[2.0]]), "bias": torch.tensor([0.0])}, path)
    handler = PytorchModelHandlerTensor(
        state_dict_path=str(path), model_class=torch.nn.Linear, model_params={"in_features": 1, "out_features": 1}
    )
    return _predict(pipeline, handler, [torch.tensor([3.0])], float)


@_case("PytorchModelHandlerKeyedTensor")
def _torch_keyed(pipeline: Any, folder: Path) -> Any:
    import torch
    from apache_beam.ml.inference.pytorch_inference import PytorchModelHandlerKeyedTensor

    path = folder / "product.pt"
    torch.save({}, path)
    handler = PytorchModelHandlerKeyedTensor(state_dict_path=str(path), model_class=_product_class(), model_params={})
    return _predict(pipeline, handler, [{"a": torch.tensor([3.0]), "b": torch.tensor([2.0])}], float)


@_case("OnnxModelHandlerNumpy")
def _onnx(pipeline: Any, folder: Path) -> Any:
    import onnx
    from apache_beam.ml.inference.onnx_inference import OnnxModelHandlerNumpy
    from onnx import TensorProto, helper

    node = helper.make_node("Add", ["x", "x"], ["y"])
    values = [helper.make_tensor_value_info(name, TensorProto.FLOAT, [None, 1]) for name in "xy"]
    graph = helper.make_graph([node], "doubling", values[:1], values[1:])
    model = helper.make_model(graph, opset_imports=[helper.make_opsetid("", 13)], ir_version=8)
    onnx.save(model, folder / "doubling.onnx")
    handler = OnnxModelHandlerNumpy(str(folder / "doubling.onnx"))
    return _predict(pipeline, handler, [np.array([3.0], dtype=np.float32)], lambda y: float(y[0]))


@_case("HuggingFaceModelHandlerTensor")
def _hugging_face(pipeline: Any, folder: Path) -> Any:
    import torch
    from apache_beam.ml.inference.huggingface_inference import HuggingFaceModelHandlerTensor
    from transformers import AutoModel

    handler = HuggingFaceModelHandlerTensor(model_uri=_encoder(folder), model_class=AutoModel, device="CPU")
    return _predict(pipeline, handler, [torch.tensor([101, 2023, 102])], _shape)


@_case("HuggingFaceModelHandlerKeyedTensor")
def _hugging_face_keyed(pipeline: Any, folder: Path) -> Any:
    import torch
    from apache_beam.ml.inference.huggingface_inference import HuggingFaceModelHandlerKeyedTensor
    from transformers import AutoModel

    handler = HuggingFaceModelHandlerKeyedTensor(
        model_uri=_encoder(folder), model_class=AutoModel, framework="pt", device="CPU"
    )
    example = {"input_ids": torch.tensor([101, 2023, 102]), "attention_mask": torch.tensor([1, 1, 1])}
    return _predict(pipeline, handler, [example], _shape)


@_case("HuggingFacePipelineModelHandler")
def _hugging_face_pipeline(pipeline: Any, folder: Path) -> Any:
    from apache_beam.ml.inference.huggingface_inference import HuggingFacePipelineModelHandler, PipelineTask

    handler = HuggingFacePipelineModelHandler(
        task=PipelineTask.TextClassification, model=_classifier(folder), device="CPU"
    )
    return _predict(pipeline, handler, _TEXTS[:1], lambda found: sorted(found))


@_case("SentenceTransformerEmbeddings")
def _ml_transform(pipeline: Any, folder: Path) -> Any:
    from apache_beam.ml.transforms.base import MLTransform
    from apache_beam.ml.transforms.embeddings.huggingface import SentenceTransformerEmbeddings

    embed = SentenceTransformerEmbeddings(model_name=MINILM, columns=["text"])
    transform = MLTransform(write_artifact_location=str(folder / "artifacts")).with_transform(embed)
    return pipeline | beam.Create([{"text": _TEXTS[0]}]) | transform | "value" >> beam.Map(lambda row: len(row["text"]))


def _anomalies(pipeline: Any, detector: Any) -> Any:
    from apache_beam.ml.anomaly.transforms import AnomalyDetection

    rows = [("key", beam.Row(x=float(x))) for x in (1, 2, 1, 2, 1, 2, 1, 2, 100)]
    results = pipeline | beam.Create(rows, reshuffle=False) | AnomalyDetection(detector)
    return results | "value" >> beam.Map(lambda pair: [pair[1].example.x, pair[1].predictions[0].label])


@_case("ZScore")
def _zscore(pipeline: Any, folder: Path) -> Any:
    from apache_beam.ml.anomaly.detectors.zscore import ZScore

    return _anomalies(pipeline, ZScore(features=["x"]))


@_case("RobustZScore")
def _robust_zscore(pipeline: Any, folder: Path) -> Any:
    from apache_beam.ml.anomaly.detectors.robust_zscore import RobustZScore

    return _anomalies(pipeline, RobustZScore(features=["x"]))


@_case("IQR")
def _iqr(pipeline: Any, folder: Path) -> Any:
    from apache_beam.ml.anomaly.detectors.iqr import IQR

    return _anomalies(pipeline, IQR(features=["x"]))


@_case("OfflineDetector")
def _offline(pipeline: Any, folder: Path) -> Any:
    from apache_beam.ml.anomaly.detectors.offline import OfflineDetector
    from apache_beam.ml.anomaly.thresholds import FixedThreshold
    from apache_beam.ml.inference.sklearn_inference import SklearnModelHandlerNumpy

    handler = KeyedModelHandler(SklearnModelHandlerNumpy(_doubling(folder))).with_preprocess_fn(
        lambda pair: (pair[0], np.array([pair[1].x]))
    )
    handler = handler.with_postprocess_fn(OfflineDetector.score_prediction_adapter)
    return _anomalies(pipeline, OfflineDetector(handler, threshold_criterion=FixedThreshold(100)))


@_case("HuggingfaceTextEmbeddings")
def _rag_embeddings(pipeline: Any, folder: Path) -> Any:
    return _embedded(pipeline, folder) | "value" >> beam.Map(lambda item: len(item.embedding.dense_embedding))


@_case("QdrantWriteConfig")
def _rag_qdrant(pipeline: Any, folder: Path) -> Any:
    from apache_beam.ml.rag.ingestion.base import VectorDatabaseWriteTransform
    from apache_beam.ml.rag.ingestion.qdrant import QdrantConnectionParameters, QdrantWriteConfig

    path = str(folder / "qdrant")
    client = QdrantClient(path=path)
    client.create_collection("texts", {"dense": models.VectorParams(size=384, distance=models.Distance.COSINE)})
    client.close()
    config = QdrantWriteConfig(connection_params=QdrantConnectionParameters.local(path), collection_name="texts")
    _ = _embedded(pipeline, folder) | "Write" >> VectorDatabaseWriteTransform(config)
    return pipeline | "Path" >> beam.Create([path])  # the store is read when the pipeline is done


_EXPECTED: dict[str, list[Any]] = {
    "SklearnModelHandlerNumpy": [6, 6],
    "SklearnModelHandlerPandas": [6, 6],
    "KeyedModelHandler": [["a", 6]],
    "PytorchModelHandlerTensor": [6.0, 6.0],
    "PytorchModelHandlerKeyedTensor": [6.0, 6.0],
    "OnnxModelHandlerNumpy": [6.0, 6.0],
    "HuggingFaceModelHandlerTensor": [[3, 32], [3, 32]],
    "HuggingFaceModelHandlerKeyedTensor": [[3, 32], [3, 32]],
    "HuggingFacePipelineModelHandler": [["label", "score"], ["label", "score"]],
    "SentenceTransformerEmbeddings": [384],
    "HuggingfaceTextEmbeddings": [384],
    "QdrantWriteConfig": [1],
    "OfflineDetector": [*[[1.0, 0]] * 4, *[[2.0, 0]] * 4, [100.0, 1]],
}


@pytest.fixture(scope="module")
def values(tmp_path_factory: pytest.TempPathFactory) -> dict[str, list[Any]]:
    """The values of all cases, by name."""
    folder = tmp_path_factory.mktemp("beam_ml")
    options = beam.options.pipeline_options.PipelineOptions(["--cpu_workers=1", "--progress=off"])
    with beam.Pipeline(luminosity.LuminosityRunner(), options=options) as pipeline:
        found = []
        for name, build in _CASES.items():
            own = folder / name
            own.mkdir()
            step = beam.ptransform_fn(lambda begin, build=build, own=own: build(begin, own))()
            found.append(pipeline | name >> step | f"{name} named" >> beam.Map(lambda value, name=name: (name, value)))
        lines = found | beam.Flatten() | "As text" >> beam.Map(json.dumps)
        _ = lines | beam.io.WriteToText(str(folder / "values"), shard_name_template="")
    by_name: dict[str, list[Any]] = {}
    for line in (folder / "values").read_text().splitlines():
        name, value = json.loads(line)
        by_name.setdefault(name, []).append(value)
    client = QdrantClient(path=by_name["QdrantWriteConfig"][0])
    by_name["QdrantWriteConfig"] = [client.count("texts").count]
    client.close()
    return by_name


@pytest.mark.parametrize("name", _CASES)
def test_runs(name: str, values: dict[str, list[Any]]) -> None:
    if name in _EXPECTED:
        assert sorted(values[name], key=str) == sorted(_EXPECTED[name], key=str)
    else:  # a detector needs some rows before it has an opinion
        assert [100.0, 1] in values[name]
        assert [2.0, 1] not in values[name]


def test_the_page_names_what_runs() -> None:
    page = (REPOSITORY / "docs" / "beam-ml.md").read_text()
    runs = {line.split("`")[1] for line in page.splitlines() if line.startswith("| `") and "| runs" in line}
    assert runs == set(_CASES)


def test_nothing_else_sees_the_stand_in_for_tensorflow() -> None:
    import transformers
    from apache_beam.ml.inference import huggingface_inference

    assert not hasattr(transformers, "TFAutoModel")
    with pytest.raises(ModuleNotFoundError, match="tensorflow"):
        importlib.import_module("tensorflow")
    with pytest.raises(MissingExtra, match="tensorflow is not installed"):
        huggingface_inference.tf.stack([])
    with pytest.raises(MissingExtra, match="TFAutoModel"):
        huggingface_inference.TFAutoModel.from_pretrained("any")


def test_an_installed_tensorflow_is_used(tmp_path: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    (tmp_path / "tensorflow.py").write_text("class Tensor: pass\ninstalled = True\n")
    monkeypatch.syspath_prepend(str(tmp_path))
    (finder,) = [each for each in sys.meta_path if type(each).__module__ == "luminosity.beam_fixes.lean_beam"]
    spec = finder.find_spec("apache_beam.ml.inference.huggingface_inference", apache_beam.ml.inference.__path__)
    assert spec is not None
    assert spec.loader is not None
    module = importlib.util.module_from_spec(spec)
    try:
        spec.loader.exec_module(module)
        assert module.tf.installed
        assert sys.modules["tensorflow"] is module.tf
    finally:
        sys.modules.pop("tensorflow", None)


def _doubling(folder: Path) -> str:
    from sklearn.linear_model import LinearRegression

    path = folder / "doubling.pkl"
    path.write_bytes(pickle.dumps(LinearRegression().fit(np.array([[0.0], [1.0], [2.0]]), [0.0, 2.0, 4.0])))
    return str(path)


def _product_class() -> type:
    import torch

    class Product(torch.nn.Module):
        def forward(self, a: Any, b: Any) -> Any:
            return a * b

    return Product


def _encoder(folder: Path) -> str:
    from transformers import BertModel

    return save_with_tokenizer(BertModel(tiny_bert_config()), folder / "encoder")


def _classifier(folder: Path) -> str:
    from transformers import BertForSequenceClassification

    return save_with_tokenizer(BertForSequenceClassification(tiny_bert_config(num_labels=2)), folder / "classifier")


def _shape(output: Any) -> list[int]:
    return list(output["last_hidden_state"].shape)


def _embedded(pipeline: Any, folder: Path) -> Any:
    from apache_beam.ml.rag.embeddings.huggingface import HuggingfaceTextEmbeddings
    from apache_beam.ml.rag.types import EmbeddableItem
    from apache_beam.ml.transforms.base import MLTransform

    embed = HuggingfaceTextEmbeddings(model_name=MINILM)
    transform = MLTransform(write_artifact_location=str(folder / "artifacts")).with_transform(embed)
    return pipeline | beam.Create([EmbeddableItem.from_text(_TEXTS[0], id="1")]) | transform
