"""Tests of what ``Column`` shares with RunInference: new versions, models by key, functions; and nulls and repeats."""

from __future__ import annotations

import time
from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.ml.inference.base import KeyedModelHandler, KeyModelMapping, PredictionResult

from luminosity import Column, Enrich, Handler, HttpModelHandler, SentenceEmbedder, TextGenerator
from luminosity.errors import InvalidArgument
from tests.inference.texts import MINILM

pytestmark = pytest.mark.thorough


class Lengths(Handler[str, int, str]):
    """Adds a number to the length of a text, and notes the texts that it computes."""

    output_type = pa.int64()
    computed: list[str] = []  # of this process  # noqa: RUF012

    def __init__(self, added: int = 0, repeatable: bool | None = None) -> None:
        super().__init__()
        self._added = added
        self._repeatable = repeatable

    def is_repeatable(self, inference_args: Any) -> bool | None:
        return self._repeatable

    def load_model(self) -> str:
        return ""

    def predict(self, model: str, batch: Any, inference_args: Any = None) -> list[int]:
        Lengths.computed += batch
        if "bad" in batch:
            raise ValueError("a bad text")
        return [len(text) + self._added for text in batch]


class FromFile(Handler[str, int, int]):
    """Returns the number that its file holds."""

    output_type = pa.int64()

    def __init__(self, path: str) -> None:
        super().__init__()
        self._path = path

    @property
    def model_id(self) -> str:
        return self._path

    def update_model_path(self, model_path: str | None = None) -> None:
        self._path = model_path or self._path

    def load_model(self) -> int:
        return int(Path(self._path).read_text())

    def predict(self, model: int, batch: Any, inference_args: Any = None) -> list[int]:
        return [model] * len(batch)


@pytest.fixture(autouse=True)
def _nothing_computed() -> None:
    Lengths.computed.clear()


def enriched(*batches: pa.RecordBatch, handles: bool = False, **columns: Column) -> list[list[dict[str, Any]]]:
    """Return the good rows and the dead letters, computed in this process."""
    outputs: list[list[dict[str, Any]]] = [[], []]

    def keep(batch: pa.RecordBatch, number: int) -> None:
        outputs[number] += batch.to_pylist()

    _kept.append(keep)
    with beam.Pipeline("FnApiRunner") as pipeline:
        table = pipeline | beam.Create(batches, reshuffle=False)
        if handles:
            good, bad = table | Enrich(**columns).with_exception_handling()
            _ = bad | "Bad" >> beam.Map(_keep, len(_kept) - 1, 1)
        else:
            good = table | Enrich(**columns)
        _ = good | beam.Map(_keep, len(_kept) - 1, 0)
    return outputs


_kept: list[Any] = []


def _keep(batch: pa.RecordBatch, call: int, number: int) -> None:
    _kept[call](batch, number)


def test_a_null_input_gives_a_null_output_if_nulls_are_kept() -> None:
    table = pa.record_batch({"text": ["one", None, "three"], "n": pa.array([1, 2, None])})
    found, _ = enriched(table, size=Column(Lengths(), "text", nulls="keep"))
    assert [row["size"] for row in found] == [3, None, 5]
    # A column that is computed from the null one is null, too, and one that fails is not affected.
    after = Column(Lengths(), "text")
    good, bad = enriched(table, handles=True, a=Column(Lengths(), "text", nulls="keep"), b=after)
    assert [(row["a"], row["b"]) for row in good] == [(3, 3), (5, 5)]
    assert [(letter["_model"], letter["_reason"]) for letter in bad] == [("b", "ValueError: 'text' is null")]


def test_equal_inputs_are_computed_once_and_give_the_same_as_each_by_itself() -> None:
    texts = [f"text {number * number % 15}" for number in range(299)]
    batches = [pa.record_batch({"text": texts[start : start + 50]}) for start in range(0, 299, 50)]
    alone, _ = enriched(*batches, size=Column(Lengths(), "text"))
    assert len(Lengths.computed) == 299
    Lengths.computed.clear()
    for column in (Column(Lengths(repeatable=True), "text"), Column(Lengths(), "text", dedupe=True)):
        once, _ = enriched(*batches, size=column)
        assert sorted(Lengths.computed) == sorted(set(texts))
        assert once == alone
        Lengths.computed.clear()
    off, _ = enriched(*batches, size=Column(Lengths(repeatable=True), "text", dedupe=False))
    assert off == alone
    assert len(Lengths.computed) == 299


