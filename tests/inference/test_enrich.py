"""Enrich as users see it, on both runners.

Workers import this module for its handlers, so it imports torch and scikit-learn only in the tests that need them.
"""

from __future__ import annotations

import pickle
from collections.abc import Sequence
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest
from apache_beam.ml.inference.base import KeyedModelHandler, KeyModelMapping, ModelHandler, PredictionResult
from apache_beam.testing.util import assert_that, equal_to
from apache_beam.transforms import window
from pyarrow import parquet

from luminosity import (
    Column,
    Enrich,
    Handler,
    JaxModelHandler,
    MapTable,
    ReadTable,
    SentenceEmbedder,
    TextClassifier,
    TextGenerator,
    TokenClassifier,
)
from luminosity.core import WorkerShare
from luminosity.errors import InvalidArgument, InvalidType
from luminosity.inference.enrich.column_models import ColumnModels
from luminosity.inference.enrich.infer_columns import NewColumn
from luminosity.inference.enrich.prepare_columns import alike
from luminosity.inference.enrich.table_steps import BeginDoFn
from luminosity.inference.handlers.columns import to_numpy
from tests.both_runners import Pipelines, counters
from tests.inference.texts import MINILM, save_with_tokenizer, sentences, tiny_bert_config
from tests.plans import explained


class Lengths(Handler[str, int, object]):
    """Returns the length of texts. Costs are lengths, so batches have another order than the rows."""

    def __init__(self, log: str = "") -> None:
        super().__init__()
        self._log = log

    def load_model(self) -> object:
        if self._log:
            with open(self._log, "a") as file:
                file.write("loaded\n")
        return object()

    def prepare(self, block: list[str]) -> list[str]:
        if "unprepared" in block:
            raise TypeError("can't be prepared")
        return [text.upper() for text in block]

    def cost(self, prepared: list[str]) -> Any:
        return np.array([len(text) for text in prepared])

    def predict(self, model: object, batch: list[str], inference_args: dict[str, Any] | None = None) -> list[int]:
        if "POISON" in batch:
            raise ValueError("poison")
        return [(inference_args or {}).get("times", 1) * len(text) for text in batch]


