"""Reads the tokenizers of common encoders without transformers, whose import takes seconds in every worker.

transformers does not use ``tokenizer.json`` as it is: it reads ``tokenizer_config.json`` as well, and most of its
classes build the tokenizer anew from the vocabulary. So this module knows what these classes build. If the file has
exactly that, the library ``tokenizers`` reads it. In every other case the answer is None, and transformers is needed.
"""

from __future__ import annotations

import json
from collections.abc import Mapping
from dataclasses import dataclass
from typing import Any, Protocol, cast

from luminosity.extras import require

__all__ = ["PADDED_POSITIONS", "PlainConfig", "PlainModel", "PlainTokenizer", "read_plain", "rules_of"]

# Token positions of these models start after the padding's.
PADDED_POSITIONS = ("camembert", "longformer", "mpnet", "roberta", "xlm-roberta", "xlm-roberta-xl")

_NO_LIMIT = int(1e30)  # the ``model_max_length`` of transformers for a tokenizer without one

# The classes that AutoTokenizer chooses if a model's files name no ``tokenizer_class``. If they name one, that one is
# built instead; but ModernBERT always has the general class.
_GENERAL = "TokenizersBackend"
_CLASS_OF_MODEL = {
    "bert": "BertTokenizer",
    "distilbert": "BertTokenizer",
    "electra": "BertTokenizer",
    "modernbert": _GENERAL,
    "mpnet": "MPNetTokenizer",
    "roberta": "RobertaTokenizer",
    "xlm-roberta": "XLMRobertaTokenizer",
}
_BERT_TOKENS = {
    "unk_token": "[UNK]",
    "sep_token": "[SEP]",
    "pad_token": "[PAD]",
    "cls_token": "[CLS]",
    "mask_token": "[MASK]",
}
_ROBERTA_TOKENS = {
    "bos_token": "<s>",
    "eos_token": "</s>",
    "sep_token": "</s>",
    "cls_token": "<s>",
    "unk_token": "<unk>",
    "pad_token": "<pad>",
    "mask_token": "<mask>",
}
_DEFAULT_TOKENS = {
    "BertTokenizer": _BERT_TOKENS,
    "DistilBertTokenizer": _BERT_TOKENS,
    "MPNetTokenizer": {**_ROBERTA_TOKENS, "unk_token": "[UNK]"},
    "RobertaTokenizer": _ROBERTA_TOKENS,
    "XLMRobertaTokenizer": _ROBERTA_TOKENS,
    _GENERAL: {},
}
_NAMED_TOKENS = (*_ROBERTA_TOKENS,)

# Settings whose effect this module knows; a file with any other needs transformers.
_KNOWN_SETTINGS = {
    *_NAMED_TOKENS,
    "add_bos_token",
    "add_eos_token",
    "add_prefix_space",
    "added_tokens_decoder",
    "additional_special_tokens",
    "backend",
    "clean_up_tokenization_spaces",
    "do_basic_tokenize",
    "do_lower_case",
    "errors",
    "extra_special_tokens",
    "is_local",
    "local_files_only",
    "max_len",
    "max_length",
    "model_input_names",
    "model_max_length",
    "name_or_path",
    "never_split",
    "pad_to_multiple_of",
    "pad_token_type_id",
    "padding_side",
    "special_tokens_map_file",
    "stride",
    "strip_accents",
    "tokenize_chinese_chars",
    "tokenizer_class",
    "tokenizer_file",
    "trim_offsets",
    "truncation_side",
    "truncation_strategy",
}


class _Files(Protocol):
    """The files of a model."""

    def json(self, name: str) -> Any: ...

    def file(self, name: str) -> str | None: ...


@dataclass(frozen=True)
class PlainTokenizer:
    """A tokenizer of the library ``tokenizers`` with the attributes of transformers' tokenizers that handlers need."""

    backend_tokenizer: Any
    model_max_length: int
    bos_token_id: int | None
    cls_token_id: int | None
    eos_token_id: int | None
    pad_token_id: int | None
    all_special_ids: list[int]
    is_fast: bool = True


@dataclass(frozen=True)
class PlainConfig:
    """The settings of an encoder that preparing its texts needs, with the names of transformers' configurations."""

    model_type: str
    max_position_embeddings: int
    hidden_size: int | None
    pad_token_id: int | None

    def get_text_config(self) -> PlainConfig:
        """Return this configuration: these encoders take nothing but text."""
        return self


@dataclass(frozen=True)
class PlainModel:
    """A model's tokenizer and configuration, read without transformers."""

    tokenizer: PlainTokenizer
    config: PlainConfig


