"""The tokenizers that transformers builds for language models: those of Llama's kind."""

from __future__ import annotations

import hashlib
import json
from collections.abc import Callable, Mapping
from dataclasses import dataclass
from functools import cache
from importlib.metadata import PackageNotFoundError, version
from typing import Any, cast

from luminosity.extras import require
from luminosity.inference.handlers.text.plain.encoders import GENERAL

__all__ = ["DECODERS", "DECODER_TOKENS", "class_of_decoder", "rebuild_decoder", "rebuilds_tokenizers"]

DECODERS = ("llama", "mistral", "qwen2", "qwen3")
"""The types of models that this module knows."""
_END = "<|endoftext|>"
DECODER_TOKENS: Mapping[str, Mapping[str, str]] = {
    "GPT2Tokenizer": {"unk_token": _END, "bos_token": _END, "eos_token": _END},
    "LlamaTokenizer": {"unk_token": "<unk>", "bos_token": "<s>", "eos_token": "</s>"},
    "Qwen2Tokenizer": {"unk_token": _END, "eos_token": _END, "pad_token": _END},
    GENERAL: {},
}
"""The special tokens of each class if the files name no others."""
_REBUILDING = "5"  # this version of transformers builds the tokenizer anew; earlier ones use the file as it is
_QWEN_WORDS = "1ff7f41064896984db5d1bb6ff64fa4bc29007d08c1b439e505b7392777a319e"
"""The digest of the regular expression by which Qwen's tokenizers find words."""

_MARKS = ("lstrip", "normalized", "rstrip", "single_word")  # settings of an added token


@dataclass(frozen=True)
class _Recipe:
    """What a class builds around its vocabulary."""

    flags: Mapping[str, Any]
    normalizer: Any
    pre_tokenizer: Any
    decoder: Any


def class_of_decoder(family: str, named: str | None, rules: Mapping[str, Any]) -> str | None:
    """Return the class that AutoTokenizer builds for a language model, or None if this module does not know it.

    Args:
        family: the type of the model, one of ``DECODERS``.
        named: the class that the model's files name.
        rules: the content of ``tokenizer.json``.
    """
    name = named if named in (None, "PreTrainedTokenizerFast") else str(named).removesuffix("Fast")
    is_of_bytes = any(_has_type(rules[part], "ByteLevel") for part in ("pre_tokenizer", "decoder", "post_processor"))
    if family == "mistral" or (name == "LlamaTokenizer" and is_of_bytes):
        return GENERAL
    if family == "qwen2":
        return "Qwen2Tokenizer"
    if name is None:
        return GENERAL if family == "llama" else "Qwen2Tokenizer"
    if name == "PreTrainedTokenizerFast":
        return GENERAL
    return name if name in DECODER_TOKENS else None


def rebuild_decoder(kind: str, backend: Any, rules: Mapping[str, Any], settings: Mapping[str, Any]) -> bool:
    """Turn a tokenizer that was read from its file into the one that a class builds; return whether that is possible.

    ``rules``: everything that the tokenizer does, as :func:`rules_of` returns it.
    """
    is_rebuilt = rebuilds_tokenizers()
    if rules["post_processor"] is None and is_rebuilt:
        processors = require("tokenizers.processors", "transformers")
        backend.post_processor = processors.TemplateProcessing(single="$A:0", pair="$A:0 $B:1", special_tokens=[])
    if kind == GENERAL:
        return True
    if rules["model"].get("type") != "BPE" or not _are_numbered_in_order(rules):
        return False
    recipe = _RECIPES[kind](rules, settings)
    if recipe is None:
        return False
    if not is_rebuilt:
        return _makes_the_same(recipe, rules)
    for name, value in recipe.flags.items():
        setattr(backend.model, name, value)
    backend.normalizer, backend.pre_tokenizer = recipe.normalizer, recipe.pre_tokenizer
    backend.decoder = recipe.decoder
    return True


@cache
def rebuilds_tokenizers() -> bool:
    """Return whether the installed transformers builds these tokenizers anew."""
    try:
        return version("transformers").partition(".")[0] == _REBUILDING
    except PackageNotFoundError:
        return False


def _are_numbered_in_order(rules: Mapping[str, Any]) -> bool:
    """Return whether added tokens would get the same numbers once more: those of the vocabulary, or the next ones."""
    numbers: Mapping[str, int] = rules["model"]["vocab"]
    following = len(numbers)
    for token in sorted(rules["added_tokens"], key=lambda token: token["id"]):
        if numbers.get(token["content"]) == token["id"]:
            continue
        if token["content"] in numbers or token["id"] != following:
            return False
        following += 1
    return True


