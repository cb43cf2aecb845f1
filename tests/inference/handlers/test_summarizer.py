"""Summaries equal those of transformers' own ``generate``."""

from __future__ import annotations

from pathlib import Path
from typing import Any

import apache_beam as beam
import pyarrow as pa
import pytest

from luminosity import Column, Enrich, RunInference, Summarizer, TextGenerator
from luminosity.errors import InvalidArgument, InvalidType
from tests.inference.texts import MINILM, save_with_tokenizer, sentences


@pytest.fixture(scope="module")
def folder(tmp_path_factory: pytest.TempPathFactory) -> Path:
    return tmp_path_factory.mktemp("models")


def saved(kind: str, folder: Path) -> str:
    """Make a small model with random weights: T5 has relative positions and a prefix, BART has learnt positions."""
    import torch
    import transformers

    if (folder / kind).exists():
        return str(folder / kind)
    torch.manual_seed(0)
    ids = {"bos_token_id": 101, "eos_token_id": 102, "pad_token_id": 0, "decoder_start_token_id": 0}
    config: Any
    if kind == "T5":
        config = transformers.T5Config(vocab_size=30522, d_model=32, d_kv=16, d_ff=64, num_layers=2, num_heads=2, **ids)
        config.initializer_factor = 5.0  # large, so that summaries differ from text to text
        config.task_specific_params = {"summarization": {"prefix": "summarize: "}}
    else:
        sizes = {"encoder_layers": 2, "decoder_layers": 2, "encoder_attention_heads": 2, "decoder_attention_heads": 2}
        widths = {"encoder_ffn_dim": 64, "decoder_ffn_dim": 64, "d_model": 32, "init_std": 0.5}
        config = transformers.BartConfig(
            vocab_size=30522, max_position_embeddings=64, forced_eos_token_id=None, **sizes, **widths, **ids
        )
    model = getattr(transformers, f"{kind}ForConditionalGeneration")(config)
    return save_with_tokenizer(model, folder / kind)


@pytest.mark.parametrize(("kind", "prefix", "limit"), [("T5", "summarize: ", 512), ("Bart", "", 64)])
def test_a_batch_says_what_generate_says_of_each_text(kind: str, prefix: str, limit: int, folder: Path) -> None:
    path = saved(kind, folder)
    handler = Summarizer(path, device="CPU", max_new_tokens=8, generation_args={"do_sample": False})
    texts = sentences(12)
    model = handler.load_model()

    found = [result.inference for result in handler.run_inference(texts, model)]

    from transformers import AutoModelForSeq2SeqLM, AutoTokenizer

    own, tokenizer = AutoModelForSeq2SeqLM.from_pretrained(path), AutoTokenizer.from_pretrained(path)
    expected: list[str] = []
    for text in texts:
        inputs = tokenizer(prefix + text, truncation=True, max_length=limit, return_tensors="pt")
        ids, mask = inputs["input_ids"], inputs["attention_mask"]
        tokens = own.generate(input_ids=ids, attention_mask=mask, max_new_tokens=8, do_sample=False)
        expected.append(tokenizer.decode(tokens[0], skip_special_tokens=True))
    assert found == expected
    assert len(set(found)) > 3
    assert max(handler.cost(handler.prepare(texts))) <= limit + 8
    # A prompt of your own replaces the model's, and arguments of the run come before those of the handler.
    assert Summarizer(path, prompt="translate: ").prompt == "translate: "
    [short] = handler.run_inference(texts[4:5], model, {"max_new_tokens": 2})
    assert len(short.inference) < len(found[4])


def test_a_model_of_the_wrong_kind_is_refused(folder: Path) -> None:
    with pytest.raises(InvalidArgument, match=r"is a model of the type 'bert', expected a sequence-to-sequence model"):
        Summarizer(MINILM, device="CPU").load_model()
    with pytest.raises(InvalidArgument, match=r"sequence-to-sequence model of the type 't5'.*use Summarizer"):
        TextGenerator(saved("T5", folder), device="CPU").load_model()
    with pytest.raises(InvalidArgument, match=r"found max_new_tokens=0, expected at least one"):
        Summarizer(MINILM, max_new_tokens=0)


def test_rows_that_can_not_be_summarised_are_not_lost(folder: Path) -> None:
    handler = Summarizer(saved("T5", folder), device="CPU", max_new_tokens=4, max_length=32)
    enrich = Enrich(summary=Column(handler, "review"))
    with pytest.raises(InvalidArgument, match=r"takes 'review', which is not in the table; it has 'reviews'.*did you"):
        enrich.check(pa.schema([("reviews", pa.string())]))
    with pytest.raises(InvalidType, match="found binary, expected text; decode the column"):
        enrich.check(pa.schema([("review", pa.binary())]))
    table = pa.record_batch({"id": range(5), "review": ["good", None, "", "bad " * 100, "fine"]})

    def check(parts: list[Any]) -> None:
        rows = [row for part in parts for row in part.to_pylist()]
        assert sorted(row["id"] for row in rows) == list(range(5))
        letters = {row["id"]: row.get("_reason") for row in rows if row.get("_reason")}
        assert letters == {1: "ValueError: 'review' is null"}
        assert all(isinstance(row["summary"], str) for row in rows if row["id"] != 1)

    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        good, bad = pipeline | beam.Create([table]) | enrich.with_exception_handling()
        _ = (good, bad) | beam.Flatten() | beam.combiners.ToList() | beam.Map(check)


def test_elements_that_are_no_texts_become_dead_letters(folder: Path) -> None:
    handler = Summarizer(saved("T5", folder), device="CPU", max_new_tokens=4)

    def check(counts: list[Any]) -> None:
        assert sorted(counts) == [("bad", "<class 'luminosity.errors.InvalidType'>"), ("good", "text")]

    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        examples = pipeline | beam.Create(["text", float("nan")])
        results, failed = examples | RunInference(handler).with_exception_handling()
        good = results | "good" >> beam.Map(lambda result: ("good", result.example))
        bad = failed.failed_inferences | "bad" >> beam.Map(lambda letter: ("bad", str(letter[1][0])))
        _ = (good, bad) | beam.Flatten() | beam.combiners.ToList() | beam.Map(check)
