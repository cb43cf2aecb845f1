"""Tokenizers that are read without transformers: exactly those of transformers, or none."""

from __future__ import annotations

import functools
import json
import os
import shutil
from collections.abc import Callable
from pathlib import Path
from typing import Any

import pytest
import tokenizers
import transformers
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st

from luminosity import SentenceEmbedder, Summarizer, TextClassifier, TokenClassifier
from luminosity.errors import HandlerError
from luminosity.inference.handlers.text.plain.tokenizer import PlainTokenizer, read_plain, rules_of
from luminosity.inference.handlers.text.pretrained import Pretrained
from tests.inference.texts import MINILM, save_with_tokenizer, sentences, tiny_bert_config

pytestmark = pytest.mark.thorough

ODD = [
    "", " ", "\n\t", "a\x0bb", "a\x1fb", "a\x85b", "a\xa0b", "a\u200bb", "\ufeffa", "a\x00b", "e\u0301", "İstanbul",
    "ΑΣ ΑΣ", "한국어", "中文 和 日本語", "[MASK]", "a[SEP]b", "[cls]", "<s>", "a <mask> b", "##ing", "don't",
    "f(x)[0].y", "x" * 101, "naïve café — 你好 🙂", "👩\u200d👩\u200d👧", "ﬁ", "ß ẞ", "\u202eabc", "12.5e-3",
    "ALL CAPS", "a " * 600,
]  # fmt: skip

Change = Callable[[Path], Any]


def edit(folder: Path, name: str, **values: Any) -> None:
    path = folder / name
    content = json.loads(path.read_text())
    content = {**content, **values}
    path.write_text(json.dumps({key: value for key, value in content.items() if value != "REMOVED"}))


def specials(*tokens: str) -> list[tokenizers.AddedToken]:
    return [tokenizers.AddedToken(token, special=True, normalized=False) for token in tokens]


ROBERTA_TOKENS = ["<s>", "<pad>", "</s>", "<unk>", "<mask>"]
LETTERS = [chr(number) for number in range(97, 123)]


def save_roberta(folder: Path) -> None:
    alphabet = sorted(tokenizers.pre_tokenizers.ByteLevel.alphabet())
    vocab = {token: number for number, token in enumerate([*ROBERTA_TOKENS, *alphabet, "th", "the", "Ġthe"])}
    merges: Any = [("t", "h"), ("th", "e"), ("Ġ", "the")]
    transformers.RobertaTokenizer(vocab=vocab, merges=merges, model_max_length=40).save_pretrained(folder)
    _write_config(folder, "roberta", max_position_embeddings=42, pad_token_id=1)


def save_mpnet(folder: Path) -> None:
    vocab = {t: n for n, t in enumerate([*ROBERTA_TOKENS, "[UNK]", *LETTERS, *(f"##{each}" for each in LETTERS)])}
    transformers.MPNetTokenizer(vocab=vocab).save_pretrained(folder)
    _write_config(folder, "mpnet", max_position_embeddings=514, pad_token_id=1)


def save_xlm_roberta(folder: Path) -> None:
    pieces = [("<s>", 0.0), ("<pad>", 0.0), ("</s>", 0.0), ("<unk>", 0.0), ("▁", -2.0), ("▁the", -3.0)]
    vocab = [*pieces, *((letter, -5.0) for letter in LETTERS), ("<mask>", 0.0)]
    transformers.XLMRobertaTokenizer(vocab=vocab, model_max_length=512).save_pretrained(folder)
    _write_config(folder, "xlm-roberta", max_position_embeddings=514, pad_token_id=1)


def save_modernbert(folder: Path) -> None:
    shutil.copytree(MINILM, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("model.safetensors"))
    edit(folder, "tokenizer_config.json", tokenizer_class="PreTrainedTokenizerFast")
    _write_config(folder, "modernbert", max_position_embeddings=8192, pad_token_id=0)


def save_bert_again(folder: Path) -> None:
    transformers.AutoTokenizer.from_pretrained(MINILM).save_pretrained(folder)
    _write_config(folder, "bert", max_position_embeddings=512, pad_token_id=0)


def save_distilbert(folder: Path) -> None:
    transformers.DistilBertTokenizer.from_pretrained(MINILM, do_lower_case=False).save_pretrained(folder)
    _write_config(folder, "distilbert", max_position_embeddings=512)


def save_old_bert(folder: Path) -> None:
    """As old models have it: no class, and few settings."""
    save_minilm(folder)
    (folder / "tokenizer_config.json").write_text('{"do_lower_case": true, "model_max_length": 64}')
    os.remove(folder / "special_tokens_map.json")


def save_minilm(folder: Path) -> None:
    shutil.copytree(MINILM, folder, dirs_exist_ok=True, ignore=shutil.ignore_patterns("model.safetensors"))


