from __future__ import annotations

import json
import pickle
import shutil
from pathlib import Path
from typing import Any

import apache_beam as beam
import numpy as np
import pyarrow as pa
import pytest
from apache_beam.ml.inference.base import RunInference

from luminosity.inference.handlers.text.embedder import SentenceEmbedder
from tests.inference.texts import MINILM, save_with_tokenizer, sentences, tiny_bert_config

pytestmark = pytest.mark.thorough


@pytest.fixture(scope="module")
def handler() -> SentenceEmbedder:
    return SentenceEmbedder(MINILM, device="CPU")


@pytest.fixture(scope="module")
def model(handler: SentenceEmbedder) -> Any:
    return handler.load_model()


def reference(path: str, texts: list[str], **encode: Any) -> np.ndarray:
    from sentence_transformers import SentenceTransformer

    return SentenceTransformer(path, device="cpu").encode(texts, **encode)


def embed(handler: SentenceEmbedder, texts: list[str], model: Any = None) -> np.ndarray:
    model = handler.load_model() if model is None else model
    return np.stack([result.inference for result in handler.run_inference(texts, model)])


@pytest.mark.alone
def test_equals_sentence_transformers_alone_and_batched(handler: SentenceEmbedder, model: Any) -> None:
    texts = sentences(100)
    counts = handler.cost(handler.prepare(texts))
    expected = reference(MINILM, texts)

    batched = np.concatenate([embed(handler, texts[i : i + 10], model) for i in range(0, 100, 10)])
    alone = np.concatenate([embed(handler, [text], model) for text in texts])

    assert counts.max() == 256  # the limit that the model's own files set
    assert np.median(counts) < 64
    assert np.abs(batched - expected).max() < 1e-5
    assert np.abs(alone - expected).max() < 1e-5
    assert batched.dtype == np.float32


def test_prepared_blocks_are_arrow_lists_without_padding(handler: SentenceEmbedder) -> None:
    prepared = handler.prepare(pa.array(["one two", "three"]))

    assert prepared.type == pa.list_(pa.int32())
    assert prepared.to_pylist() == [[101, 2028, 2048, 102], [101, 2093, 102]]
    assert handler.cost(prepared.slice(1)).tolist() == [3]
    assert handler.collate(prepared.slice(1)).inputs["ids"].tolist() == [101, 2093, 102]


def test_nothing_heavy_is_pickled(handler: SentenceEmbedder, model: Any) -> None:
    embed(handler, ["used before"], model)

    assert len(pickle.dumps(handler)) < 1000
    assert handler.output_type == pa.list_(pa.float32(), 384)
    assert handler.model_id == MINILM
    assert handler.memory(model) == sum(p.nbytes for p in model.parameters()) > 80_000_000


def test_an_example_that_is_no_text_names_its_type(handler: SentenceEmbedder) -> None:
    with pytest.raises(TypeError, match="of type dict, expected str"):
        handler.prepare(["fine", {"text": "not"}])


@pytest.mark.parametrize("mode", ["cls", "max", "mean_sqrt_len_tokens", "weightedmean", "lasttoken", "mean,cls"])
def test_pooling_prompts_and_dense_are_as_the_files_say(mode: str, tmp_path: Path) -> None:
    import torch
    from sentence_transformers import SentenceTransformer
    from sentence_transformers.models import Dense, Pooling, Transformer
    from transformers import BertModel

    torch.manual_seed(0)
    encoder = save_with_tokenizer(BertModel(tiny_bert_config()), tmp_path / "encoder")
    modes = tuple(mode.split(","))
    transformer = Transformer(encoder, max_seq_length=32)
    pooling = Pooling(32, pooling_mode=modes, include_prompt=False)
    modules = [transformer, pooling, Dense(32 * len(modes), 8)]
    prompts = {"query": "Find this: "}
    SentenceTransformer(modules=modules, prompts=prompts, device="cpu").save(str(tmp_path / "model"))
    path = str(tmp_path / "model")
    texts = sentences(20)

    handler = SentenceEmbedder(path, device="CPU", prompt_name="query")

    assert np.abs(embed(handler, texts) - reference(path, texts, prompt_name="query")).max() < 1e-5
    assert handler.output_type == pa.list_(pa.float32(), 8)
    with pytest.raises(ValueError, match=r"expected one of the model's prompts: .*'query'"):
        SentenceEmbedder(path, prompt_name="question").prepare(["text"])


