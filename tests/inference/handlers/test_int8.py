"""Encoders in 8 bits give nearly the vectors of float32, from a cache that survives damage, or say why they can't."""

from __future__ import annotations

import itertools
import json
import logging
import os
import shutil
import stat
import sys
from collections.abc import Callable
from pathlib import Path
from typing import Any

import numpy as np
import pytest
import torch
import transformers

from luminosity.core import InferenceMetrics
from luminosity.errors import InvalidArgument, MissingExtra
from luminosity.inference.handler import noting
from luminosity.inference.handlers.text.embedder import SentenceEmbedder
from luminosity.inference.handlers.text.packed import int8, kept_graphs
from luminosity.inference.handlers.text.packed.encoder import pool_rows
from luminosity.inference.handlers.text.packed.int8 import Int8Encoder, _parts, graph_of  # pyright: ignore[reportPrivateUsage]
from luminosity.inference.handlers.text.packed.kept_graphs import kept_graph
from luminosity.inference.handlers.text.packed.packing import check_int8
from luminosity.inference.handlers.text.pretrained import Pretrained
from tests.inference.handlers.test_packed import CONFIGS, LONGEST, packed, rows_of, saved
from tests.inference.texts import MINILM, save_with_tokenizer, sentences, tiny_bert_config

pytestmark = pytest.mark.thorough

KINDS = sorted(CONFIGS.keys() - {"modernbert"})
MANY = [1, 2, LONGEST, 7, 30, 5, 19, 1]


@pytest.fixture(autouse=True)
def cache(tmp_path_factory: pytest.TempPathFactory, monkeypatch: pytest.MonkeyPatch) -> Path:
    root = tmp_path_factory.mktemp("cache")
    monkeypatch.setenv("XDG_CACHE_HOME", str(root))
    return root / "luminosity" / "int8"


def tiny_bert(folder: Path) -> str:
    torch.manual_seed(0)
    return save_with_tokenizer(transformers.BertModel(tiny_bert_config()), folder)


def states_of(encoder: Any, lengths: list[int]) -> Any:
    ids, rows = rows_of(lengths)
    with torch.inference_mode():
        return encoder.states(ids, encoder.positions(ids, rows), rows), rows


def embed(handler: SentenceEmbedder, texts: list[str]) -> np.ndarray:
    results: Any = handler.run_inference(texts, handler.load_model())
    return np.stack([result.inference for result in results])


@pytest.mark.parametrize("kind", KINDS)
@pytest.mark.parametrize("lengths", [MANY, [9, 9, 9], [1], [LONGEST]], ids=str)
def test_the_graph_in_float32_equals_the_encoder(kind: str, lengths: list[int], tmp_path: Path) -> None:
    saved(kind, tmp_path)
    weights = check_int8(Pretrained(str(tmp_path)))

    found, _ = states_of(Int8Encoder(weights, graph_of(weights, None)), lengths)
    expected, _ = states_of(packed(tmp_path).encoder(), lengths)

    assert (found - expected).abs().max() < 1e-4
    assert expected.std() > 0.1  # not all alike


@pytest.mark.parametrize("largest", [127, 63])
@pytest.mark.parametrize("kind", KINDS)
def test_vectors_are_near_those_of_float32(kind: str, largest: int, tmp_path: Path) -> None:
    saved(kind, tmp_path)
    weights = check_int8(Pretrained(str(tmp_path)))

    found, rows = states_of(Int8Encoder(weights, graph_of(weights, largest)), MANY)
    expected, _ = states_of(packed(tmp_path).encoder(), MANY)
    pooled = [pool_rows(states, rows, ["mean"]) for states in (found, expected)]

    assert torch.cosine_similarity(*pooled).min() > 0.99
    assert (found - expected).abs().max() > 1e-4  # not float32