def _write_config(folder: Path, model_type: str, **values: Any) -> None:
    (folder / "config.json").write_text(json.dumps({"model_type": model_type, "hidden_size": 32, **values}))


SAVED = [
    save_minilm, save_bert_again, save_old_bert, save_distilbert, save_mpnet, save_roberta, save_xlm_roberta,
    save_modernbert,
]  # fmt: skip


def check_same(plain: PlainTokenizer, whole: Any, texts: list[str], limit: int = 24) -> None:
    assert rules_of(plain.backend_tokenizer) == rules_of(whole.backend_tokenizer)
    for name in ("model_max_length", "bos_token_id", "cls_token_id", "eos_token_id", "pad_token_id"):
        assert getattr(plain, name) == getattr(whole, name), name
    assert set(plain.all_special_ids) == set(whole.all_special_ids)
    whole.truncation_side = "right"  # handlers choose the side themselves
    expected = whole(texts, truncation=True, max_length=limit, return_token_type_ids=True)
    backend = plain.backend_tokenizer
    backend.no_padding()
    backend.enable_truncation(limit)
    encodings = backend.encode_batch(texts)
    assert [encoding.ids for encoding in encodings] == expected["input_ids"]
    assert [encoding.type_ids for encoding in encodings] == expected["token_type_ids"]
    assert [encoding.attention_mask for encoding in encodings] == expected["attention_mask"]


@pytest.mark.parametrize("save", SAVED)
def test_common_encoders_are_read_without_transformers(save: Change, tmp_path: Path) -> None:
    save(tmp_path)
    source = Pretrained(str(tmp_path))
    plain = source.plain()
    assert plain is not None
    check_same(plain.tokenizer, source.tokenizer(), [*ODD, *sentences()])
    config = source.config()
    assert plain.config.max_position_embeddings == config.max_position_embeddings
    assert plain.config.hidden_size == config.hidden_size


@functools.cache
def pairs() -> list[tuple[Any, Any]]:
    """Return handlers that read the tokenizer without transformers, and the same with it."""
    found: list[tuple[Any, Any]] = []
    for handler in (SentenceEmbedder, TextClassifier, TokenClassifier):
        plain, usual = handler(MINILM, max_length=16), handler(MINILM, max_length=16)
        usual.reads_tokenizer_json = False
        assert isinstance(plain.tokenizer.whole, PlainTokenizer)
        assert not isinstance(usual.tokenizer.whole, PlainTokenizer)
        assert plain.prepare_key() == usual.prepare_key()
        found.append((plain, usual))
    return found


@given(texts=st.lists(st.text(max_size=40) | st.sampled_from(ODD), max_size=4))
@settings(deadline=None, max_examples=100, suppress_health_check=[HealthCheck.too_slow])
def test_handlers_prepare_any_text_as_with_transformers(texts: list[str]) -> None:
    for plain, usual in pairs():
        assert plain.prepare(texts) == usual.prepare(texts)


def new_token(folder: Path) -> None:
    edit(folder, "tokenizer_config.json", additional_special_tokens=["<extra>"])


def known_token(folder: Path) -> None:
    edit(folder, "tokenizer_config.json", additional_special_tokens=["[MASK]"])


def changed_normalizer(folder: Path) -> None:
    rules = json.loads((folder / "tokenizer.json").read_text())["normalizer"]
    edit(folder, "tokenizer.json", normalizer={**rules, "lowercase": False})


def unknown_class(folder: Path) -> None:
    edit(folder, "tokenizer_config.json", tokenizer_class="AlbertTokenizer")


def added_tokens_file(folder: Path) -> None:
    (folder / "added_tokens.json").write_text('{"<new>": 30522}')


def other_cls(folder: Path) -> None:
    edit(folder, "special_tokens_map.json", cls_token="[PAD]")