def read_plain(files: _Files) -> PlainModel | None:
    """Return a model's tokenizer and configuration, or None if they need transformers."""
    config, settings = files.json("config.json"), files.json("tokenizer_config.json")
    path = files.file("tokenizer.json")
    if config is None or settings is None or path is None or files.file("added_tokens.json") is not None:
        return None
    kind = _class_of(config, settings)
    plain_config = _plain_config(config)
    if kind is None or plain_config is None or not settings.keys() <= _KNOWN_SETTINGS:
        return None
    backend = require("tokenizers", "transformers").Tokenizer.from_file(path)
    rules = json.loads(backend.to_str())
    if rules["padding"] is not None:  # names the token if nothing else does
        settings = {"pad_token": rules["padding"]["pad_token"], **settings}
    names = _named_tokens(kind, settings, files.json("special_tokens_map.json"))
    if names is None or not _has_tokens(rules, settings, names) or not _is_built_alike(kind, rules, settings, names):
        return None
    limit = settings.get("model_max_length", settings.get("max_len"))
    ids = {name: backend.token_to_id(token) for name, token in names.items()}
    extra = [backend.token_to_id(token) for token in _extra_tokens(settings) or ()]
    tokenizer = PlainTokenizer(
        backend,
        _NO_LIMIT if limit is None else int(limit),
        *(ids.get(name) for name in ("bos_token", "cls_token", "eos_token", "pad_token")),
        all_special_ids=sorted({*ids.values(), *extra}),
    )
    return PlainModel(tokenizer, plain_config)


def rules_of(backend: Any) -> dict[str, Any]:
    """Return everything that a tokenizer does to a text, except padding and truncation, which depend on its use."""
    rules: dict[str, Any] = json.loads(backend.to_str())
    return {name: rule for name, rule in rules.items() if name not in ("decoder", "padding", "truncation")}


def _class_of(config: Mapping[str, Any], settings: Mapping[str, Any]) -> str | None:
    """Return the class that AutoTokenizer builds, or None if it is not one of those that this module knows."""
    by_model = _CLASS_OF_MODEL.get(config.get("model_type", ""))
    if by_model is None or "auto_map" in settings:
        return None
    named = settings.get("tokenizer_class") or config.get("tokenizer_class")
    if named is None or by_model == _GENERAL:
        return by_model
    if named in ("PreTrainedTokenizerFast", _GENERAL):
        return _GENERAL
    name = str(named).removesuffix("Fast")
    return name if name in _DEFAULT_TOKENS else None


def _plain_config(config: Mapping[str, Any]) -> PlainConfig | None:
    """Return the configuration, or None if a value is missing for which transformers has its own default."""
    positions, pad, width = (config.get(name) for name in ("max_position_embeddings", "pad_token_id", "hidden_size"))
    has_pad = isinstance(pad, int) or config["model_type"] not in PADDED_POSITIONS
    if not (isinstance(positions, int) and (width is None or isinstance(width, int)) and has_pad):
        return None
    return PlainConfig(config["model_type"], positions, width, pad)


def _content(token: Any) -> str | None:
    """Return the text of a token, or None if it is neither a string nor a saved ``AddedToken``."""
    if isinstance(token, dict):
        token = cast("dict[str, Any]", token).get("content")
    return token if isinstance(token, str) else None


def _named_tokens(kind: str, settings: Mapping[str, Any], saved_map: Any) -> dict[str, str] | None:
    """Return the special tokens by name, or None if one of them can't be told."""
    named = {**_DEFAULT_TOKENS[kind], **{name: settings[name] for name in _NAMED_TOKENS if name in settings}}
    if "added_tokens_decoder" not in settings:  # only older models use the file
        saved = cast("dict[str, Any]", saved_map or {})
        if not saved.keys() <= set(_NAMED_TOKENS):
            return None
        named |= saved
    found = {name: _content(token) for name, token in named.items() if token is not None}
    if None in found.values() or not found.keys() >= _DEFAULT_TOKENS[kind].keys():
        return None
    return cast("dict[str, str]", found)


def _extra_tokens(settings: Mapping[str, Any]) -> list[str] | None:
    """Return the further special tokens, or None if one of them can't be told."""
    extra: Any = settings.get("extra_special_tokens") or settings.get("additional_special_tokens") or []
    if not isinstance(extra, list):
        return None
    contents = [_content(token) for token in cast("list[Any]", extra)]
    return None if None in contents else cast("list[str]", contents)