@pytest.mark.parametrize("kind", KINDS)
def test_a_row_does_not_depend_on_the_rows_beside_it(
    kind: str, tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    saved(kind, tmp_path)
    weights = check_int8(Pretrained(str(tmp_path)))
    encoder = Int8Encoder(weights, graph_of(weights, 127))
    ids, rows = rows_of(MANY)
    positions = encoder.positions(ids, rows)
    together = encoder.states(ids, positions, rows)

    monkeypatch.setattr(int8, "_PART_TOKENS", 1)  # each row alone, without padding
    alone = encoder.states(ids, positions, rows)

    assert (together - alone).abs().max() < 0.05  # attention in float32 may round a number to the next of 255
    assert torch.cosine_similarity(together, alone).min() > 0.9995


def test_minilm_with_real_weights(cache: Path) -> None:
    texts = [*sentences(40), "", "one", "a " * 400]
    ours = SentenceEmbedder(MINILM, precision="int8")

    found, expected = embed(ours, texts), embed(SentenceEmbedder(MINILM, device="CPU"), texts)

    cosines = (found * expected).sum(axis=1)
    assert found.dtype == np.float32
    assert (cosines.mean() > 0.998, cosines.min() > 0.995) == (True, True), (cosines.mean(), cosines.min())
    assert ours.accelerators == ()
    [file] = cache.iterdir()
    assert ours.memory(ours.load_model()) == file.stat().st_size - 32


def test_rows_are_counted(tmp_path: Path) -> None:
    handler = SentenceEmbedder(tiny_bert(tmp_path), precision="int8")
    model, batch = handler.load_model(), handler.collate(handler.prepare(["one", "", "one two"]))
    with noting() as counters:
        handler.predict(model, batch)
    assert counters == {InferenceMetrics.PACKED: 3, InferenceMetrics.INT8: 3}


def builds(monkeypatch: pytest.MonkeyPatch) -> list[int]:
    found: list[int] = []

    def counted(*arguments: Any) -> bytes:
        found.append(1)
        return graph_of(*arguments)

    monkeypatch.setattr(int8, "graph_of", counted)
    return found


def test_weights_are_made_once(tmp_path: Path, cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    path, built = tiny_bert(tmp_path), builds(monkeypatch)
    first = embed(SentenceEmbedder(path, precision="int8"), ["one", "two"])
    assert (embed(SentenceEmbedder(path, precision="int8"), ["one", "two"]) == first).all()
    assert len(built) == 1
    [file] = cache.iterdir()
    assert [stat.S_IMODE(os.stat(each).st_mode) for each in (cache, file)] == [0o700, 0o600]

    weights = tmp_path / "model.safetensors"
    os.utime(weights, ns=(0, weights.stat().st_mtime_ns + 1_000_000_000))
    SentenceEmbedder(path, precision="int8").load_model()
    assert len(built) == 2  # the file may be another one


def cut(content: bytes) -> bytes:
    return content[:-100]


def changed(content: bytes) -> bytes:
    return content[:5000] + bytes([content[5000] ^ 1]) + content[5001:]


def emptied(_: bytes) -> bytes:
    return b""


@pytest.mark.parametrize("damage", [cut, changed, emptied])
def test_a_damaged_file_is_made_again(
    damage: Callable[[bytes], bytes],
    tmp_path: Path,
    cache: Path,
    monkeypatch: pytest.MonkeyPatch,
    caplog: pytest.LogCaptureFixture,
) -> None:
    path, built = tiny_bert(tmp_path), builds(monkeypatch)
    first = embed(SentenceEmbedder(path, precision="int8"), ["one"])
    [file] = cache.iterdir()
    whole = file.read_bytes()
    file.write_bytes(damage(whole))

    assert (embed(SentenceEmbedder(path, precision="int8"), ["one"]) == first).all()
    assert len(built) == 2
    assert "is damaged" in caplog.text
    assert file.read_bytes() == whole


def test_a_folder_that_others_write_is_not_used(cache: Path, caplog: pytest.LogCaptureFixture) -> None:
    cache.mkdir(parents=True)
    cache.chmod(0o777)
    assert [kept_graph("name", lambda: b"made") for _ in range(2)] == [b"made", b"made"]
    assert not list(cache.iterdir())
    assert "are not kept" in caplog.text


def test_a_folder_that_cannot_be_made_is_no_failure(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch, caplog: pytest.LogCaptureFixture
) -> None:
    (tmp_path / "file").touch()
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path / "file"))
    assert kept_graph("name", lambda: b"made") == b"made"
    assert "are not kept" in caplog.text


def test_the_files_not_used_for_longest_are_removed(cache: Path, monkeypatch: pytest.MonkeyPatch) -> None:
    monkeypatch.setattr(kept_graphs, "_LIMIT", 3 * (32 + 10))
    for number in range(3):
        kept_graph(str(number), lambda: b"1234567890")
        os.utime(cache / f"{number}.onnx", (number, number))
    assert kept_graph("0", lambda: b"never") == b"1234567890"  # now used last
    kept_graph("3", lambda: b"1234567890")
    assert sorted(each.name for each in cache.iterdir()) == ["0.onnx", "2.onnx", "3.onnx"]


WRONG: dict[str, dict[str, Any]] = {
    r"found precision='int4', expected 'int8' or None": {"precision": "int4"},
    r"with device='GPU', expected the CPU": {"device": "GPU"},
    r"with device='cuda:1', expected the CPU": {"device": "cuda:1"},
    r"with dtype='bfloat16', expected the CPU, no dtype": {"dtype": "bfloat16"},
    r"with compile=True, expected the CPU, no dtype and no compile=True": {"compile": True},
}


@pytest.mark.parametrize("message", WRONG)
def test_arguments_that_do_not_fit_are_refused(message: str) -> None:
    with pytest.raises(InvalidArgument, match=message):
        SentenceEmbedder(MINILM, **{"precision": "int8", **WRONG[message]})


