"""Models that take whole columns: the same predictions as row by row, and no code that runs for each row."""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import onnx
import pandas as pd
import pyarrow as pa
import pytest
import torch
from apache_beam.ml.inference.onnx_inference import OnnxModelHandlerNumpy
from apache_beam.ml.inference.pytorch_inference import (
    PytorchModelHandlerKeyedTensor,
    PytorchModelHandlerTensor,
    make_keyed_tensor_model_fn,
    make_tensor_model_fn,
)
from apache_beam.ml.inference.sklearn_inference import SklearnModelHandlerNumpy, SklearnModelHandlerPandas
from apache_beam.testing.util import assert_that
from sklearn.linear_model import LinearRegression

from luminosity import Column, Enrich, Handler, JaxModelHandler, TorchModelHandler
from luminosity.inference.adapting.columnar import takes_names, whole_columns
from luminosity.inference.blocks import take
from luminosity.inference.enrich.column import block_of
from tests.both_runners import Pipelines

WEIGHTS = np.array([1.0, 2.0, 3.0])
ROWS = np.random.default_rng(0).normal(size=(50, 3))
EXPECTED = ROWS @ WEIGHTS
NAMED = pa.record_batch({name: ROWS[:, place] for place, name in enumerate("abc")})
VECTORS = pa.FixedSizeListArray.from_arrays(pa.array(ROWS.ravel()), 3)


class Weighted(torch.nn.Module):
    def __init__(self) -> None:
        super().__init__()
        self.weights = torch.nn.Parameter(torch.tensor(WEIGHTS, dtype=torch.float32))

    def forward(self, x: torch.Tensor) -> torch.Tensor:
        return x @ self.weights


class WeightedByName(Weighted):
    def forward(self, a: torch.Tensor, b: torch.Tensor, c: torch.Tensor) -> torch.Tensor:  # type: ignore[override]
        return torch.stack([a, b, c], dim=1) @ self.weights


class TwoOutputs(Weighted):
    """Returns tensors by name, as models of transformers do, in a type that numpy does not have."""

    def forward(self, x: torch.Tensor) -> Any:
        return {"sum": super().forward(x).bfloat16(), "x": x}


def predictions(handler: Handler[Any, Any, Any] | None, block: Any) -> Any:
    """Run one batch as the host does, in another order than the rows."""
    assert handler is not None
    prepared = handler.prepare(block)
    assert not isinstance(prepared, list), "rows were taken apart"
    assert handler.cost(prepared).shape == (len(block),)
    back = np.arange(len(block))[::-1]
    outputs = handler.predict(handler.load_model(), handler.transfer(handler.collate(take(prepared, back))))
    handler.wait(outputs)
    values = handler.collect(outputs)
    assert isinstance(values, np.ndarray)
    return values.reshape(-1)[::-1]


def onnx_file(path: Path) -> str:
    weights = onnx.numpy_helper.from_array(WEIGHTS[:, np.newaxis].astype(np.float32), "weights")
    graph = onnx.helper.make_graph(
        [onnx.helper.make_node("MatMul", ["x", "weights"], ["y"])],
        "weighted",
        [onnx.helper.make_tensor_value_info("x", onnx.TensorProto.FLOAT, [None, 3])],
        [onnx.helper.make_tensor_value_info("y", onnx.TensorProto.FLOAT, [None, 1])],
        [weights],
    )
    model = onnx.helper.make_model(graph, opset_imports=[onnx.helper.make_opsetid("", 17)], ir_version=8)
    onnx.save(model, path)
    return str(path)


def saved(path: Path, module: torch.nn.Module) -> str:
    torch.save(module.state_dict(), path)
    return str(path)


def pickled(path: Path, model: Any) -> str:
    path.write_bytes(pickle.dumps(model))
    return str(path)


@pytest.mark.parametrize("block", [ROWS, VECTORS], ids=["matrix", "vectors"])
def test_arrays(block: Any, tmp_path: Path) -> None:
    state = saved(tmp_path / "weights.pt", Weighted())
    handlers = [
        whole_columns(
            SklearnModelHandlerNumpy(pickled(tmp_path / "model.pkl", LinearRegression().fit(ROWS, EXPECTED)))
        ),
        whole_columns(OnnxModelHandlerNumpy(onnx_file(tmp_path / "m.onnx"), providers=["CPUExecutionProvider"])),
        whole_columns(PytorchModelHandlerTensor(state, Weighted)),
        TorchModelHandler(state, Weighted, dtype="float32"),
        JaxModelHandler(lambda weights, batch: batch @ weights, WEIGHTS),
    ]
    for handler in handlers:
        np.testing.assert_allclose(predictions(handler, block), EXPECTED, rtol=1e-4, atol=1e-5, err_msg=str(handler))


