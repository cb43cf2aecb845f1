"""The packed encoder gives the vectors of transformers, or leaves the model to it."""

from __future__ import annotations

import json
import logging
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pyarrow as pa
import pytest
import torch
import transformers

from luminosity.errors import HandlerError
from luminosity.inference.blocks import take
from luminosity.inference.handlers.text.embedder import SentenceEmbedder
from luminosity.inference.handlers.text.packed.choice import attends_without_padding
from luminosity.inference.handlers.text.packed.encoder import Rows, pool_rows
from luminosity.inference.handlers.text.packed.packing import Packing, packing_of
from luminosity.inference.handlers.text.pretrained import Pretrained
from tests.inference.texts import MINILM, save_with_tokenizer, sentences, tiny_bert_config

pytestmark = pytest.mark.thorough

CPU = torch.device("cpu")
LONGEST = 64
SMALL: dict[str, Any] = {
    "vocab_size": 200,
    "hidden_size": 48,
    "num_hidden_layers": 4,
    "num_attention_heads": 3,
    "intermediate_size": 80,
    "initializer_range": 0.2,
}
AFTER_PADDING: dict[str, Any] = {"max_position_embeddings": LONGEST + 2, "type_vocab_size": 1, "pad_token_id": 1}
CONFIGS: dict[str, Callable[[], Any]] = {
    "bert": lambda: transformers.BertConfig(**SMALL, max_position_embeddings=LONGEST),
    "roberta": lambda: transformers.RobertaConfig(**SMALL, **AFTER_PADDING),
    "xlm-roberta": lambda: transformers.XLMRobertaConfig(**SMALL, **AFTER_PADDING),
    "distilbert": lambda: transformers.DistilBertConfig(
        vocab_size=200, dim=48, n_layers=3, n_heads=3, hidden_dim=80, max_position_embeddings=LONGEST
    ),
    "mpnet": lambda: transformers.MPNetConfig(
        **SMALL, max_position_embeddings=LONGEST + 2, pad_token_id=1, bos_token_id=0
    ),
    "modernbert": lambda: transformers.ModernBertConfig(
        **SMALL, local_attention=8, max_position_embeddings=LONGEST, pad_token_id=0,
        bos_token_id=2, eos_token_id=3, cls_token_id=2, sep_token_id=3,
    ),
}  # fmt: skip


def saved(kind: str, folder: Path) -> Any:
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(CONFIGS[kind]()).eval()
    model.save_pretrained(folder)
    return model


def packed(folder: Path) -> Packing:
    found = packing_of(Pretrained(str(folder)), CPU, None)
    assert found is not None
    return found


def rows_of(lengths: list[int]) -> tuple[Any, Rows]:
    starts = torch.from_numpy(np.concatenate([[0], np.cumsum(lengths)]).astype(np.int32))
    ids = torch.from_numpy(np.random.default_rng(sum(lengths)).integers(4, 200, sum(lengths)).astype(np.int32))
    return ids, Rows.of(starts, sum(lengths), max(lengths))


def padded(ids: Any, lengths: list[int], pad: int) -> tuple[Any, Any]:
    mask = torch.arange(max(lengths)) < torch.tensor(lengths)[:, None]
    matrix = torch.full(mask.shape, pad)
    matrix[mask] = ids.long()
    return matrix, mask


@pytest.mark.parametrize("kind", CONFIGS)
@pytest.mark.parametrize("lengths", [[1, 2, LONGEST, 7, 30], [9, 9, 9], [1], [LONGEST]], ids=str)
def test_equals_transformers(kind: str, lengths: list[int], tmp_path: Path) -> None:
    model = saved(kind, tmp_path)
    ids, rows = rows_of(lengths)
    matrix, mask = padded(ids, lengths, model.config.pad_token_id or 0)

    with torch.inference_mode():
        encoder = packed(tmp_path).encoder()
        found = encoder.states(ids, encoder.positions(ids, rows), rows)
        expected = model(input_ids=matrix, attention_mask=mask.long()).last_hidden_state[mask]

    assert (found - expected).abs().max() < 1e-5
    assert expected.std() > 0.1  # not all alike


