"""Labels and entities equal those of transformers' own pipelines."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest
from apache_beam.ml.inference.base import RunInference

from luminosity.inference.handlers.text.classifiers import TextClassifier, TokenClassifier
from tests.inference.texts import MINILM, save_with_tokenizer, sentences, tiny_bert_config

pytestmark = pytest.mark.thorough

# A single text's scores equal the pipeline's exactly; in a batch, float32 is summed in another order.
ROUNDING = 1e-4

LABELS = ["O", "B-PER", "I-PER", "B-LOC", "I-LOC"]


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def saved(kind: str, folder: Path, labels: list[str], **config: Any) -> str:
    """Make a small model with random weights, always the same."""
    import torch
    import transformers

    torch.manual_seed(0)
    names = {"id2label": dict(enumerate(labels)), "label2id": {label: i for i, label in enumerate(labels)}}
    model = getattr(transformers, kind)(tiny_bert_config(**names, **config))
    return save_with_tokenizer(model, folder / f"{kind}{len(labels)}{config.get('problem_type')}")


def predictions(handler: Any, texts: list[str]) -> list[Any]:
    return [result.inference for result in handler.run_inference(texts, handler.load_model())]


@pytest.mark.parametrize("problem_type", [None, "multi_label_classification", "regression"])
def test_labels_are_those_of_the_pipeline(problem_type: str | None, folder: Path) -> None:
    from transformers import pipeline

    path = saved("BertForSequenceClassification", folder, ["bad", "fair", "good"], problem_type=problem_type)
    texts = sentences(30)
    handler = TextClassifier(path, device="CPU", threshold=0.4)

    found = predictions(handler, texts)

    reference = pipeline("text-classification", path, device="cpu", top_k=None)
    for ours, theirs in zip(found, reference(texts, truncation=True, max_length=512), strict=True):
        assert ours["label"] == theirs[0]["label"]
        assert ours["score"] == pytest.approx(theirs[0]["score"], abs=ROUNDING)
        assert ours["scores"] == pytest.approx({each["label"]: each["score"] for each in theirs}, abs=ROUNDING)
        if problem_type == "multi_label_classification":
            assert set(ours["labels"]) == {each["label"] for each in theirs if each["score"] >= 0.4}
    assert len({each["label"] for each in found}) > 1
    assert pa.array(found, handler.output_type).to_pylist() == found


def test_one_label_is_a_probability_of_its_own(folder: Path) -> None:
    path = saved("BertForSequenceClassification", folder, ["spam"])

    [found] = predictions(TextClassifier(path, device="CPU"), ["Win a prize"])

    assert 0 < found["score"] < 1
    assert found["labels"] == (["spam"] if found["score"] >= 0.5 else [])


def test_a_model_without_the_head_is_refused() -> None:
    with pytest.raises(ValueError, match=r"lacks weights that BertForSequenceClassification needs: classifier.bias"):
        TextClassifier(MINILM, device="CPU").load_model()


@pytest.mark.parametrize("aggregation", ["none", "simple", "first", "max", "average"])
def test_entities_are_those_of_the_pipeline(aggregation: Any, folder: Path) -> None:
    from transformers import pipeline

    path = saved("BertForTokenClassification", folder, LABELS)
    texts = sentences(30)

    found = predictions(TokenClassifier(path, device="CPU", aggregation=aggregation), texts)

    reference = pipeline("token-classification", path, device="cpu", aggregation_strategy=aggregation)
    total = 0
    for text, ours, theirs in zip(texts, found, reference(texts), strict=True):
        named = [(each["start"], each["end"], each.get("entity_group", each.get("entity"))) for each in theirs]
        assert [(each["start"], each["end"], each["label"]) for each in ours] == named
        assert [each["score"] for each in ours] == pytest.approx([each["score"] for each in theirs], abs=ROUNDING)
        assert [each["text"] for each in ours] == [text[start:end] for start, end, _ in named]
        total += len(ours)
    assert total > 500


def test_texts_without_entities_have_empty_lists(folder: Path) -> None:
    path = saved("BertForTokenClassification", folder, LABELS)
    handler = TokenClassifier(path, device="CPU", ignore=["O", "PER", "LOC"])

    assert predictions(handler, ["", "Ada in Geneva"]) == [[], []]
    assert predictions(TokenClassifier(path, device="CPU", aggregation="first"), [""]) == [[]]


def test_an_unknown_aggregation_names_those_there_are() -> None:
    with pytest.raises(ValueError, match="found aggregation='word', expected one of none, simple, first"):
        TokenClassifier(MINILM, aggregation="word")  # type: ignore[arg-type]


@pytest.mark.parametrize("kind", ["BertForSequenceClassification", "BertForTokenClassification"])
def test_in_a_pipeline_of_beams_own_run_inference(kind: str, folder: Path) -> None:
    path = saved(kind, folder, LABELS)
    make = TextClassifier if kind == "BertForSequenceClassification" else TokenClassifier
    texts = sentences(12)
    expected = dict(zip(texts, predictions(make(path, device="CPU", max_length=16), texts), strict=True))

    def check(results: list[Any]) -> None:
        assert {result.example for result in results} == set(texts)
        for result in results:
            assert result.model_id == path
            assert _without_scores(result.inference) == _without_scores(expected[result.example])

    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        results = pipeline | beam.Create(texts) | RunInference(make(path, device="CPU", max_length=16))
        results | beam.combiners.ToList() | beam.Map(check)


def _without_scores(prediction: Any) -> Any:
    if isinstance(prediction, list):
        return [_without_scores(entity) for entity in prediction]
    return {name: value for name, value in prediction.items() if not name.startswith("score")}


def test_a_new_version_needs_the_tokenizer_that_prepares_the_texts(tmp_path: Path) -> None:
    from transformers import AutoTokenizer, BertForSequenceClassification

    from luminosity.errors import ModelUnavailable
    from luminosity.inference.adapting.wrapping import NewVersion

    first, same, other = (
        save_with_tokenizer(BertForSequenceClassification(tiny_bert_config()), tmp_path / name)
        for name in ("first", "same", "other")
    )
    AutoTokenizer.from_pretrained(first, do_lower_case=False).save_pretrained(other)
    handler = TextClassifier(first)
    NewVersion(TextClassifier(same), handler).load_model()
    with pytest.raises(ModelUnavailable, match=r"other' has another tokenizer than .*first'"):
        NewVersion(TextClassifier(other), handler).load_model()
