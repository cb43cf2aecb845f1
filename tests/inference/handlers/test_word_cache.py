from __future__ import annotations

import functools
import json
from typing import Any

import pytest
from hypothesis import HealthCheck, given, settings
from hypothesis import strategies as st
from tokenizers import Tokenizer as Backend
from transformers import AutoTokenizer

from luminosity.inference.handlers.text import tokens
from luminosity.inference.handlers.text.tokens import Tokenizer, WordCache
from tests.inference.texts import MINILM, sentences

# Texts in which pieces could be joined, or could differ from Python's own split.
TRICKY = [
    "a\x0bb", "a\x0cb", "a\x1cb", "a\x1fb", "a\x85b", "a\xa0b", "a\u2028b", "a\u200bb", "a\ufeffb",
    "a\u3000b", "a\x00b", "a\ufffdb", "\x00", "\u0301", "e \u0301", "e\u0301", "İ", "ΑΣ ΑΣ",
    "\u1112\u1161 \u11ab", "한국어", "中文 和", "[MASK]", "a[MASK]b", "[mask]", "[ MASK ]", "##ing",
    "_snake_case_", "f(x)[0].y", "don't", "x" * 99, "x" * 101, "%-10s", "12.5e-3", "\t", "\n", "\r", " ", "",
    "\x7f", "ﬁ", "🙂", "a🙂b", "\u202e", "ß", "ẞ",
]  # fmt: skip
pieces = st.one_of(st.sampled_from(TRICKY), st.text(max_size=12), st.text("ab.[]( \n\x0b\u0301", max_size=12))
texts = st.lists(st.lists(pieces, max_size=12).map(" ".join) | st.lists(pieces, max_size=12).map("".join), max_size=5)


@pytest.fixture(scope="module")
def cached() -> Tokenizer:
    return Tokenizer(AutoTokenizer.from_pretrained(MINILM), 16)


@pytest.fixture(scope="module")
def plain() -> Backend:
    backend = Backend.from_file(f"{MINILM}/tokenizer.json")
    backend.no_padding()
    backend.enable_truncation(16)
    return backend


def ids(backend: Backend, texts: list[str]) -> list[list[int]]:
    return [encoding.ids for encoding in backend.encode_batch(texts)]


def changed(**parts: Any) -> Backend:
    recipe = json.loads(Backend.from_file(f"{MINILM}/tokenizer.json").to_str())
    backend = Backend.from_str(json.dumps({**recipe, **parts}))
    backend.no_padding()
    backend.no_truncation()
    return backend


@functools.cache
def with_normalizer(lower: bool, clean: bool) -> tuple[Backend, WordCache]:
    normalizer = {"type": "BertNormalizer", "clean_text": clean, "handle_chinese_chars": clean, "lowercase": lower}
    backend = changed(normalizer={**normalizer, "strip_accents": None})
    cache = WordCache.of(backend, None, "right")
    assert cache is not None
    return backend, cache


@settings(max_examples=600, deadline=None, suppress_health_check=[HealthCheck.function_scoped_fixture])
@given(texts=texts)
def test_ids_are_the_tokenizers_own(cached: Tokenizer, plain: Backend, texts: list[str]) -> None:
    assert cached.ids(texts).to_pylist() == ids(plain, texts)


@pytest.mark.parametrize("lower", [True, False])
@pytest.mark.parametrize("clean", [True, False])
@settings(max_examples=150, deadline=None)
@given(texts=texts)
def test_with_other_settings_of_the_normaliser(lower: bool, clean: bool, texts: list[str]) -> None:
    backend, cache = with_normalizer(lower, clean)

    found, counts = cache.ids(texts)

    expected = ids(backend, texts)
    assert counts.tolist() == [len(each) for each in expected]
    assert found.tolist() == [token for each in expected for token in each]


def test_real_texts_of_any_length_at_several_limits() -> None:
    texts = [*sentences(300), "word " * 5000, "\x00 " * 300 + "end", "ä " * 300, "word.word" * 300]
    for limit in (3, 16, 256, None):
        tokenizer = Tokenizer(AutoTokenizer.from_pretrained(MINILM), limit)
        plain = Backend.from_file(f"{MINILM}/tokenizer.json")
        plain.no_padding()
        plain.no_truncation() if limit is None else plain.enable_truncation(limit)
        for _ in range(2):  # new words, then known ones
            assert tokenizer.ids(texts).to_pylist() == ids(plain, texts)


def test_a_full_table_starts_anew(monkeypatch: pytest.MonkeyPatch, plain: Backend) -> None:
    monkeypatch.setattr(tokens, "_MOST_STRINGS", 50)
    tokenizer = Tokenizer(AutoTokenizer.from_pretrained(MINILM), 16)

    for start in range(0, 200, 10):
        batch = sentences(200)[start : start + 10]
        assert tokenizer.ids(batch).to_pylist() == ids(plain, batch)


def test_a_text_that_is_no_unicode_fails_and_others_then_do_not(plain: Backend) -> None:
    tokenizer = Tokenizer(AutoTokenizer.from_pretrained(MINILM), 16)

    with pytest.raises((TypeError, UnicodeError)):
        tokenizer.ids(["good", "b\ud800d"])

    assert tokenizer.ids(["good bad"]).to_pylist() == ids(plain, ["good bad"])


@pytest.mark.parametrize(
    "parts",
    [
        {"pre_tokenizer": {"type": "Metaspace", "replacement": "_", "prepend_scheme": "always", "split": True}},
        {"normalizer": {"type": "Replace", "pattern": {"String": " "}, "content": "_"}},
        {"added_tokens": [{"id": 1, "content": "a b", "special": True, "single_word": False, "lstrip": False,
                           "rstrip": False, "normalized": False}]},
        {"post_processor": None},
    ],
    ids=["pre-tokeniser", "normaliser", "added token with a space", "no special tokens"],
)  # fmt: skip
def test_other_tokenizers_go_the_plain_way(parts: dict[str, Any]) -> None:
    assert WordCache.of(changed(), None, "right") is not None
    assert WordCache.of(changed(**parts), None, "right") is None
    assert WordCache.of(changed(), None, "left") is None