@pytest.mark.parametrize("kind", ["roberta", "mpnet"])
def test_a_padding_token_inside_a_text_has_no_position(kind: str, tmp_path: Path) -> None:
    model = saved(kind, tmp_path)
    ids, rows = rows_of([5, 3])
    ids[[1, 6]] = 1
    matrix, mask = padded(ids, [5, 3], 1)

    with torch.inference_mode():
        encoder = packed(tmp_path).encoder()
        found = encoder.states(ids, encoder.positions(ids, rows), rows)
        expected = model(input_ids=matrix, attention_mask=mask.long()).last_hidden_state[mask]

    assert (found - expected).abs().max() < 1e-5


def test_a_model_with_a_head_is_read_without_it(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.BertForMaskedLM(CONFIGS["bert"]()).eval()
    model.save_pretrained(tmp_path)
    ids, rows = rows_of([4])

    with torch.inference_mode():
        encoder = packed(tmp_path).encoder()
        found = encoder.states(ids, encoder.positions(ids, rows), rows)
        expected = model.bert(input_ids=ids.long()[None]).last_hidden_state[0]

    assert (found - expected).abs().max() < 1e-5


def embed(handler: SentenceEmbedder, texts: list[str], model: Any, **arguments: Any) -> np.ndarray:
    results: Any = handler.run_inference(texts, model, arguments or None)
    return np.stack([result.inference for result in results])


def test_minilm_gives_the_same_vectors_either_way() -> None:
    texts = [*sentences(40), "", "one", "a " * 400]
    ours, theirs = SentenceEmbedder(MINILM, device="CPU"), SentenceEmbedder(MINILM, device="CPU")
    theirs.packs_rows = False
    model = ours.load_model()

    assert ours.packing is not None
    assert theirs.packing is None
    found, expected = embed(ours, texts, model), embed(theirs, texts, theirs.load_model())
    assert np.abs(found - expected).max() < 1e-5
    assert np.abs(found[2] - embed(ours, texts[2:3], model)[0]).max() < 1e-5
    # Arguments of transformers' model reach it.
    assert np.abs(found - embed(ours, texts, model, output_attentions=False)).max() < 1e-5


def test_known_models_are_loaded_without_transformers() -> None:
    import subprocess
    import sys

    code = (
        "import sys\n"
        "from luminosity.inference.handlers.text.embedder import SentenceEmbedder\n"
        f"handler = SentenceEmbedder({MINILM!r}, device='CPU')\n"
        "print(len(list(handler.run_inference(['text'], handler.load_model()))))\n"
        "assert 'torch' in sys.modules\n"
        "assert 'transformers' not in sys.modules\n"
    )
    done = subprocess.run([sys.executable, "-c", code], capture_output=True, text=True, timeout=120, check=False)
    assert (done.returncode, done.stdout) == (0, "1\n"), done.stderr


@pytest.mark.parametrize("mode", ["cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"])
def test_every_pooling_gives_the_same_vectors_either_way(mode: str, tmp_path: Path) -> None:
    torch.manual_seed(0)
    path = save_with_tokenizer(transformers.BertModel(tiny_bert_config()), tmp_path)
    ours, theirs = (SentenceEmbedder(path, device="CPU", pooling=mode, normalize=True) for _ in range(2))
    theirs.packs_rows = False

    assert (
        np.abs(embed(ours, sentences(9), ours.load_model()) - embed(theirs, sentences(9), theirs.load_model())).max()
        < 1e-5
    )


def edit(folder: Path, **changes: Any) -> None:
    path = folder / "config.json"
    config = {**json.loads(path.read_text()), **changes}
    path.write_text(json.dumps({name: value for name, value in config.items() if value != "REMOVED"}))


def without_safetensors(folder: Path) -> None:
    (folder / "model.safetensors").rename(folder / "pytorch_model.bin")


def with_adapters(folder: Path) -> None:
    (folder / "adapter_config.json").write_text("{}")


def broken(folder: Path) -> None:
    (folder / "model.safetensors").write_bytes(b"not a file of tensors")


def rewritten(change: Callable[[dict[str, Any]], Any]) -> Callable[[Path], None]:
    def rewrite(folder: Path) -> None:
        from safetensors.torch import load_file, save_file

        tensors = load_file(folder / "model.safetensors")
        change(tensors)
        save_file(tensors, folder / "model.safetensors", metadata={"format": "pt"})

    return rewrite


def quarter(tensors: dict[str, Any]) -> None:
    tensors["embeddings.word_embeddings.weight"] = tensors["embeddings.word_embeddings.weight"][:50].clone()


UNFIT: dict[str, Callable[[Path], None]] = {
    "hidden_act is 'relu'": lambda folder: edit(folder, hidden_act="relu"),
    "position_embedding_type is 'relative_key'": lambda folder: edit(folder, position_embedding_type="relative_key"),
    "is_decoder is True": lambda folder: edit(folder, is_decoder=True),
    "the setting 'quantization_config' of config.json is not known": lambda folder: edit(
        folder, quantization_config={}
    ),
    "models of the type 'albert' are not packed": lambda folder: edit(folder, model_type="albert"),
    "layer_norm_eps is None": lambda folder: edit(folder, layer_norm_eps="REMOVED"),
    "5 heads do not divide 48": lambda folder: edit(folder, num_attention_heads=5),
    "it has no model.safetensors": without_safetensors,
    "it has adapters": with_adapters,
    "is no file of safetensors": broken,
    "has the tensor 'encoder.layer.0.lora_A.weight', which is not known": rewritten(
        lambda tensors: tensors.update({"encoder.layer.0.lora_A.weight": torch.zeros(2)})
    ),
    "has no tensor 'encoder.layer.1.output.dense.bias'": rewritten(
        lambda tensors: tensors.pop("encoder.layer.1.output.dense.bias")
    ),
    "has the sizes (50, 48), not (200, 48)": rewritten(quarter),
}  # fmt: skip


@pytest.mark.parametrize("reason", UNFIT)
def test_what_is_not_known_is_left_to_transformers(
    reason: str, tmp_path: Path, caplog: pytest.LogCaptureFixture
) -> None:
    saved("bert", tmp_path)
    assert packing_of(Pretrained(str(tmp_path)), CPU, None) is not None
    UNFIT[reason](tmp_path)

    with caplog.at_level(logging.INFO):
        assert packing_of(Pretrained(str(tmp_path)), CPU, None) is None
    assert reason in caplog.text


@pytest.mark.parametrize(
    "change", [{"mlp_bias": True}, {"rope_parameters": {"full_attention": {"rope_type": "linear", "factor": 2.0}}}]
)
def test_variants_of_modernbert_are_left_to_transformers(change: dict[str, Any], tmp_path: Path) -> None:
    saved("modernbert", tmp_path)
    edit(tmp_path, **change)
    assert packing_of(Pretrained(str(tmp_path)), CPU, None) is None


def test_other_types_and_arguments_are_left_to_transformers(tmp_path: Path) -> None:
    saved("bert", tmp_path)
    assert packing_of(Pretrained(str(tmp_path)), CPU, torch.bfloat16) is None
    assert packing_of(Pretrained(str(tmp_path), {"attn_implementation": "eager"}), CPU, None) is None
    prompted = SentenceEmbedder(MINILM, device="CPU", prompt="Find: ")
    assert prompted.packing is not None
    shutil.copytree(MINILM, tmp_path / "prompts")
    pooling = tmp_path / "prompts" / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({**json.loads(pooling.read_text()), "include_prompt": False}))
    assert SentenceEmbedder(str(tmp_path / "prompts"), device="CPU", prompt="Find: ").packing is None
    assert SentenceEmbedder(MINILM, device="CPU", compile=True).packing is None


