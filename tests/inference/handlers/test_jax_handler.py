"""JaxModelHandler: functions of JAX as models, with batches padded to few shapes."""

from __future__ import annotations

import pickle
import subprocess
import sys
from pathlib import Path
from typing import Any

import apache_beam as beam
import jax
import jax.numpy as jnp
import numpy as np
import pyarrow as pa
import pytest
from apache_beam.ml.inference.base import RunInference
from apache_beam.runners.portability.fn_api_runner import FnApiRunner
from apache_beam.testing.util import assert_that, equal_to

from luminosity.inference.blocks import concat, take
from luminosity.inference.handlers.jax import JaxModelHandler
from tests.runners import new_pipeline

WEIGHTS = np.array([1.0, 10.0, 100.0], np.float32)


def linear(params: Any, batch: Any) -> Any:
    return batch @ params["weights"]


def mean_length(params: Any, batch: Any, mask: Any) -> Any:
    """Returns a wrong result if padding is used as data."""
    return jnp.where(mask, batch, 0).sum(axis=1) / jnp.maximum(mask.sum(axis=1), 1) + params


def answers(handler: JaxModelHandler, examples: Any, **inference_args: Any) -> list[Any]:
    results = handler.run_inference(examples, handler.load_model(), inference_args)
    return [np.asarray(result.inference).tolist() for result in results]


def test_rows_of_one_shape_are_answered_in_their_order() -> None:
    examples = [np.array([n, 1, 0], np.float32) for n in range(37)]
    handler = JaxModelHandler(linear, {"weights": WEIGHTS})
    assert answers(handler, examples) == [n + 10.0 for n in range(37)]
    assert handler.cost(handler.prepare(examples)).tolist() == [1] * 37


@pytest.mark.parametrize(
    ("examples", "fn", "expected"),
    [
        ([1.5, 2.5], lambda p, batch: batch + p, [2.5, 3.5]),
        ([[1, 2], [3, 4]], lambda p, batch: batch.sum(axis=1) + p, [4, 8]),
        ([{"x": [1, 2], "y": 10}], lambda p, batch: batch["x"].sum(axis=1) * batch["y"] + p, [31]),
        ([(1, [2, 3])], lambda p, batch: batch[0] + batch[1].sum(axis=1) + p, [7]),
        ([np.ones((2, 3, 4))] * 5, lambda p, batch: batch.sum(axis=(1, 2, 3)) + p, [25.0] * 5),
        ([np.array([True, False])] * 3, lambda p, batch: jnp.where(batch, p, 0), [[1, 0]] * 3),
    ],
)
def test_examples_of_many_kinds(examples: list[Any], fn: Any, expected: list[Any]) -> None:
    assert answers(JaxModelHandler(fn, 1), examples) == expected


def test_arrow_columns_are_examples_too() -> None:
    table = pa.RecordBatch.from_pydict({"x": [1.0, 2.0], "y": [[1.0, 2.0], [3.0, 4.0]]})
    handler = JaxModelHandler(lambda p, batch: batch["x"] * batch["y"].sum(axis=1) + p, 0)
    outputs = handler.predict(handler.load_model(), handler.transfer(handler.collate(handler.prepare(table))))
    assert handler.collect(outputs).tolist() == [3.0, 14.0]


def test_trees_of_outputs_are_given_example_by_example() -> None:
    handler = JaxModelHandler(lambda p, batch: {"double": 2 * batch, "both": (batch, -batch)}, None)
    results = handler.run_inference([1, 2, 3], handler.load_model())
    assert [result.inference for result in results] == [{"double": 2 * n, "both": (n, -n)} for n in (1, 2, 3)]


def test_many_sizes_of_batches_are_compiled_few_times() -> None:
    handler = JaxModelHandler(linear, {"weights": WEIGHTS})
    model = handler.load_model()
    for count in range(1, 129):
        assert len(list(handler.run_inference([WEIGHTS] * count, model))) == count
    assert handler.compilations == 14  # 1, 2, 3, 4, 6, 8, 12, ... 128

    coarse = JaxModelHandler(linear, {"weights": WEIGHTS}, rows=(8, 64))
    for count in range(1, 129):
        assert len(list(coarse.run_inference([WEIGHTS] * count, model))) == count
    assert coarse.compilations == 3


def test_new_parameters_need_no_compilation() -> None:
    handler = JaxModelHandler(linear, lambda: {"weights": WEIGHTS})
    for _ in range(3):
        assert answers(handler, [WEIGHTS]) == [10101.0]
    assert handler.compilations == 1