def test_other_families_are_refused_before_the_run(tmp_path: Path) -> None:
    saved("modernbert", tmp_path)
    with pytest.raises(InvalidArgument, match=r"its positions are rotated; expected BERT, .*leave out precision"):
        SentenceEmbedder(str(tmp_path), precision="int8").check_files()
    config = json.loads((tmp_path / "config.json").read_text())
    (tmp_path / "config.json").write_text(json.dumps({**config, "model_type": "albert"}))
    with pytest.raises(InvalidArgument, match=r"models of the type 'albert' are not packed; expected BERT"):
        SentenceEmbedder(str(tmp_path), precision="int8").check_files()


def test_what_only_transformers_computes_is_refused(tmp_path: Path) -> None:
    arguments = SentenceEmbedder(MINILM, precision="int8", load_model_args={"attn_implementation": "eager"})
    with pytest.raises(InvalidArgument, match="attn_implementation is an argument of transformers"):
        arguments.check_files()
    shutil.copytree(MINILM, tmp_path / "model")
    pooling = tmp_path / "model" / "1_Pooling" / "config.json"
    pooling.write_text(json.dumps({**json.loads(pooling.read_text()), "include_prompt": False}))
    with pytest.raises(InvalidArgument, match="a prompt that pooling leaves out, or methods"):
        SentenceEmbedder(str(tmp_path / "model"), precision="int8", prompt="Find: ").check_files()
    handler = SentenceEmbedder(tiny_bert(tmp_path / "tiny"), precision="int8")
    with pytest.raises(InvalidArgument, match="found inference_args output_attentions"):
        handler.run_inference(["one"], handler.load_model(), {"output_attentions": False})


@pytest.mark.parametrize("library", ["onnxruntime", "onnx"])
def test_a_missing_library_is_named(library: str, monkeypatch: pytest.MonkeyPatch) -> None:
    import importlib.util

    found = importlib.util.find_spec
    monkeypatch.setattr(importlib.util, "find_spec", lambda name: None if name == library else found(name))
    with pytest.raises(MissingExtra, match=f"^{library} is not installed.*onnxruntime"):
        SentenceEmbedder(MINILM, precision="int8").check_files()


def test_a_machine_that_overflows_gets_smaller_weights(monkeypatch: pytest.MonkeyPatch) -> None:
    class Overflowing:
        def run(self, *_: Any) -> list[Any]:
            return [np.full((16, 32), 32767.0)]

    monkeypatch.setattr(int8, "_session", lambda _: Overflowing())
    int8._largest_weight.cache_clear()  # pyright: ignore[reportPrivateUsage]
    assert int8._largest_weight() == 63  # pyright: ignore[reportPrivateUsage]
    int8._largest_weight.cache_clear()  # pyright: ignore[reportPrivateUsage]


def test_nothing_is_logged_for_whole_files(caplog: pytest.LogCaptureFixture) -> None:
    with caplog.at_level(logging.WARNING):
        assert [kept_graph("name", lambda: b"made") for _ in range(2)] == [b"made", b"made"]
    assert not caplog.records


def test_a_handler_is_pickled_with_its_precision() -> None:
    import cloudpickle

    handler = cloudpickle.loads(cloudpickle.dumps(SentenceEmbedder(MINILM, precision="int8")))
    assert handler.packing.is_int8
    assert not handler.sums_costs
    assert sys.modules["onnxruntime"]


def test_large_states_after_gelu_are_no_further_away(tmp_path: Path) -> None:
    torch.manual_seed(0)
    model = transformers.AutoModel.from_config(CONFIGS["bert"]()).eval()
    with torch.no_grad():
        for layer in model.encoder.layer:
            layer.intermediate.dense.weight[0].mul_(200)  # one number of a token is far larger than all others
            layer.output.dense.weight[:, 0].div_(200)
            layer.output.dense.weight[:8, 1:].add_(0.5)  # whose weights have a sum that is far from zero
    model.save_pretrained(tmp_path)
    weights = check_int8(Pretrained(str(tmp_path)))

    found, rows = states_of(Int8Encoder(weights, graph_of(weights, 127)), MANY)
    expected, _ = states_of(packed(tmp_path).encoder(), MANY)
    pooled = [pool_rows(states, rows, ["mean"]) for states in (found, expected)]

    assert torch.cosine_similarity(*pooled).min() > 0.998


def test_a_long_row_is_not_padded_into_a_part_with_many_short_ones() -> None:
    lengths = [512, *[10] * 700, 300]
    starts = np.concatenate([[0], np.cumsum(lengths)])
    parts = _parts(starts, 2048)
    assert (parts[0], parts[-1]) == (0, len(lengths))
    for begin, end in itertools.pairwise(parts):
        assert (end - begin) * max(lengths[begin:end]) <= 4 * 2048
        assert end - begin == 1 or starts[end] - starts[begin] <= 2048