def _flags(**others: Any) -> dict[str, Any]:
    usual = {"dropout": None, "unk_token": None, "continuing_subword_prefix": "", "end_of_word_suffix": ""}
    return {**usual, "fuse_unk": False, "byte_fallback": False, "ignore_merges": False, **others}


def _gpt2(rules: Mapping[str, Any], settings: Mapping[str, Any]) -> _Recipe:
    library = require("tokenizers", "transformers")
    before = library.pre_tokenizers.ByteLevel(add_prefix_space=bool(settings.get("add_prefix_space")))
    return _Recipe(_flags(), None, before, library.decoders.ByteLevel())


def _qwen2(rules: Mapping[str, Any], settings: Mapping[str, Any]) -> _Recipe | None:
    library = require("tokenizers", "transformers")
    words = _pattern(rules["pre_tokenizer"])
    is_of_qwen = words is not None and hashlib.sha256(words.encode()).hexdigest() == _QWEN_WORDS
    # The class adds special tokens once more, as plain ones.
    if not is_of_qwen or any(each["special"] and any(map(each.get, _MARKS)) for each in rules["added_tokens"]):
        return None
    steps = library.pre_tokenizers
    has_space = bool(settings.get("add_prefix_space"))
    before = steps.Sequence(
        [
            steps.Split(library.Regex(words), behavior="isolated", invert=False),
            steps.ByteLevel(add_prefix_space=has_space, use_regex=False),
        ]
    )
    return _Recipe(_flags(), library.normalizers.NFC(), before, library.decoders.ByteLevel())


def _llama(rules: Mapping[str, Any], settings: Mapping[str, Any]) -> _Recipe:
    library = require("tokenizers", "transformers")
    adds_space = settings.get("add_prefix_space") is not False
    scheme = ("always" if settings.get("legacy", False) else "first") if adds_space else "never"
    before = library.pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=scheme, split=False)
    decoders = library.decoders
    after = [decoders.Replace("▁", " "), decoders.ByteFallback(), decoders.Fuse()]
    after += [decoders.Strip(content=" ", left=1)] if adds_space else []
    flags = _flags(continuing_subword_prefix=None, end_of_word_suffix=None, fuse_unk=True, byte_fallback=True)
    return _Recipe(flags, None, before, decoders.Sequence(after))


_RECIPES: Mapping[str, Callable[[Mapping[str, Any], Mapping[str, Any]], _Recipe | None]] = {
    "GPT2Tokenizer": _gpt2,
    "LlamaTokenizer": _llama,
    "Qwen2Tokenizer": _qwen2,
}


def _makes_the_same(recipe: _Recipe, rules: Mapping[str, Any]) -> bool:
    """Return whether a recipe makes the same ids as the file."""
    found = {name: rules["model"].get(name) or None for name in recipe.flags}
    if found != {name: value or None for name, value in recipe.flags.items()}:
        return False
    parts = {"normalizer": recipe.normalizer, "pre_tokenizer": recipe.pre_tokenizer}
    return all(_of_ids(rules[name]) == _of_ids(_told(part)) for name, part in parts.items())


def _told(part: Any) -> Any:
    """Return what a part of a tokenizer does, as its file says it."""
    return None if part is None else json.loads(part.__getstate__())


def _of_ids(rule: Any) -> Any:
    """Return a rule without what only moves offsets."""
    if isinstance(rule, dict):
        given = cast("dict[str, Any]", rule)
        return {name: _of_ids(value) for name, value in given.items() if name != "trim_offsets"}
    return [_of_ids(each) for each in cast("list[Any]", rule)] if isinstance(rule, list) else rule


def _pattern(rule: Any) -> str | None:
    """Return the regular expression of the first step of a sequence that splits words, or None."""
    steps: list[Any] = (rule or {}).get("pretokenizers") or []
    return steps[0].get("pattern", {}).get("Regex") if steps and steps[0].get("type") == "Split" else None


def _has_type(rule: Any, kind: str) -> bool:
    """Return whether a rule, or one inside it, is of this type."""
    if isinstance(rule, dict):
        given = cast("dict[str, Any]", rule)
        return given.get("type") == kind or any(_has_type(value, kind) for value in given.values())
    return isinstance(rule, list) and any(_has_type(each, kind) for each in cast("list[Any]", rule))