def test_named_columns(tmp_path: Path) -> None:
    frame = pd.DataFrame(ROWS, columns=list("abc"))
    state = saved(tmp_path / "weights.pt", WeightedByName())
    sklearn = SklearnModelHandlerPandas(pickled(tmp_path / "model.pkl", LinearRegression().fit(frame, EXPECTED)))
    keyed = PytorchModelHandlerKeyedTensor(state, WeightedByName)
    assert takes_names(sklearn)
    assert takes_names(keyed)
    for handler in (
        whole_columns(sklearn),
        whole_columns(keyed),
        TorchModelHandler(state, WeightedByName, dtype="float32"),
    ):
        for block in (NAMED, NAMED.to_struct_array()):
            found = predictions(handler, block)
            np.testing.assert_allclose(found, EXPECTED, rtol=1e-4, atol=1e-5, err_msg=str(handler))
    assert block_of(NAMED, Column(sklearn, "a")).schema.names == ["a"]
    assert block_of(NAMED, Column(keyed, ["b", "a"])).schema.names == ["b", "a"]


def _joined(found: list[pa.RecordBatch]) -> tuple[pa.Table, np.ndarray]:
    """Return all rows and what the model gives for each. A block may come back in several parts, in any order."""
    table = pa.Table.from_batches(found)
    assert sorted(table["a"].to_pylist()) == sorted(ROWS[:, 0])
    return table, np.column_stack([table[name] for name in "abc"]) @ WEIGHTS


def test_a_table_through_enrich(pipelines: Pipelines, tmp_path: Path) -> None:
    """A list of columns becomes a matrix, or a data frame for a model that takes columns by name."""
    frame = pd.DataFrame(ROWS, columns=list("abc"))
    plain = SklearnModelHandlerNumpy(pickled(tmp_path / "plain.pkl", LinearRegression().fit(ROWS, EXPECTED)))
    named = SklearnModelHandlerPandas(pickled(tmp_path / "named.pkl", LinearRegression().fit(frame, EXPECTED)))

    def check(found: list[pa.RecordBatch]) -> None:
        table, expected = _joined(found)
        np.testing.assert_allclose(table["plain"], expected, rtol=1e-6)
        np.testing.assert_allclose(table["named"], expected, rtol=1e-6)

    with pipelines() as (pipeline, _):
        enrich = Enrich(plain=Column(plain, ["a", "b", "c"]), named=Column(named, ["a", "b", "c"]))
        assert_that(pipeline | beam.Create([NAMED]) | enrich, check)


def test_code_of_the_users_own_keeps_its_rows(tmp_path: Path) -> None:
    def infer(model: Any, batch: Sequence[Any], inference_args: Any = None) -> Any:
        return model.predict(np.stack(batch))

    class Own(SklearnModelHandlerNumpy):
        def run_inference(self, batch: Any, model: Any, inference_args: Any = None) -> Any:
            return super().run_inference(batch, model, inference_args)

    path = str(tmp_path / "model.pkl")
    assert whole_columns(SklearnModelHandlerNumpy(path, inference_fn=infer)) is None
    assert whole_columns(Own(path)) is None
    assert not takes_names(Own(path))


def test_code_of_the_users_own_around_a_torch_model_gets_tensors(tmp_path: Path) -> None:
    state = saved(tmp_path / "weights.pt", Weighted())
    vectors = PytorchModelHandlerTensor(state, Weighted, inference_fn=make_tensor_model_fn("forward"))
    by_name = make_keyed_tensor_model_fn("forward")
    named = PytorchModelHandlerKeyedTensor(state, WeightedByName, inference_fn=by_name)

    def check(found: list[pa.RecordBatch]) -> None:
        table, expected = _joined(found)
        np.testing.assert_allclose(table["vectors"], expected, rtol=1e-4, atol=1e-5)
        np.testing.assert_allclose(table["named"], expected, rtol=1e-4, atol=1e-5)

    with beam.Pipeline() as pipeline:
        columns = {"vectors": Column(vectors, ["a", "b", "c"]), "named": Column(named, {"a": "a", "b": "b", "c": "c"})}
        assert_that(pipeline | beam.Create([NAMED]) | Enrich(**columns), check)


def test_a_model_with_several_outputs(tmp_path: Path) -> None:
    handler = whole_columns(PytorchModelHandlerTensor(saved(tmp_path / "weights.pt", Weighted()), TwoOutputs))
    assert handler is not None
    found = handler.predict(handler.load_model(), ROWS)
    assert found.schema.types == [pa.float32(), pa.list_(pa.float32(), 3)]
    np.testing.assert_allclose(found["sum"], EXPECTED, rtol=0.01, atol=0.02)


def test_lists_of_different_lengths_are_padded_by_torch() -> None:
    class Sum(torch.nn.Module):
        def forward(self, x: torch.Tensor) -> torch.Tensor:
            return x.sum(dim=1)

    handler = TorchModelHandler(model_class=Sum)
    prepared = handler.prepare(pa.array([[1.0], [2.0, 3.0]]))
    assert handler.cost(prepared).tolist() == [1, 2]
    assert handler.predict(handler.load_model(), handler.collate(prepared)).values.tolist() == [1, 5]