def test_without_such_files_it_is_mean_pooling(tmp_path: Path) -> None:
    shutil.copytree(MINILM, tmp_path / "bare")
    (tmp_path / "bare" / "modules.json").unlink()
    texts = sentences(10)[4:]

    bare = SentenceEmbedder(str(tmp_path / "bare"), device="CPU")
    normal = SentenceEmbedder(str(tmp_path / "bare"), device="CPU", normalize=True, max_length=256)

    assert not np.allclose(np.linalg.norm(embed(bare, texts), axis=1), 1, atol=1e-2)
    assert np.abs(embed(normal, texts) - reference(MINILM, texts)).max() < 1e-5


def test_lower_case_comes_before_the_tokenizer(tmp_path: Path) -> None:
    shutil.copytree(MINILM, tmp_path / "model")
    (tmp_path / "model" / "sentence_bert_config.json").write_text(json.dumps({"do_lower_case": True}))
    tokenizer = json.loads((tmp_path / "model" / "tokenizer.json").read_text())
    tokenizer["normalizer"] = None
    (tmp_path / "model" / "tokenizer.json").write_text(json.dumps(tokenizer))

    prepared = SentenceEmbedder(str(tmp_path / "model")).prepare(["Beam", "beam"])

    assert prepared[0] == prepared[1]


def test_an_unknown_module_is_named(tmp_path: Path) -> None:
    shutil.copytree(MINILM, tmp_path / "model")
    modules = json.loads((tmp_path / "model" / "modules.json").read_text())
    modules[2]["type"] = "sentence_transformers.models.LSTM"
    (tmp_path / "model" / "modules.json").write_text(json.dumps(modules))

    with pytest.raises(ValueError, match="has LSTM, expected Dense or Normalize after pooling"):
        SentenceEmbedder(str(tmp_path / "model")).prepare(["text"])


def test_bfloat16_is_close_and_comes_back_as_float32(handler: SentenceEmbedder, model: Any) -> None:
    texts = ["Few processors compute quickly with such numbers.", "So these texts are short."]

    vectors = embed(SentenceEmbedder(MINILM, device="CPU", dtype="bfloat16"), texts)

    assert vectors.dtype == np.float32
    assert (vectors * embed(handler, texts, model)).sum(axis=1).min() > 0.99


def test_loading_says_nothing_and_leaves_logging_as_it_was(capfd: pytest.CaptureFixture[str]) -> None:
    from transformers.utils import logging

    before = logging.get_verbosity(), logging.is_progress_bar_enabled()
    SentenceEmbedder(MINILM, device="CPU").load_model()

    assert capfd.readouterr() == ("", "")
    assert (logging.get_verbosity(), logging.is_progress_bar_enabled()) == before


def test_a_misspelt_option_is_refused() -> None:
    with pytest.raises(TypeError, match="SentenceEmbedder got an unexpected keyword argument 'max_batch_sise'"):
        SentenceEmbedder(MINILM, max_batch_sise=3)  # type: ignore[call-arg]
    assert SentenceEmbedder(MINILM, max_batch_size=3).batch_elements_kwargs() == {"max_batch_size": 3}


def test_in_a_pipeline_of_beams_own_run_inference() -> None:
    texts = sentences(20)
    expected = dict(zip(texts, reference(MINILM, texts), strict=True))

    def check(results: list[Any]) -> None:
        assert len(results) == len(texts)
        for result in results:
            assert np.abs(result.inference - expected[result.example]).max() < 1e-5
            assert result.model_id == MINILM

    with beam.Pipeline(runner="FnApiRunner") as pipeline:
        results = pipeline | beam.Create(texts) | RunInference(SentenceEmbedder(MINILM, device="CPU"))
        results | beam.combiners.ToList() | beam.Map(check)
