"""ONNX models through Beam's handler: the results are those of ONNX Runtime, and bad rows are not lost."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import onnx
import onnxruntime
import pyarrow as pa
import pytest
from apache_beam.ml.inference.base import KeyedModelHandler
from apache_beam.ml.inference.onnx_inference import OnnxModelHandlerNumpy

from luminosity import Column, Enrich, LuminosityRunner, RunInference
from luminosity.errors import InvalidArgument, ModelUnavailable
from luminosity.inference.adapting.columnar import whole_columns

CPU = ["CPUExecutionProvider"]
ROWS = np.random.default_rng(0).normal(size=(40, 3)).astype(np.float32)


def saved(folder: Path, graph: str) -> str:
    """Write a model in ONNX's text format to a file."""
    path = folder / f"{abs(hash(graph))}.onnx"
    onnx.save(onnx.parser.parse_model(f'<ir_version: 8, opset_import: ["": 17]> agraph {graph}'), path)
    return str(path)


def test_results_are_those_of_the_runtime_and_bad_rows_are_not_lost(tmp_path: Path) -> None:
    path = saved(tmp_path, "(float[N, 3] x) => (float[N, 3] y) { s = Softmax(x) y = Mul(s, x) }")
    values = ROWS.copy()
    values[7, 1] = np.nan
    expected = onnxruntime.InferenceSession(path, providers=CPU).run(None, {"x": values})[0]
    handler = OnnxModelHandlerNumpy(path, providers=CPU, max_batch_size=8)
    # Wide numbers, as tables often have them, and a row that has no numbers.
    lists = [None if number == 3 else row.astype(float).tolist() for number, row in enumerate(values)]
    table = pa.record_batch({"id": range(40), "v": pa.array(lists, pa.list_(pa.float64(), 3))})

    def check(found: list[Any]) -> None:
        results: dict[str, dict[int, Any]] = {"element": {}, "row": {}, "bad": {}, "letter": {}}
        for kind, number, value in found:
            assert number not in results[kind], "a row came twice"
            results[kind][number] = value
        for number in range(40):
            np.testing.assert_array_equal(results["element"][number], expected[number])
            if number != 3:
                np.testing.assert_array_equal(np.array(results["row"][number], np.float32), expected[number])
        assert sorted(results["row"]) == [number for number in range(40) if number != 3]
        assert results["letter"] == {3: "ValueError: 'v' is null"}
        assert list(results["bad"]) == [99]
        assert "invalid dimensions" in results["bad"][99].lower()

    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        examples = pipeline | beam.Create([*enumerate(values), (99, np.zeros(5, np.float32))], reshuffle=False)
        results, failed = examples | RunInference(KeyedModelHandler(handler)).with_exception_handling()
        found = [
            results | beam.MapTuple(lambda number, result: ("element", number, result.inference)),
            failed.failed_inferences | "bad" >> beam.Map(lambda each: ("bad", each[0][0][0], str(each[1][1]))),
        ]
        good, letters = (
            pipeline | "table" >> beam.Create([table]) | Enrich(y=Column(handler, "v")).with_exception_handling()
        )
        for kind, part, column in (("row", good, "y"), ("letter", letters, "_reason")):
            each = part | f"{kind}s" >> beam.FlatMap(lambda batch: batch.to_pylist())
            found.append(each | kind >> beam.Map(lambda row, kind, name: (kind, row["id"], row[name]), kind, column))
        _ = found | beam.Flatten() | beam.combiners.ToList() | beam.Map(check)


def test_several_inputs_are_named_and_whole_numbers_must_fit(tmp_path: Path) -> None:
    path = saved(tmp_path, "(int32[N] a, float[N] b) => (float[N] y) { c = Cast<to=1>(a) y = Mul(c, b) }")
    handler = whole_columns(OnnxModelHandlerNumpy(path, providers=CPU))
    assert handler is not None
    model = handler.load_model()

    def product(**columns: Any) -> Any:
        return handler.predict(model, handler.collate(handler.prepare(pa.record_batch(columns))))

    assert product(a=[2, 3], b=[0.5, 2.0]).tolist() == [1.0, 6.0]
    with pytest.raises(InvalidArgument, match="found numbers beyond int32, expected by the input 'a'"):
        product(a=[2, 2**40], b=[0.5, 2.0])
    with pytest.raises(InvalidArgument, match="found the input 'c', expected inputs of the model: 'a', 'b'"):
        product(c=[2, 3], b=[0.5, 2.0])


def test_what_is_no_model_and_what_is_no_column_is_refused(tmp_path: Path) -> None:
    (tmp_path / "model.onnx").write_text("weights")
    pipeline = beam.Pipeline(runner=LuminosityRunner())
    with pytest.raises(ModelUnavailable, match=r"found no file or folder '/no/model\.onnx'"):
        _ = pipeline | beam.Create([ROWS[0]]) | RunInference(OnnxModelHandlerNumpy("/no/model.onnx"))
    broken = OnnxModelHandlerNumpy(str(tmp_path / "model.onnx"), providers=CPU)
    with pytest.raises(InvalidArgument, match=r"model.onnx' is no ONNX model"):
        whole_columns(broken).load_model()  # type: ignore[union-attr]
    with pytest.raises(InvalidArgument, match=r"takes 'v', which is not in the table; it has 'w'"):
        Enrich(y=Column(broken, "v")).check(pa.schema([("w", pa.float32())]))