class OwnLoad(SentenceEmbedder):
    """Loads the encoder in its own way."""

    def load_model(self) -> Any:
        return torch.nn.ModuleList([self.load("AutoModel", optional=("pooler.",))])


class ChangedModel(SentenceEmbedder):
    """Changes the model of transformers after it is loaded."""

    def load_model(self) -> Any:
        model = super().load_model().eval()
        assert model[0].config.model_type == "bert"
        return model


class OwnCall(SentenceEmbedder):
    """Counts the calls of the encoder."""

    calls = 0

    def call(self, module: Any, batch: Any, inference_args: dict[str, Any]) -> Any:
        type(self).calls += 1
        return super().call(module, batch, inference_args)


class OwnCollate(SentenceEmbedder):
    """Pads in its own way."""

    def collate(self, prepared: Any) -> Any:
        return super().collate(prepared)


@pytest.mark.parametrize("kind", [OwnLoad, ChangedModel, OwnCall, OwnCollate])
def test_subclasses_with_methods_of_their_own_run_as_before(kind: type[SentenceEmbedder], tmp_path: Path) -> None:
    OwnCall.calls = 0
    path = save_with_tokenizer(transformers.BertModel(tiny_bert_config()), tmp_path)
    ours, plain = kind(path, device="CPU"), SentenceEmbedder(path, device="CPU")
    assert ours.packing is None
    assert plain.packing is not None
    texts = ["one", "one two"]
    assert np.abs(embed(ours, texts, ours.load_model()) - embed(plain, texts, plain.load_model())).max() < 1e-5
    assert OwnCall.calls == (kind is OwnCall)