def _has_tokens(rules: Mapping[str, Any], settings: Mapping[str, Any], names: Mapping[str, str]) -> bool:
    """Return whether transformers would add no token to those in the file, and would change none of them."""
    added = {token["id"]: {**token} for token in rules["added_tokens"]}
    for token in added.values():
        del token["id"]
    special = {token["content"] for token in added.values() if token["special"]}
    extra = _extra_tokens(settings)
    if extra is None or not {*names.values(), *extra} <= special:
        return False
    decoder = settings.get("added_tokens_decoder")
    return decoder is None or {int(number): token for number, token in decoder.items()} == added


def _is_built_alike(kind: str, rules: Mapping[str, Any], settings: Mapping[str, Any], names: Mapping[str, str]) -> bool:
    """Return whether the file has the same parts as the tokenizer that this class builds from its vocabulary."""
    if rules["post_processor"] is None:
        return False  # transformers makes one
    if kind == _GENERAL:
        return True  # this class uses the file as it is
    vocabulary = rules["model"].get("vocab")
    numbers = vocabulary
    if isinstance(vocabulary, list):
        numbers = {token: number for number, (token, _) in enumerate(cast("list[tuple[str, float]]", vocabulary))}
    if any(numbers.get(token["content"]) != token["id"] for token in rules["added_tokens"]):
        return False
    built = _built(kind, settings, names, numbers)
    if kind == "XLMRobertaTokenizer" and (rules["normalizer"] or {}).get("type") == "Precompiled":
        built["normalizer"] = rules["normalizer"]  # this class takes it from the file, and no other
    parts = ("normalizer", "post_processor", "pre_tokenizer")
    return _without_vocabulary(built["model"]) == _without_vocabulary(rules["model"]) and all(
        built[part] == rules[part] for part in parts
    )


def _without_vocabulary(model: Mapping[str, Any]) -> dict[str, Any]:
    return {name: value for name, value in model.items() if name not in ("merges", "vocab")}


def _built(
    kind: str, settings: Mapping[str, Any], names: Mapping[str, str], numbers: Mapping[str, int]
) -> dict[str, Any]:
    """Return the rules of the tokenizer that a class of transformers builds, with a vocabulary of little."""
    library = require("tokenizers", "transformers")
    cls, sep = ((names[name], numbers[names[name]]) for name in ("cls_token", "sep_token"))
    model: Any
    if kind in ("BertTokenizer", "DistilBertTokenizer", "MPNetTokenizer"):
        unknown = names["unk_token"]
        built = library.Tokenizer(library.models.WordPiece({unknown: 0}, unk_token=unknown))
        built.normalizer = library.normalizers.BertNormalizer(
            clean_text=True,
            handle_chinese_chars=settings.get("tokenize_chinese_chars", True),
            strip_accents=settings.get("strip_accents"),
            lowercase=settings.get("do_lower_case", True),
        )
        built.pre_tokenizer = library.pre_tokenizers.BertPreTokenizer()
        if kind == "MPNetTokenizer":
            built.post_processor = library.processors.RobertaProcessing(sep, cls, True, False)
        else:
            built.post_processor = library.processors.TemplateProcessing(
                single=f"{cls[0]}:0 $A:0 {sep[0]}:0",
                pair=f"{cls[0]}:0 $A:0 {sep[0]}:0 $B:1 {sep[0]}:1",
                special_tokens=[cls, sep],
            )
    elif kind == "RobertaTokenizer":
        has_space, trims = settings.get("add_prefix_space", False), settings.get("trim_offsets", True)
        model = library.models.BPE(
            vocab={}, merges=[], dropout=None, continuing_subword_prefix="", end_of_word_suffix="", fuse_unk=False
        )
        built = library.Tokenizer(model)
        built.pre_tokenizer = library.pre_tokenizers.ByteLevel(add_prefix_space=has_space)
        built.post_processor = library.processors.RobertaProcessing(sep, cls, trims, has_space)
    else:
        begin, end = ((names[name], numbers[names[name]]) for name in ("bos_token", "eos_token"))
        space = "always" if settings.get("add_prefix_space", True) else "never"
        # The model needs a vocabulary in which its unknown token has a place.
        model = library.models.Unigram([(str(number), 0.0) for number in range(4)], unk_id=3, byte_fallback=False)
        built = library.Tokenizer(model)
        built.pre_tokenizer = library.pre_tokenizers.Sequence(
            [
                library.pre_tokenizers.WhitespaceSplit(),
                library.pre_tokenizers.Metaspace(replacement="▁", prepend_scheme=space),
            ]
        )
        built.post_processor = library.processors.TemplateProcessing(
            single=[begin[0], "$A", end[0]],
            pair=[begin[0], "$A", end[0], end[0], "$B", end[0]],
            special_tokens=[begin, end],
        )
    return json.loads(built.to_str())