CHANGES: list[tuple[Change, bool]] = [
    (lambda folder: edit(folder, "tokenizer_config.json", do_lower_case=False), False),
    (lambda folder: edit(folder, "tokenizer_config.json", strip_accents=True), False),
    (lambda folder: edit(folder, "tokenizer_config.json", tokenize_chinese_chars=False), False),
    (lambda folder: edit(folder, "tokenizer_config.json", split_special_tokens=True), False),
    (lambda folder: edit(folder, "special_tokens_map.json", mask_token="[NEW]"), False),
    (lambda folder: edit(folder, "tokenizer_config.json", model_max_length=17), True),
    (lambda folder: edit(folder, "tokenizer_config.json", model_max_length="REMOVED"), True),
    (lambda folder: edit(folder, "tokenizer_config.json", padding_side="left", truncation_side="left"), True),
    (lambda folder: edit(folder, "tokenizer_config.json", tokenizer_class="BertTokenizerFast"), True),
    (lambda folder: edit(folder, "tokenizer_config.json", eos_token="[SEP]"), True),
    (lambda folder: edit(folder, "tokenizer.json", post_processor=None), False),
    (lambda folder: edit(folder, "tokenizer.json", pre_tokenizer={"type": "Whitespace"}), False),
    (lambda folder: edit(folder, "config.json", model_type="albert"), False),
    (lambda folder: edit(folder, "config.json", max_position_embeddings="REMOVED"), False),
    (lambda folder: os.remove(folder / "tokenizer.json"), False),
    (lambda folder: os.remove(folder / "tokenizer_config.json"), False),
    (new_token, False),
    (known_token, True),
    (changed_normalizer, False),
    (unknown_class, False),
    (added_tokens_file, False),
    (other_cls, False),
]


@pytest.mark.parametrize(("change", "is_plain"), CHANGES)
def test_files_that_transformers_reads_otherwise_are_left_to_it(change: Change, is_plain: bool, tmp_path: Path) -> None:
    save_minilm(tmp_path)
    change(tmp_path)
    source = Pretrained(str(tmp_path))
    plain = source.plain()
    assert (plain is not None) == is_plain
    if plain is not None:
        check_same(plain.tokenizer, source.tokenizer(), [*ODD, *sentences(40)])


@pytest.mark.parametrize("save", SAVED)
@pytest.mark.parametrize(
    "change",
    [
        {"do_lower_case": False},
        {"add_prefix_space": True},
        {"add_prefix_space": False},
        {"trim_offsets": False},
        {"cls_token": "</s>"},
        {"unk_token": "<pad>"},
        {"strip_accents": False},
        {"tokenizer_class": "TokenizersBackend"},
        {"tokenizer_class": "BertTokenizer"},
        {"tokenizer_class": "RobertaTokenizer"},
        {"extra_special_tokens": ["<s>"]},
        {"add_bos_token": True, "add_eos_token": True},
    ],
    ids=str,
)
def test_no_change_gives_other_rules_than_transformers(save: Change, change: dict[str, Any], tmp_path: Path) -> None:
    save(tmp_path)
    edit(tmp_path, "tokenizer_config.json", **change)
    source = Pretrained(str(tmp_path))
    plain = source.plain()
    if plain is not None:
        check_same(plain.tokenizer, source.tokenizer(), ODD)


@pytest.mark.parametrize("arguments", [{"trust_remote_code": True}, {"gguf_file": "model.gguf"}])
def test_loading_arguments_that_need_transformers(arguments: dict[str, Any]) -> None:
    assert Pretrained(MINILM, arguments).plain() is None


def test_a_model_in_the_cache_of_the_hub(tmp_path: Path) -> None:
    repository = tmp_path / "models--org--encoder"
    snapshot = repository / "snapshots" / ("a" * 40)
    snapshot.mkdir(parents=True)
    save_minilm(snapshot)
    (repository / "refs").mkdir()
    (repository / "refs" / "main").write_text("a" * 40)
    source = Pretrained("org/encoder", {"cache_dir": str(tmp_path)})
    assert source.file("tokenizer.json") == str(snapshot / "tokenizer.json")
    assert source.file("other.json") is None
    assert source.file("1_Pooling/config.json") == str(snapshot / "1_Pooling" / "config.json")
    plain = source.plain()
    assert plain is not None
    check_same(plain.tokenizer, source.tokenizer(), ODD)


def test_generators_with_a_tokenizer_of_encoders_decode_with_transformers() -> None:
    assert Summarizer(MINILM).plain is None


def test_a_tokenizer_that_differs_is_found_before_the_model_is_loaded(
    tmp_path: Path, monkeypatch: pytest.MonkeyPatch
) -> None:
    folder = save_with_tokenizer(transformers.BertModel(tiny_bert_config()), tmp_path)
    handler = SentenceEmbedder(folder, device="CPU")
    handler.packs_rows = False  # a packed model does not import transformers
    list(handler.run_inference(["same"], handler.load_model()))
    changed = transformers.BertTokenizer.from_pretrained(folder, do_lower_case=False)
    monkeypatch.setattr(Pretrained, "tokenizer", lambda self: changed)
    with pytest.raises(HandlerError, match=r"differs from the one that transformers .*reads_tokenizer_json = False"):
        handler.load_model()
    handler.reads_tokenizer_json = False
    handler.forget()
    list(handler.run_inference(["other"], handler.load_model()))


def test_a_model_without_files_is_not_plain(tmp_path: Path) -> None:
    assert read_plain(Pretrained(str(tmp_path))) is None