def test_rows_that_equal_one_that_fails_are_dead_letters_too() -> None:
    table = pa.record_batch({"id": range(5), "text": ["bad", "good", "bad", "good", "bad"]})
    good, bad = enriched(table, handles=True, size=Column(Lengths(repeatable=True), "text"))
    assert [(row["id"], row["size"]) for row in good] == [(1, 4), (3, 4)]
    assert [letter["id"] for letter in bad] == [0, 2, 4]
    assert {letter["_reason"] for letter in bad} == {"ValueError: a bad text"}
    with pytest.raises(Exception, match="a bad text"):
        enriched(table, size=Column(Lengths(repeatable=True), "text"))


def test_long_texts_and_several_columns_are_told_apart() -> None:
    words = ["x" * 100, "x" * 101, "y" * 100, "x" * 100]
    table = pa.record_batch({"text": words})
    found, _ = enriched(table, size=Column(Lengths(repeatable=True), "text"))
    assert [row["size"] for row in found] == [100, 101, 100, 100]
    assert sorted(Lengths.computed) == sorted(set(words))


@pytest.mark.parametrize(
    ("handler", "arguments"),
    [
        (TextGenerator("some/model"), None),
        (TextGenerator("some/model", generation_args={"do_sample": False}), {"do_sample": True}),
        (HttpModelHandler.chat("http://localhost:1", "model"), None),
        (HttpModelHandler.chat("http://localhost:1", "model", parameters={"temperature": 0}), {"temperature": 1}),
    ],
    ids=["sampled by default", "sampled by an argument", "chat", "chat with a temperature"],
)
def test_answers_that_are_drawn_by_chance_are_never_shared(handler: Any, arguments: Any) -> None:
    column = Column(handler, "text", inference_args=arguments, dedupe=True)
    with pytest.raises(InvalidArgument, match="draws its answers by chance"):
        enriched(pa.record_batch({"text": ["a"]}), answer=column)


def test_handlers_say_if_equal_examples_get_equal_predictions() -> None:
    assert SentenceEmbedder(MINILM).is_repeatable(None)
    assert TextGenerator("some/model", generation_args={"do_sample": False}).is_repeatable(None) is None
    assert Lengths().is_repeatable(None) is None


def by_language(english: Any, german: Any) -> KeyedModelHandler[Any, Any, Any, Any]:
    return KeyedModelHandler([KeyModelMapping(["en", "us"], english), KeyModelMapping(["de"], german)])


def test_each_key_has_its_own_model() -> None:
    keys = ["en", "de", "us", None, "fr", "de"]
    table = pa.record_batch({"lang": keys, "text": ["one", "zwei", "three", "x", "quatre", None]})
    handler = by_language(Lengths(100), Lengths(200))
    good, bad = enriched(table, handles=True, size=Column(handler, "text", key="lang"))
    assert [row["size"] for row in good] == [103, 204, 105]
    reasons = {letter["lang"]: letter["_reason"] for letter in bad}
    assert "'lang' is null" in reasons[None]
    assert "no model has the key 'fr'; the KeyedModelHandler maps" in reasons["fr"]
    assert "'text' is null" in reasons["de"]
    with pytest.raises(Exception, match=r"'size' has a model for each 'lang': no model has the key 'fr'.*KeyModelMap"):
        enriched(table.slice(4, 1), size=Column(handler, "text", key="lang"))
    kept, _ = enriched(table.slice(0, 4), size=Column(handler, "text", key="lang", nulls="keep", dedupe=True))
    assert [row["size"] for row in kept] == [103, 204, 105, None]
    with pytest.raises(InvalidArgument, match="takes 'language', which is not in the table"):
        Enrich(size=Column(handler, "text", key="language")).check(table.schema)


def double(text: str) -> str:
    if text == "no":
        raise ValueError("not this one")
    return text * 2