def test_a_batch_and_a_model_of_different_kinds_fit(tmp_path: Path) -> None:
    """The processes that collate and compute may have decided otherwise: one may have no device."""
    path = save_with_tokenizer(transformers.BertModel(tiny_bert_config()), tmp_path)
    ours, theirs = SentenceEmbedder(path, device="CPU"), SentenceEmbedder(path, device="CPU")
    theirs.packs_rows = False
    prepared = ours.prepare(["one", "one two"])
    models = {each: each.load_model() for each in (ours, theirs)}
    expected = ours.collect(ours.predict(models[ours], ours.collate(prepared)))
    for handler, model in ((ours, models[theirs]), (theirs, models[ours])):
        found = handler.collect(handler.predict(model, handler.collate(prepared)))
        assert np.abs(found - expected).max() < 1e-5


def test_the_file_that_is_named_is_read(tmp_path: Path) -> None:
    path = save_with_tokenizer(transformers.BertModel(tiny_bert_config()), tmp_path)
    Path(path, "model.gguf").write_bytes(b"GGUF")
    assert SentenceEmbedder(f"{path}/model.gguf", device="CPU").packing is None


def test_a_model_that_is_to_be_compiled_runs_in_transformers() -> None:
    assert SentenceEmbedder(MINILM, device="CPU", compile=True).packing is None


def test_the_cpu_pads_inside_attention_so_that_lengths_still_matter() -> None:
    handler = SentenceEmbedder(MINILM, device="CPU")
    assert handler.packing is not None
    assert not handler.sums_costs
    assert not attends_without_padding(handler.packing.weights.shape, CPU, torch.bfloat16)
    batch = handler.collate(take(handler.prepare(["one two", "three"]), np.arange(2)))
    assert batch.inputs["ids"].tolist() == [101, 2028, 2048, 102, 101, 2093, 102]
    assert batch.inputs["starts"].tolist() == [0, 4, 7]


def test_pooling_of_rows_of_one_token() -> None:
    _, rows = rows_of([1, 1])
    states = torch.arange(8.0).reshape(2, 4)
    for mode in ("cls", "max", "mean", "mean_sqrt_len_tokens", "weightedmean", "lasttoken"):
        assert torch.equal(pool_rows(states, rows, [mode]), states), mode


def test_a_token_without_a_vector_is_an_error(tmp_path: Path) -> None:
    handler = SentenceEmbedder(save_with_tokenizer(transformers.BertModel(tiny_bert_config()), tmp_path))
    assert handler.packing is not None
    words = handler.packing.weights.shape.vocabulary
    tokens = pa.array([[1, 2], [words, 3]], pa.list_(pa.int32()))
    with pytest.raises(HandlerError, match=f"found the token {words} of .*, which has vectors for {words:,} tokens"):
        handler.collate(tokens)
    assert handler.collate(tokens[:1]).count == 1