def test_ragged_examples_are_padded_and_masked() -> None:
    lengths = [5, 1, 0, 17, 3]
    examples = [np.arange(length, dtype=np.float32) for length in lengths]
    handler = JaxModelHandler(mean_length, 1.0, ragged=True, masked=True, pad_value=1000)
    assert answers(handler, examples) == [sum(range(n)) / max(n, 1) + 1 for n in lengths]
    assert handler.cost(handler.prepare(examples)).tolist() == lengths
    batch = handler.collate(handler.prepare(examples))
    assert batch.values.shape == (6, 32)
    assert batch.values[0, 5] == 1000
    assert batch.mask.sum() == sum(lengths)


def test_lengths_of_ones_own_are_compiled_once_each() -> None:
    handler = JaxModelHandler(mean_length, 0.0, ragged=True, masked=True, lengths=(4, 12))
    model = handler.load_model()
    for length in range(1, 25):
        (result,) = handler.run_inference([[2.0] * length], model)
        assert result.inference == 2.0
    assert handler.compilations == 3  # 4, 12, 24


def test_some_arrays_of_an_example_are_ragged() -> None:
    def fn(params: Any, batch: Any) -> Any:
        return batch["tokens"].sum(axis=1) * batch["scale"].sum(axis=1)

    examples = [{"tokens": list(range(n)), "scale": [1, 2]} for n in (4, 2)]
    handler = JaxModelHandler(fn, None, ragged=["tokens"])
    assert answers(handler, examples) == [18, 3]
    assert handler.cost(handler.prepare(examples)).tolist() == [4, 2]


def test_prepared_blocks_can_be_taken_from_and_joined() -> None:
    handler = JaxModelHandler(lambda p, b: b["t"].sum(axis=(1, 2)) + b["n"], None, ragged=["t"])
    first, second = ([{"t": np.ones((n, 2)), "n": 10 * n} for n in ns] for ns in ((1, 2, 3), (4, 5)))
    blocks = [pickle.loads(pickle.dumps(handler.prepare(block))) for block in (first, second)]
    joined = concat([take(blocks[0], np.array([2, 0])), blocks[1]])
    outputs = handler.predict(handler.load_model(), handler.transfer(handler.collate(joined)))
    assert handler.collect(outputs).tolist() == [36, 12, 48, 60]
    tuples = JaxModelHandler(lambda p, b: b[0] + b[1], None)
    joined = concat([take(tuples.prepare([(1, 2), (3, 4)]), np.array([1])), tuples.prepare([(5, 6)])])
    outputs = tuples.predict(tuples.load_model(), tuples.transfer(tuples.collate(joined)))
    assert tuples.collect(outputs).tolist() == [7, 11]


def test_inference_args_are_traced_unless_static() -> None:
    def fn(params: Any, batch: Any, scale: float = 1.0, kind: str = "plus") -> Any:
        return batch * scale if kind == "times" else batch + scale

    handler = JaxModelHandler(fn, None, static_args=["kind"])
    assert answers(handler, [3.0], scale=2.0, kind="times") == [6.0]
    assert answers(handler, [3.0], scale=5.0, kind="times") == [15.0]
    assert handler.compilations == 1
    assert answers(handler, [3.0], scale=5.0, kind="plus") == [8.0]
    assert handler.compilations == 2
    handler.validate_inference_args({"kind": "times", "scale": 1.0})
    with pytest.raises(ValueError, match=r"static_args=\['mode'\]"):
        handler.validate_inference_args({"mode": "x"})


def test_parameters_from_files(tmp_path: Path) -> None:
    from safetensors.flax import save_file

    np.savez(tmp_path / "one.npz", weights=WEIGHTS)
    save_file({"weights": jnp.asarray(2 * WEIGHTS, jnp.bfloat16)}, tmp_path / "two.safetensors")
    handler = JaxModelHandler(linear, tmp_path / "one.npz")
    assert answers(handler, [np.ones(3, np.float32)]) == [111.0]
    assert handler.model_id == str(tmp_path / "one.npz")
    handler.update_model_path(str(tmp_path / "two.safetensors"))
    (result,) = handler.run_inference([np.ones(3, np.float32)], handler.load_model())
    assert (float(result.inference), result.model_id) == (222.0, str(tmp_path / "two.safetensors"))
    np.savez(tmp_path / "pickled.npz", weights=np.array([{}], object))
    with pytest.raises(ValueError, match="allow_pickle"):
        JaxModelHandler(linear, str(tmp_path / "pickled.npz")).load_model()
    with pytest.raises(ValueError, match=r"ends in \.npz or \.safetensors"):
        JaxModelHandler(linear, "model.pt").load_model()