def named(result: PredictionResult) -> str:
    if result.inference == 8:
        raise ValueError("not eight")
    return f"{result.example}: {result.inference}"


def test_functions_before_and_after_the_model_run_for_each_row() -> None:
    table = pa.record_batch({"text": ["a", "no", "four", "bcd", None]})
    handler = Lengths().with_preprocess_fn(double).with_postprocess_fn(named)
    good, bad = enriched(table, handles=True, size=Column(handler, "text"))
    assert [row["size"] for row in good] == ["aa: 2", "bcdbcd: 6"]
    reasons = {letter["text"]: letter["_reason"] for letter in bad}
    assert (reasons["no"], reasons["four"]) == ("ValueError: not this one", "ValueError: not eight")
    with pytest.raises(Exception, match="not eight"):
        enriched(table.slice(2, 1), size=Column(handler, "text"))
    once, _ = enriched(pa.record_batch({"text": ["a", "a", "b"]}), size=Column(handler, "text", dedupe=True))
    assert [row["size"] for row in once] == ["aa: 2", "aa: 2", "bb: 2"]


def keyed_double(example: Any) -> Any:
    return example[0], example[1] * 2


def keyed_named(result: Any) -> Any:
    return result[0], f"{result[0]}: {result[1].inference}"


def test_functions_of_a_model_for_each_key_see_the_keys() -> None:
    table = pa.record_batch({"lang": ["en", "de"], "text": ["one", "zwei"]})
    handler: Any = by_language(Lengths(100), Lengths(200))
    handler = handler.with_preprocess_fn(keyed_double).with_postprocess_fn(keyed_named)
    found, _ = enriched(table, size=Column(handler, "text", key="lang"))
    assert [row["size"] for row in found] == ["en: 106", "de: 208"]
    one: Any = KeyedModelHandler([KeyModelMapping(["en", "de"], Lengths(100, repeatable=True))])
    same = pa.record_batch({"lang": ["en", "de", "de"], "text": ["one"] * 3})
    found, _ = enriched(same, size=Column(one.with_postprocess_fn(keyed_named), "text", key="lang"))
    assert [row["size"] for row in found] == ["en: 103", "de: 103", "de: 103"]
    assert Lengths.computed[-2:] == ["one", "one"]  # once for each key


class MakesRoom(FromFile):
    """Writes a second version with the first batch of the first, whose other batches take long."""

    def predict(self, model: int, batch: Any, inference_args: Any = None) -> list[int]:
        new = Path(self._path).with_name("2.txt")
        if model == 1 and new.exists():
            time.sleep(0.05)
        elif model == 1:
            new.with_suffix(".part").write_text("2")
            new.with_suffix(".part").rename(new)
        return [model] * len(batch)

    def batch_elements_kwargs(self) -> dict[str, Any]:
        return {"max_batch_size": 1}


def test_a_new_version_is_used_as_soon_as_it_is_loaded(tmp_path: Path) -> None:
    """With the first version alone, the rows would take a minute."""
    (tmp_path / "1.txt").write_text("1")
    model = MakesRoom(str(tmp_path / "1.txt"))
    column = Column(model, "text", watch_model_pattern=str(tmp_path / "*.txt"), interval=0.01)
    table = pa.record_batch({"text": [str(number) for number in range(1200)]})
    versions = [row["n"] for row in enriched(table, n=column)[0]]
    assert (versions[0], versions[-1]) == (1, 2)
    assert set(versions) == {1, 2}


def test_a_pattern_must_fit_the_keys(tmp_path: Path) -> None:
    handler = by_language(FromFile("1"), FromFile("2"))
    column = Column(handler, "text", key="lang", watch_model_pattern=str(tmp_path / "*.txt"))
    with pytest.raises(InvalidArgument, match=r"expected \{key\} in it"):
        enriched(pa.record_batch({"lang": ["en"], "text": ["a"]}), n=column)
    column = Column(Lengths(), "text", watch_registry=True)
    with pytest.raises(InvalidArgument, match="no model is named by a registry"):
        enriched(pa.record_batch({"text": ["a"]}), n=column)