class Doubles(Handler[Any, Any, object]):
    """Doubles numbers, a whole column at a time."""

    columnar = True

    def load_model(self) -> object:
        return object()

    def predict(self, model: object, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        return 2 * (batch if isinstance(batch, np.ndarray) else batch.to_numpy())


class Sums(ModelHandler[dict[str, int], PredictionResult, object]):
    """A handler of Beam's own kind, whose examples are dicts."""

    def load_model(self) -> object:
        return object()

    def run_inference(self, batch: Sequence[dict[str, int]], model: object, inference_args: Any = None) -> Any:
        return [PredictionResult(example, sum(example.values())) for example in batch]


def table_of(pipeline: beam.Pipeline, *batches: Any) -> Any:
    return pipeline | beam.Create(list(batches)).with_output_types(pa.RecordBatch)


def check_rows(table: Any, expected: list[dict[str, Any]], label: str = "rows", key: str = "text") -> None:
    """Compare rows, however they are cut into batches; ``check_order`` compares batches."""

    def check(batches: list[Any]) -> None:
        found = [row for batch in batches for row in batch.to_pylist()]
        assert sorted(found, key=lambda row: str(row[key])) == sorted(expected, key=lambda row: str(row[key])), found

    assert_that(table, check, label)


def test_columns_are_added_and_rows_keep_their_order(pipelines: Pipelines) -> None:
    texts = ["x" * (number * 7 % 61) for number in range(300)]

    def check(batches: list[Any]) -> None:
        assert all(batch.schema.names == ["number", "text", "doubled", "length"] for batch in batches)
        assert all(batch.num_rows <= 128 for batch in batches)
        rows = [row for batch in sorted(batches, key=lambda b: b["number"][0].as_py()) for row in batch.to_pylist()]
        assert [row["number"] for row in rows] == list(range(300))
        assert [row["length"] for row in rows] == [3 * len(text) for text in texts]
        assert [row["doubled"] for row in rows] == [2 * number for number in range(300)]

    with pipelines() as (pipeline, run):
        table = table_of(pipeline, pa.record_batch({"number": range(300), "text": texts}))
        length = Column(Lengths(), "text", inference_args={"times": 3})
        assert_that(table | Enrich(doubled=Column(Doubles(), "number"), length=length), check)
    assert counters(run.result)["examples"] == 600
    namespaces = {each.key.metric.namespace for each in run.result.metrics().query()["counters"]}
    assert {"doubled", "length"} <= namespaces


def test_a_model_takes_the_columns_of_others(pipelines: Pipelines) -> None:
    with pipelines() as (pipeline, _):
        table = table_of(pipeline, pa.record_batch({"text": ["a", "bcd"], "n": [10, 20]}))
        enriched = table | Enrich(
            both=Column(Sums(), {"one": "length", "other": "doubled"}),
            doubled=Column(Doubles(), "n"),
            length=Column(Lengths(), "text"),
        )
        check_rows(
            enriched,
            [
                {"text": "a", "n": 10, "both": 21, "doubled": 20, "length": 1},
                {"text": "bcd", "n": 20, "both": 43, "doubled": 40, "length": 3},
            ],
        )


@pytest.mark.alone
def test_text_models_share_the_tokens(pipelines: Pipelines, text_models: dict[str, str]) -> None:
    """They predict the same as alone; a text of a megabyte is cut; a model takes the vectors of another."""
    texts = [*sentences(16), "word " * 200_000]
    embedder = SentenceEmbedder(MINILM, device="CPU")
    mood = TextClassifier(text_models["mood"], max_length=256, device="CPU")
    tone = TextClassifier(text_models["tone"], max_length=256, device="CPU")
    expected = {
        handler: [result.inference for result in handler.run_inference(texts, handler.load_model())]
        for handler in (embedder, mood, tone)
    }

    def check(batches: list[Any]) -> None:
        found = pa.Table.from_batches(sorted(batches, key=lambda batch: batch["number"][0].as_py()))
        assert found["number"].to_pylist() == list(range(len(texts)))
        assert found.schema.field("vector").type == pa.list_(pa.float32(), 384)
        vectors = np.stack(found["vector"].to_pylist())
        assert np.abs(vectors - np.stack(expected[embedder])).max() < 1e-5
        for name, handler in (("mood", mood), ("tone", tone)):
            assert [row["label"] for row in found[name].to_pylist()] == [row["label"] for row in expected[handler]]
            scores = [row["score"] for row in found[name].to_pylist()]
            assert scores == pytest.approx([row["score"] for row in expected[handler]], abs=1e-4)
        assert found["topic"].to_pylist() == pytest.approx(vectors.sum(axis=1).tolist(), abs=1e-4)

    with pipelines("--cpu_workers=1") as (pipeline, run):
        table = table_of(pipeline, pa.record_batch({"number": range(len(texts)), "text": texts}))
        enriched = table | Enrich(
            topic=Column(Sum(), "vector"),
            vector=Column(embedder, "text"),
            mood=Column(mood, "text"),
            tone=Column(tone, "text"),
        )
        assert_that(enriched, check)
    prepared = {
        each.key.metric.namespace: each.committed
        for each in run.result.metrics().query()["counters"]
        if each.key.metric.name == "rows_prepared"
    }
    assert prepared == {"vector+mood+tone": len(texts)}
    assert counters(run.result)["useful_cost"] <= 3 * 256 * len(texts) + len(texts)  # no model got a million words


class Sum(Doubles):
    def predict(self, model: object, batch: Any, inference_args: dict[str, Any] | None = None) -> Any:
        return to_numpy(batch).sum(axis=1)


@pytest.fixture(scope="module")
def text_models(tmp_path_factory: pytest.TempPathFactory) -> dict[str, str]:
    import torch
    from transformers import BertForSequenceClassification

    torch.manual_seed(0)
    folder = tmp_path_factory.mktemp("models")
    config = tiny_bert_config(id2label={0: "bad", 1: "good"}, label2id={"bad": 0, "good": 1})
    return {n: save_with_tokenizer(BertForSequenceClassification(config), folder / n) for n in ("mood", "tone")}


def test_who_prepares_alike(text_models: dict[str, str]) -> None:
    mood = text_models["mood"]
    columns = {
        "vector": Column(SentenceEmbedder(MINILM), "text"),
        "mood": Column(TextClassifier(mood, max_length=256), "text"),
        "of another column": Column(TextClassifier(mood, max_length=256), "title"),
        "shorter": Column(TextClassifier(mood, max_length=128), "text"),
        "prompted": Column(SentenceEmbedder(MINILM, prompt="query: "), "text"),
        "entities": Column(TokenClassifier(mood, max_length=256), "text"),
        "own way": Column(Reversed(mood, max_length=256), "text"),
        "plain": Column(Lengths(), "text"),
    }
    models: dict[str, Any] = {name: column.handler for name, column in columns.items()}

    assert alike(columns, {name: ColumnModels(name, column) for name, column in columns.items()}) == [
        ["vector", "mood"],
        *([name] for name in list(columns)[2:]),
    ]
    same = [models[name].prepare(["Some text, in two", ""]).to_pylist() for name in ("vector", "mood")]
    assert same[0] == same[1]


class Reversed(TextClassifier):
    def prepare(self, block: Any) -> Any:
        return super().prepare([text[::-1] for text in block])


def test_dead_letters(pipelines: Pipelines) -> None:
    """Every row is in one of the two tables: good ones with all columns, bad ones unchanged."""
    texts = ["a", "poison", None, "unprepared", "bcd", None]
    table = pa.record_batch(
        {"text": texts, "n": [1, 2, 3, 4, None, 6], "_deleted": [None, False, False, None, False, True]}
    )
    with pipelines() as (pipeline, _):
        good, bad = (
            table_of(pipeline, table)
            | Enrich(
                twice=Column(Doubles(), "length"),
                length=Column(Lengths(), "text"),
                sum=Column(Sums(), {"n": "n"}),
            ).with_exception_handling()
        )
        row = dict.fromkeys(["twice", "length", "sum"])
        check_rows(
            good,
            [
                {"text": "a", "n": 1, "_deleted": None, "twice": 2, "length": 1, "sum": 1},
                {"text": None, "n": 6, "_deleted": True, **row},
            ],
            "good",
        )
        letters = [
            {"text": "poison", "n": 2, "_deleted": False, "_model": "length", "_reason": "ValueError: poison"},
            {"text": None, "n": 3, "_deleted": False, "_model": "length", "_reason": "ValueError: 'text' is null"},
            {
                "text": "unprepared",
                "n": 4,
                "_deleted": None,
                "_model": "length",
                "_reason": "TypeError: can't be prepared",
            },
            {"text": "bcd", "n": None, "_deleted": False, "_model": "sum", "_reason": "ValueError: 'n' is null"},
        ]
        check_rows(bad, letters, "bad")


def test_a_null_names_the_column_the_row_and_what_to_do(pipelines: Pipelines) -> None:
    table = pa.record_batch({"id": range(200), "text": [*["fine"] * 150, None, *["fine"] * 49]})
    expected = (
        "(?s)'length' takes 'text', which is null in row 150 of its batch \\(id=150, text=None\\).*_exception_handling"
    )
    with pytest.raises(Exception, match=expected), pipelines() as (pipeline, _):
        _ = table_of(pipeline, table) | Enrich(length=Column(Lengths(), "text"))


def test_what_is_not_caught_ends_the_pipeline() -> None:
    enrich = Enrich(length=Column(Lengths(), "text")).with_exception_handling(exc_class=KeyError)
    with pytest.raises(Exception, match="poison"), beam.Pipeline("FnApiRunner") as pipeline:
        _ = table_of(pipeline, pa.record_batch({"text": ["a", "poison"]})) | enrich


def test_threshold_counts_rows() -> None:
    table = pa.record_batch({"text": ["poison", *["a"] * 9]})
    with pytest.raises(Exception, match="1 of 10 examples failed"), beam.Pipeline("FnApiRunner") as pipeline:
        _ = table_of(pipeline, table) | Enrich(n=Column(Lengths(), "text")).with_exception_handling(threshold=0.05)


@pytest.mark.parametrize(
    ("table", "columns", "message"),
    [
        ({"text": ["a"], "n": [1]}, {"n": "text"}, "has 'n' already, expected new names"),
        (
            {"text": ["a"]},
            {"length": "txt"},
            "takes 'txt', which is not in the table; it has 'text'; did you mean 'text'",
        ),
        ({"text": ["a"]}, {"length": ["text"]}, "'text' holds string, expected numbers"),
        ({"text": ["a"], "_deleted": ["no"]}, {"length": "text"}, "'_deleted' holds string, expected bool"),
    ],
)
def test_tables_that_do_not_fit(table: dict[str, Any], columns: dict[str, Any], message: str) -> None:
    enrich = Enrich(**{name: Column(Lengths(), inputs) for name, inputs in columns.items()})
    with pytest.raises(Exception, match=message), beam.Pipeline("FnApiRunner") as pipeline:
        _ = table_of(pipeline, pa.record_batch(table)) | enrich


def test_an_element_that_is_no_table() -> None:
    with (
        pytest.raises(Exception, match=r"of type dict, expected a pyarrow.RecordBatch"),
        beam.Pipeline("FnApiRunner") as p,
    ):
        _ = p | beam.Create([{"text": "a"}]) | Enrich(length=Column(Lengths(), "text"))


def test_a_model_of_scikit_learn(pipelines: Pipelines, tmp_path: Path) -> None:
    from apache_beam.ml.inference.sklearn_inference import SklearnModelHandlerNumpy
    from sklearn.linear_model import LinearRegression

    path = tmp_path / "line.pkl"
    path.write_bytes(pickle.dumps(LinearRegression().fit([[0, 0], [1, 0], [0, 1]], [1, 3, 11])))
    with pipelines() as (pipeline, _):
        table = table_of(pipeline, pa.record_batch({"f1": [1, 2], "f2": [0.5, 1.0]}))
        scored = table | Enrich(score=Column(SklearnModelHandlerNumpy(str(path)), ["f1", "f2"], pa.float32()))

        def check(batches: list[Any]) -> None:
            # A batch may come back in several parts, in any order.
            assert {batch.schema.field("score").type for batch in batches} == {pa.float32()}
            rows = [row for batch in batches for row in batch.to_pylist()]
            assert {row["f1"]: row["score"] for row in rows} == pytest.approx({1: 8, 2: 15})

        assert_that(scored, check)


def test_windows_timestamps_and_empty_batches_stay(pipelines: Pipelines) -> None:
    def told(batch: Any, time: Any = beam.DoFn.TimestampParam, in_: Any = beam.DoFn.WindowParam) -> Any:
        return batch.to_pydict(), str(batch.schema.field("n").type), int(time), int(in_.start)

    def check(found: list[Any]) -> None:
        assert sorted(found, key=lambda each: each[2]) == [
            ({"text": ["a", "bc"], "n": [1, 2]}, "int16", 3, 0),
            ({"text": [], "n": []}, "int16", 12, 10),
        ]

    full, empty = pa.record_batch({"text": ["a", "bc"]}), pa.record_batch({"text": pa.array([], pa.string())})
    with pipelines() as (pipeline, _):
        table = (
            pipeline
            | beam.Create([(full, 3), (empty, 12)])
            | beam.MapTuple(window.TimestampedValue).with_output_types(pa.RecordBatch)
            | beam.WindowInto(window.FixedWindows(10))
        )
        enriched = table | Enrich(n=Column(Lengths(), "text", pa.int16()))
        assert_that(enriched | beam.Map(told), check)


def test_a_handler_of_two_columns_is_one_model(pipelines: Pipelines, tmp_path: Path) -> None:
    log = tmp_path / "loads"
    handler = Lengths(str(log))
    with pipelines("--cpu_workers=1") as (pipeline, _):
        table = table_of(pipeline, pa.record_batch({"text": ["a"], "title": ["bcd"]}))
        enriched = table | Enrich(
            n=Column(handler, "text"),
            m=Column(handler, "title", inference_args={"times": 2}),
            of_m=Column(Doubles(), "m"),
        )
        check_rows(enriched, [{"text": "a", "title": "bcd", "n": 1, "m": 6, "of_m": 12}])
    assert log.read_text() == "loaded\n"


def test_a_model_in_a_process_of_its_own() -> None:
    with beam.Pipeline("FnApiRunner") as pipeline:
        enrich = Enrich(n=Column(Lengths(), "text")).with_exception_handling(use_subprocess=True, timeout=200)
        good, bad = table_of(pipeline, pa.record_batch({"text": ["a", "poison"]})) | enrich
        check_rows(good, [{"text": "a", "n": 1}], "good")
        check_rows(bad, [{"text": "poison", "_model": "n", "_reason": "ValueError: poison"}], "bad")


class Wants(Lengths):
    def __init__(self, **hints: str) -> None:
        super().__init__()
        self._hints = hints

    def get_resource_hints(self) -> dict[str, Any]:
        return self._hints


def test_models_that_ask_for_different_resources_run_apart() -> None:
    def build(pipeline: beam.Pipeline) -> Any:
        return table_of(pipeline, pa.record_batch({"text": ["a"]})) | Enrich(
            small=Column(Lengths(), "text"),
            large=Column(Wants(min_ram="1GB"), "text"),
            other=Column(Lengths(), "text"),
        )

    plan = explained(build, "--cpu_workers=1")
    pools = {step.name: stage.pool for stage in plan.stages for step in stage.steps}
    steps = {name.partition("/")[2]: pool for name, pool in pools.items() if name.startswith("Enrich/")}
    assert steps["Infer large"] != steps["Infer small, other"] == steps["Prepare"] == steps["Finish"]


def test_only_rows_that_take_work_are_spread() -> None:
    def stages(column: Column) -> list[list[str]]:
        def build(pipeline: beam.Pipeline) -> Any:
            return table_of(pipeline, pa.record_batch({"text": ["a"]})) | Enrich(n=column)

        plan = explained(build, "--cpu_workers=1")
        steps = [
            [step.name.partition("/")[2] for step in stage.steps if "Enrich" in step.name] for stage in plan.stages
        ]
        return [each for each in steps if each]

    assert stages(Column(Doubles(), "text")) == [["Begin", "Infer", "Finish"]]
    assert stages(Column(Lengths(), "text")) == [["Begin"], ["Prepare", "Infer", "Finish"]]


def test_batches_are_cut_by_rows_and_bytes() -> None:
    step = BeginDoFn({"n": Column(Lengths(), "text")}, cuts=True)
    rows = [block.table.num_rows for block in step.process(pa.record_batch({"text": ["a"] * 300}))]
    assert rows == [128, 128, 44]
    blocks = list(step.process(pa.record_batch({"text": ["a" * 1_000_000] * 10})))
    assert [(block.start, block.table.num_rows) for block in blocks] == [(0, 2), (2, 3), (5, 2), (7, 3)]


def test_a_short_table_has_blocks_for_all_workers(monkeypatch: pytest.MonkeyPatch) -> None:
    (variable,) = WorkerShare("cpu", 1.0, 2**30, (), workers=2).to_environment().items()
    monkeypatch.setenv(*variable)

    def blocks(*tables: int) -> list[int]:
        step = BeginDoFn({"n": Column(Lengths(), "text")}, cuts=True)
        cut = [block for rows in tables for block in step.process(pa.record_batch({"text": ["a"] * rows}))]
        assert sum(block.table.num_rows for block in cut) == sum(tables)
        return [block.table.num_rows for block in cut]

    assert len(blocks(300)) >= 16
    assert max(blocks(300)) <= 300 // 16
    assert len(blocks(*[500] * 20)) <= 2 * 10_000 // 128, "a long table is cut into small blocks"
    assert blocks(0) == [0]
    assert blocks(3) == [3]


HANDLER = Lengths()
BY_LANGUAGE: Any = KeyedModelHandler([KeyModelMapping(["en"], HANDLER)])


@pytest.mark.parametrize(
    ("make", "message"),
    [
        (lambda: Column(Lengths, "text"), "found the class Lengths"),  # type: ignore[arg-type]
        (lambda: Column(HANDLER, []), "found inputs=\\[\\], expected the name of a column"),
        (lambda: Column(HANDLER, ["a", 5]), "expected the name of a column"),  # type: ignore[list-item]
        (lambda: Column(HANDLER, {"a", "b"}), "expected the name of a column"),  # type: ignore[arg-type]
        (lambda: Column(HANDLER, "text", str), "expected an Arrow type"),  # type: ignore[arg-type]
        (lambda: Column(KeyedModelHandler(HANDLER), "text"), "with one model, which needs no keys"),
        (lambda: Column(BY_LANGUAGE, "text"), "but not which column has the keys; pass Column\\(..., key="),
        (lambda: Column(HANDLER, "text", key="lang"), "found key='lang' with Lengths, expected a KeyedModelHandler"),
        (lambda: Column(HANDLER, "text", nulls="drop"), "found nulls='drop', expected one of fail, keep"),
        (lambda: Column(HANDLER, "text", interval=5), "found interval or stop_timestamp without watch_model_pattern"),
        (lambda: Column(HANDLER.with_no_batching(), "text"), "with which each element is a batch"),
        (lambda: Enrich(), "found no columns"),
        (lambda: Enrich(n=HANDLER), "expected n=Column\\(handler, inputs\\)"),  # type: ignore[arg-type]
        (lambda: Enrich(text=Column(HANDLER, "text")), "'text' takes itself; give the new column a name"),
        (
            lambda: Enrich(a=Column(HANDLER, "b"), b=Column(HANDLER, ["x", "c"]), c=Column(HANDLER, "b")),
            "columns that take each other: 'b' takes 'c' takes 'b'",
        ),
    ],
)
def test_mistakes_are_told_at_once(make: Any, message: str) -> None:
    with pytest.raises((TypeError, ValueError), match=message):
        make()


def test_any_table_and_any_name() -> None:
    """Numbers in a dictionary, a null in one, a column twice in a vector, two columns of one name, and `self`."""
    numbers = pa.DictionaryArray.from_arrays(pa.array([0, 1, 0]), pa.array([5, None]))
    columns = [pa.array([1, 2, 3]), pa.array([4, 5, 6]), pa.array([7, 8, 9]), numbers]
    table = pa.RecordBatch.from_arrays(columns, ["a", "a", "b", "c"])
    vector = pa.list_(pa.int64(), 3)

    def check_good(batches: list[Any]) -> None:
        assert [batch.schema.names for batch in batches] == [["a", "a", "b", "c", "self"]]
        assert batches[0].column(4).equals(pa.array([[10, 14, 14], [10, 18, 18]], vector))

    def check_bad(batches: list[Any]) -> None:
        assert [batch.schema.names for batch in batches] == [["a", "a", "b", "c", "_model", "_reason"]]
        assert batches[0]["_reason"].to_pylist() == ["ValueError: 'c' is null"]

    with beam.Pipeline() as pipeline:
        enrich = Enrich(self=Column(Doubles(), ["c", "b", "b"]))
        good, bad = table_of(pipeline, table) | enrich.with_exception_handling()
        assert_that(good, check_good, "good")
        assert_that(bad, check_bad, "bad")


def test_rows_that_fail_only_together() -> None:
    """Lists of different lengths fail for a model of one shape, though each one would succeed alone."""

    def check(batches: list[Any]) -> None:
        reasons = [reason for batch in batches for reason in batch["_reason"].to_pylist()]
        assert len(reasons) == 2
        assert all("pass ragged=True if their lengths differ" in reason for reason in reasons)

    with beam.Pipeline() as pipeline:
        enrich = Enrich(sum=Column(JaxModelHandler(lambda params, batch: batch.sum(1), ()), "lists"))
        good, bad = table_of(pipeline, pa.record_batch({"lists": [[1], [2, 3]]})) | enrich.with_exception_handling()
        assert_that(good, equal_to([]), "good")
        assert_that(bad, check, "bad")


MATRICES = pa.struct({"m": pa.list_(pa.list_(pa.float32()))})


@pytest.mark.parametrize(
    ("values", "expected"),
    [
        (np.array([1.5, 2.5], np.float32), pa.array([1.5, 2.5], pa.float32())),
        (np.array([[1, 2], [3, 4]]), pa.array([[1, 2], [3, 4]], pa.list_(pa.int64(), 2))),
        ([np.float32(1.5), np.float32(2.5)], pa.array([1.5, 2.5], pa.float32())),
        ([np.array([1.0]), np.array([2.0, 3.0])], pa.array([[1.0], [2.0, 3.0]])),
        (np.array(["a", "bc"]), pa.array(["a", "bc"])),
        ([{"label": "x"}, None], pa.array([{"label": "x"}, None])),
        (pa.record_batch({"a": [1, 2]}), pa.array([{"a": 1}, {"a": 2}])),
        ([{"m": np.ones((1, 2), np.float32)}] * 2, pa.array([{"m": [[1, 1]]}] * 2, MATRICES)),
    ],
)
def test_values_become_arrow(values: Any, expected: Any) -> None:
    found = NewColumn("new", None).of(2, [(np.array([0, 1]), values)])
    assert found.type == expected.type
    assert found.equals(expected)


def test_tensors_become_arrow() -> None:
    import torch

    matrices = [{"m": torch.ones((1, 2), dtype=torch.bfloat16)}] * 2
    test_values_become_arrow(matrices, pa.array([{"m": [[1, 1]]}] * 2, MATRICES))
    test_values_become_arrow([torch.tensor(1.5), torch.tensor(2.5)], pa.array([1.5, 2.5], pa.float32()))


def test_types_are_asked_for_or_stay() -> None:
    places = np.array([0])
    assert NewColumn("n", pa.int8()).of(1, [(places, np.array([3]))]).type == pa.int8()
    with pytest.raises(ValueError, match=r"column 'n' can't become int8.*300.*output="):
        NewColumn("n", pa.int8()).of(1, [(places, np.array([300]))])
    named = pa.struct({"number": pa.int64(), "name": pa.string()})
    assert NewColumn("n", named).of(1, [(places, [(1, "a")])]).to_pylist() == [{"number": 1, "name": "a"}]
    found = NewColumn("n", None)
    found.of(1, [(places, [3])])
    assert found.of(1, [(places, [None])]).type == pa.int64()
    with pytest.raises(ValueError, match=r"'n' was int64 in one batch and is double in another.*output="):
        found.of(1, [(places, [2.5])])


@pytest.mark.parametrize(
    ("column", "message"),
    [
        (
            Column(SentenceEmbedder("nowhere"), "raw"),
            "takes 'raw': found binary, expected text; decode the column",
        ),
        (Column(SentenceEmbedder("nowhere"), "n"), "the column 'new' takes 'n': found int64, expected text"),
        (Column(TokenClassifier("nowhere"), {"x": "text"}), "takes 'text': found struct<x: string>, expected text"),
        (Column(TextClassifier("nowhere"), ["n", "n"]), "takes 'n' and 'n': found fixed_size_list.*, expected text"),
        (Column(TextGenerator("nowhere"), "n"), "takes 'n': found int64, expected text"),
        (Column(Doubles(), ["n", "text"]), "the column 'text' holds string, expected numbers"),
        (Column(Doubles(), "txt"), "takes 'txt', which is not in the table.*did you mean 'text'"),
    ],
)
def test_columns_of_the_wrong_type_are_refused_when_the_pipeline_is_built(
    column: Column, message: str, tmp_path: Path
) -> None:
    table = pa.table({"raw": [b"x"], "n": [1], "text": ["a"], "chat": [[{"role": "user", "content": "Hi"}]]})
    parquet.write_table(table, tmp_path / "t.parquet")
    for steps in ([], [beam.Reshuffle()], [MapTable(lambda batch: batch, schema=table.schema)]):
        rows = beam.Pipeline() | ReadTable(tmp_path / "t.parquet")
        for step in steps:
            rows |= step
        with pytest.raises((InvalidType, InvalidArgument), match=message):
            _ = rows | Enrich(new=column)
    with pytest.raises((InvalidType, InvalidArgument), match=message):  # where the columns are not known before
        list(BeginDoFn({"new": column}, cuts=True).process(table.to_batches()[0]))


def test_columns_of_the_right_type_are_accepted() -> None:
    chats = pa.list_(pa.struct({"role": pa.string(), "content": pa.string()}))
    for kind in (pa.string(), pa.large_string(), pa.dictionary(pa.int32(), pa.string()), pa.null()):
        Enrich(new=Column(SentenceEmbedder("nowhere"), "text")).check(pa.schema({"text": kind}))
    Enrich(new=Column(TextGenerator("nowhere"), "text")).check(pa.schema({"text": chats}))
    vector = Column(SentenceEmbedder("nowhere"), "text")
    Enrich(vector=vector, topic=Column(Doubles(), "vector")).check(pa.schema({"text": pa.string()}))


@pytest.mark.parametrize(
    ("rows", "workers", "sizes"),
    [(20, 2, [10, 10]), (6, 2, [4, 2]), (10, 16, [4, 4, 2]), (200, 2, [16] * 12 + [8]), (20, 1, [20])],
)
def test_every_worker_gets_some_rows_of_a_small_table(
    rows: int, workers: int, sizes: list[int], monkeypatch: pytest.MonkeyPatch
) -> None:
    (variable,) = WorkerShare("cpu", 1.0, 2**30, (), workers=workers).to_environment().items()
    monkeypatch.setenv(*variable)
    step = BeginDoFn({"n": Column(Lengths(), "text")}, cuts=True)
    blocks = list(step.process(pa.record_batch({"text": ["x"] * rows})))
    assert [block.table.num_rows for block in blocks] == sizes