def test_types_devices_and_memory() -> None:
    def kind(params: Any, batch: Any) -> Any:
        assert (params["weights"].dtype, batch["x"].dtype, batch["n"].dtype) == (jnp.bfloat16, jnp.bfloat16, jnp.int32)
        return batch["x"] * batch["n"]

    handler = JaxModelHandler(kind, {"weights": WEIGHTS}, dtype="bfloat16", device="cpu:0", example={"x": 0.5, "n": 3})
    model = handler.load_model()
    assert handler.memory(model) == 6
    handler.warm_up(model)
    assert handler.compilations == 1
    assert answers(handler, [{"x": 0.5, "n": 3}]) == [1.5]
    with pytest.raises(ValueError, match="'cpu:7'"):
        JaxModelHandler(kind, 1, device="cpu:7").load_model()


def test_mistakes_say_what_was_expected() -> None:
    def sums_all(params: Any, batch: Any) -> Any:
        return batch.sum()

    with pytest.raises(ValueError, match="expected a row for each"):
        answers(JaxModelHandler(sums_all, None), [1.0, 2.0])
    with pytest.raises(ValueError, match="pass ragged=True"):
        answers(JaxModelHandler(linear, None), [[1.0], [1.0, 2.0]])
    with pytest.raises(ValueError, match="expected numbers"):
        answers(JaxModelHandler(linear, None), ["text"])
    with pytest.raises(ValueError, match="expected ragged=True"):
        JaxModelHandler(linear, None, lengths=(1, 2))
    with pytest.raises(ValueError, match="rows="):
        JaxModelHandler(linear, None, rows=(4, 2))
    with pytest.raises(TypeError, match="max_batchsize"):
        JaxModelHandler(linear, None, max_batchsize=3)


def test_a_pickled_handler_leaves_arrays_of_devices_and_compiled_code_behind() -> None:
    handler = JaxModelHandler(linear, {"weights": jnp.asarray(WEIGHTS)}, max_batch_size=7)
    assert answers(handler, [WEIGHTS]) == [10101.0]
    copy = pickle.loads(pickle.dumps(handler))
    assert copy.compilations == 0
    assert type(copy._params["weights"]) is np.ndarray
    assert copy.batch_elements_kwargs() == {"max_batch_size": 7}
    assert answers(copy, [WEIGHTS]) == [10101.0]


def test_preparing_needs_no_jax() -> None:
    script = (
        "import sys; from luminosity.inference.handlers.jax import JaxModelHandler;"
        "handler = JaxModelHandler(len, [1.0], ragged=True); handler.cost(handler.prepare([[1], [1, 2]]));"
        "assert 'jax' not in sys.modules"
    )
    subprocess.run([sys.executable, "-c", script], check=True, timeout=200)


def test_under_beams_own_run_inference() -> None:
    handler = JaxModelHandler(linear, {"weights": WEIGHTS}, max_batch_size=4)
    with beam.Pipeline(runner=FnApiRunner()) as pipeline:
        examples = pipeline | beam.Create([np.array([n, 0, 0], np.float32) for n in range(10)])
        values = examples | RunInference(handler) | beam.Map(lambda result: float(result.inference))
        assert_that(values, equal_to([float(n) for n in range(10)]))


def test_in_workers_of_the_engine() -> None:
    handler = JaxModelHandler(mean_length, 0.0, ragged=True, masked=True)
    with new_pipeline("--cpu_workers=2") as pipeline:
        examples = pipeline | beam.Create([[float(n)] * n for n in range(1, 20)]) | beam.Reshuffle()
        values = examples | RunInference(handler) | beam.Map(lambda result: float(result.inference))
        assert_that(values, equal_to([float(n) for n in range(1, 20)]))


def test_predict_returns_before_the_device_is_done() -> None:
    handler = JaxModelHandler(linear, {"weights": WEIGHTS})
    outputs = handler.predict(handler.load_model(), handler.transfer(handler.collate(handler.prepare([WEIGHTS]))))
    assert isinstance(outputs.values, jax.Array)
    handler.wait(outputs)
    assert outputs.values.is_ready()
